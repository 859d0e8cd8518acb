#!/usr/bin/env bash
# Measures and tests what needs a GPU, in at most nine minutes a call: scripts/dev/gpu.sh [PART...] [--toy]
#   flags         methods under sets of XLA flags
#   speed         methods and trees for 1, 8, 32 and 250 sequences of the 97M
#   tables        SpecTr's Tables 1 and 3, then 2 and 4
#   large         methods on the shapes of an 8B target, on one device and split over all of them
#   tests         pytest -m gpu
# All parts together take at most $SECONDS_IN_ALL (540). Results are kept in $OUT (runs/gpu): the same command resumes,
# measures what is missing and repeats the tests. --toy rehearses all parts on a CPU. Needs the packages of
# requirements.txt; speed and tables also need the weights of `97m` (98 MB). On a borrowed machine run one part a call.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-runs/gpu} python=${PYTHON:-python3} toy="" parts=()
for argument; do
  case $argument in
    --toy) toy=--toy ;;
    flags | speed | tables | large | tests) parts+=("$argument") ;;
    *) echo "error: part $argument is not known; give some of flags, speed, tables, large, tests" >&2 && exit 2 ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(flags speed tables large tests)
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TF_CPP_MIN_LOG_LEVEL=2

limited() {  # SECONDS COMMAND: runs a command for at most these seconds, or those that are left
  local left=$((${SECONDS_IN_ALL:-540} - SECONDS)) limit=$1
  [ -z "$toy" ] || limit=600 left=600
  timeout --kill-after=5 $((left < limit ? (left > 0 ? left : 1) : limit)) "${@:2}" || failed=1
}
eval_() {  # SECONDS CONFIG NAME FLAGS...: a table of spectr_jax.eval
  limited "$1" "$python" -m spectr_jax.eval --config="configs/$2" --workdir="$out/$3" "${@:4}"
}
timed() {  # PART SECONDS FLAGS...: rows of gpu.py
  limited "$2" "$python" scripts/dev/gpu.py --part="$1" --workdir="$out" $toy "${@:3}"
}

flags() {
  local given=${XLA_FLAGS:+$XLA_FLAGS } command_buffer=--xla_gpu_enable_command_buffer
  timed flags 70
  if [ -z "$toy" ]; then
    XLA_FLAGS="$given$command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1" \
      timed flags 70 --label="graphs of loops"
    XLA_FLAGS="$given$command_buffer=" timed flags 70 --label="no graphs"
  fi
}

tests() {
  local workers=()
  ! "$python" -c "import xdist" 2>/dev/null || workers=(-n "$(($(nproc) / 2))")
  # Workers share the GPU's memory.
  XLA_PYTHON_CLIENT_PREALLOCATE=false limited 150 "$python" -m pytest -m gpu -p no:cacheprovider -q "${workers[@]}" \
    tests/test_gpu.py
}

speed() { timed speed 170 --seconds=140; }

tables() {
  if [ -n "$toy" ]; then
    eval_ 300 latency.py latency --config.models="('6m','2m')" --config.draft=2m \
      --config.methods="('spectr',)" --config.runs=3 --config.batch_sizes="(1,2)"
    eval_ 400 ladder.py ladder --config.num_prompts=4 --config.batch_size=4 --config.max_new_tokens=8 \
      --config.drafts="('2m',)" --config.num_drafts="(2,)" --config.draft_lengths="(4,)" --config.seeds="(0,)"
    return
  fi
  eval_ 60 latency.py latency --config.models="('97m','6m')" --config.draft=6m \
    --config.dtype=bfloat16 --config.methods="('spectr','otm_layer')" --config.runs=300
  eval_ 240 ladder.py:97m ladder --config.num_prompts=250 --config.batch_size=250 --config.max_new_tokens=64
}

large() {
  local devices
  timed large 110 --seconds=80
  devices=$("$python" -c "import jax; print(jax.device_count())")
  [ "$devices" -lt 2 ] || timed large 110 --seconds=80 --model_parallel="$devices" --label="$devices devices"
}

status=0
for part in "${parts[@]}"; do
  failed="" began=$SECONDS
  $part >"$out/$part.log" 2>&1
  tail -n 40 "$out/$part.log"
  [ -z "$failed" ] || status=1
  echo "$part: ${failed:+not }done in $((SECONDS - began)) s, $out/$part.log"
done
exit $status
