#!/usr/bin/env bash
# All that only a GPU can say, in at most nine minutes a call: scripts/dev/gpu.sh [PART...] [--toy]
#   flags         methods under sets of XLA flags, and with cuDNN's attention
#   tests         pytest -m gpu
#   speed         methods and trees for 1, 8, 32 and 250 sequences of the 97M
#   tables        SpecTr's Tables 1 and 3, then 2 and 4
#   large         methods on the shapes of an 8B target
# Each part has its time, and all have $SECONDS_IN_ALL (540). What is measured is kept in $OUT (runs/gpu): the same command
# continues, and leaves out parts that are done. With --toy all parts rehearse on a CPU. Needs the packages of
# requirements.txt. results/target_97m (100 MB) is read by speed and tables. On a borrowed machine: one call a part, with
# the weights that it reads.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-runs/gpu} python=${PYTHON:-python3} toy="" parts=()
for argument; do
  if [ "$argument" = --toy ]; then toy=--toy; else parts+=("$argument"); fi
done
[ ${#parts[@]} -gt 0 ] || parts=(flags tests speed tables large)
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TF_CPP_MIN_LOG_LEVEL=2

# limited N COMMAND: runs a command for at most N seconds, or what is left. A part is done if all of its commands are.
limited() {
  local left=$((${SECONDS_IN_ALL:-540} - SECONDS)) limit=$1
  shift
  [ -z "$toy" ] || limit=600 left=600
  timeout --kill-after=5 $((left < limit ? (left > 0 ? left : 1) : limit)) "$@" || failed=1
}

eval_() {  # SECONDS CONFIG NAME FLAGS...: a table of spectr_jax.eval, which continues where it was stopped
  local seconds=$1 config=$2 name=$3
  shift 3
  limited "$seconds" "$python" -m spectr_jax.eval --config="$config" --workdir="$out/$name" "$@"
}

timed() {  # PART SECONDS FLAGS...: rows of gpu.py
  local part=$1 seconds=$2
  shift 2
  limited "$seconds" "$python" scripts/dev/gpu.py --part="$part" --workdir="$out" $toy "$@"
}

flags() {
  local graphs="--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1"
  local sets=("default" "graphs of loops|$graphs" "no graphs|--xla_gpu_enable_command_buffer=")
  [ -z "$toy" ] || sets=("default")
  for set in "${sets[@]}"; do
    label=${set%%|*} given=""
    [ "$set" = "$label" ] || given=${set#*|}
    XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }$given" timed flags 70 --label="$label"
  done
  SPECTR_JAX_ATTENTION=cudnn timed flags 70 --label=cudnn
}

tests() {
  local workers=()
  ! "$python" -c "import xdist" 2>/dev/null || workers=(-n "$(($(nproc) / 2))")
  export XLA_PYTHON_CLIENT_PREALLOCATE=false  # Workers share the GPU.
  limited 150 "$python" -m pytest -m gpu -p no:cacheprovider -q "${workers[@]}" tests/test_gpu.py
  unset XLA_PYTHON_CLIENT_PREALLOCATE
}

speed() {
  timed speed 170 --seconds=140
}

tables() {
  if [ -n "$toy" ]; then
    eval_ 300 configs/latency.py latency --config.models="('6m','2m')" --config.draft=2m \
      --config.methods="('spectr',)" --config.runs=3 --config.batch_sizes="(1,2)"
    eval_ 400 configs/ladder.py ladder --config.num_prompts=4 --config.batch_size=4 --config.max_new_tokens=8 \
      --config.drafts="('2m',)" --config.num_drafts="(2,)" --config.draft_lengths="(4,)" --config.seeds="(0,)"
    return
  fi
  local target=97m
  eval_ 60 configs/latency.py latency --config.models="('$target','6m')" --config.draft=6m \
    --config.dtype=bfloat16 --config.methods="('spectr','otm_layer')" --config.runs=300
  eval_ 240 configs/ladder.py:97m ladder --config.num_prompts=250 --config.batch_size=250 --config.max_new_tokens=64
}

large() {
  timed large 110 --seconds=80
}

status=0
for part in "${parts[@]}"; do
  case $part in flags | tests | speed | tables | large) ;; *)
    echo "error: part $part is not known; give some of flags, tests, speed, tables, large" >&2 && exit 2 ;;
  esac
done
for part in "${parts[@]}"; do
  [ ! -e "$out/$part.done" ] || { echo "$part: done before" && continue; }
  failed="" began=$SECONDS
  $part >"$out/$part.log" 2>&1
  tail -n 40 "$out/$part.log"
  if [ -z "$failed" ]; then touch "$out/$part.done"; else status=1; fi
  echo "$part: ${failed:+not }done in $((SECONDS - began)) s, $out/$part.log"
done
exit $status
