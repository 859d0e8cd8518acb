#!/usr/bin/env bash
# The paper's experiment at its own size on open text: trains the ladder and makes every table and figure on it, stage by stage.
# Stop it at any time (Ctrl-C, kill, a lost machine); the same command goes on from there. Where a stage fails, those that do not
# need it still run.
#
#   scripts/campaign.sh DATA WORK [STAGE ...]
#
# DATA holds the sentences: train-* and heldout-*, text with one sentence a line, plain, .gz or .xz; or, in place of train-*, a
# folder packed/ that `python -m spectr_jax.pack` wrote. WORK gets everything. The stages, in order; without a name, all of them:
#
#   pack                                      tokenizer of 8,192 pieces, uint16 shards
#   speed                                     time of a training step of each size, from which follow the steps that fit
#   train_2m train_6m train_20m train_97m     as configs/campaign.py says
#   export                                    weights: 2M and 6M in bfloat16, 20M and 97M in int8, in files of at most 16 MB
#   quality                                   bits per character on held-out sentences, in float32, bfloat16 and int8
#   tables                                    SpecTr's Tables 2 and 4, with the rows of the exact plan
#   latency                                   SpecTr's Tables 1 and 3, and where the time of a call goes
#   fastest                                   which method is fastest, one text at once and 32
#   trees                                     all methods at equal numbers of nodes, ERSD's Figures 3 and 4
#   figures                                   SpecTr's Figure 5
#   peers                                     against Hugging Face transformers, where PEERS names an interpreter that has it
#   collect                                   WORK/back: all that is worth keeping, in files of at most 16 MB
#
# In the environment:
#   MINUTES            that this call may take; it stops what runs in time, and ends with status 75
#   LIMITS             minutes of a stage over all calls, where others than below are wanted: "train_97m=20 trees=5"
#   STEPS              of every training, without asking `speed`
#   FLAGS_<STAGE>      more flags of a stage: FLAGS_tables="--config.num_prompts=100"; FLAGS_train of all trainings;
#                      FLAGS_train_97m="--config.init=FOLDER/target_97m" goes on from what an earlier campaign brought back
#   PYTHON             an interpreter with all that requirements.txt names; without it .venv is made
#   SPECTR_JAX_COMMIT  to name in the tables, where there is no .git
set -euo pipefail
cd "$(dirname "$0")/.."
stages=(pack speed train_2m train_6m train_20m train_97m export quality tables latency fastest trees figures peers collect)
declare -A model=([train_2m]=draft_2m [train_6m]=draft_6m [train_20m]=draft_20m [train_97m]=target_97m)
declare -A limit=([pack]=10 [speed]=3 [train_2m]=3 [train_6m]=3 [train_20m]=5 [train_97m]=12 [export]=3 [quality]=3
  [tables]=10 [latency]=5 [fastest]=8 [trees]=15 [figures]=3 [peers]=10 [collect]=1)

fail() {
  echo "error: $1" >&2
  exit 2
}
[ $# -ge 2 ] || fail "give DATA and WORK: scripts/campaign.sh DATA WORK [STAGE ...]"
data=$1 work=$2
shift 2
[ -d "$data" ] || fail "DATA '$data' is no folder; give one with heldout-*, and train-* or packed/"
compgen -G "$data/heldout-*" >/dev/null || fail "DATA '$data' has no heldout-*; put held-out sentences there, one a line"
[ -d "$data/packed" ] || compgen -G "$data/train-*" >/dev/null || fail "DATA '$data' has no train-* and no packed/; put text there"
for pair in ${LIMITS:-}; do
  [[ $pair =~ ^([a-z_0-9]+)=([0-9.]+)$ && -n ${limit[${BASH_REMATCH[1]}]:-} ]] ||
    fail "LIMITS has '$pair'; give STAGE=MINUTES with a stage of: ${stages[*]}"
  limit[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
done
for stage in "$@"; do
  [ -n "${limit[$stage]:-}" ] || fail "there is no stage '$stage'; give some of: ${stages[*]}"
done
[ $# -eq 0 ] || stages=("$@")
if [ -z "${PYTHON:-}" ]; then
  scripts/setup.sh requirements.txt
  PYTHON=.venv/bin/python
fi
state=$work/state runs=$work/runs results=$work/results ladder=$work/ladder
mkdir -p "$state" "$runs" "$results"
packed=$data/packed
[ -d "$packed" ] || packed=$work/packed
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$work/cache} # Compiled programs: what one stage compiles the next call need not.
end=$(awk "BEGIN {print int($(date +%s) + 60 * ${MINUTES:-1e6})}")

# Runs a command of stage $1 within what is left of its limit and of this call; 75 if it was stopped.
within() {
  local stage=$1 used=0 left begun status=0
  shift
  [ ! -e "$state/$stage.seconds" ] || used=$(<"$state/$stage.seconds")
  left=$(awk "BEGIN {a = 60 * ${limit[$stage]} - $used; b = $end - 40 - $(date +%s); print int(a < b ? a : b)}")
  [ "$left" -gt 5 ] || return 75
  begun=$(date +%s)
  timeout --kill-after=60 --signal=TERM "$left" "$@" &
  child=$!
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do # Our signal has ended the wait, and not yet the child.
    status=0
    wait "$child" || status=$?
  done
  echo $((used + $(date +%s) - begun)) >"$state/$stage.seconds"
  [ $status -ne 124 ] && [ $status -ne 137 ] && [ -z "$stopping" ] || status=75
  return $status
}
child= stopping=
trap 'stopping=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM

eval_in() { # STAGE CONFIG WORKDIR FLAG...
  local stage=$1 config=$2 workdir=$3 more="FLAGS_$1"
  shift 3
  [ ! -e "$workdir/done" ] || return 0
  # shellcheck disable=SC2086  # Several flags.
  within "$stage" "$PYTHON" -m spectr_jax.eval --config="configs/$config.py" --workdir="$workdir" "$@" ${!more:-} || return
  touch "$workdir/done"
}

pack() {
  [ ! -e "$packed/packed.json" ] || return 0
  [ "$packed" = "$work/packed" ] || fail "'$packed' has no packed.json; pack it again, or remove it to have it packed here"
  rm -rf "$packed" # Half of one.
  # shellcheck disable=SC2086
  within pack "$PYTHON" -m spectr_jax.pack --data="$data/train-*" --out="$packed" ${FLAGS_pack:-}
}
speed() {
  [ -z "${STEPS:-}" ] || return 0
  # shellcheck disable=SC2086
  within speed "$PYTHON" scripts/bench_train.py --data="$data/heldout-*" --tokenizer="$packed/tokenizer.model" --dtype=bfloat16 \
    --optimizer=muon --batch_sizes=256,256,256,256 --rounds=2 --seconds=3 --workdir="$results/training" ${FLAGS_speed:-}
}
steps_of() { # STAGE: the steps that fit its limit, with a tenth to spare, at most those of the config
  local steps=${STEPS:-}
  [ ! -e "$state/$1.steps" ] || steps=$(<"$state/$1.steps")
  local measured=$results/training/training.json
  [ -n "$steps" ] || [ -e "$measured" ] || fail "the time of a training step is not known; run the stage speed, or give STEPS"
  [ -n "$steps" ] || steps=$("$PYTHON" - "$measured" "${model[$1]}" "${limit[$1]}" <<'EOF'
import json, sys
from configs.campaign import get_config
path, model, minutes = sys.argv[1:]
seconds = next(row["step_seconds"] for row in json.load(open(path))["rows"] if row["model"] == model)
print(min(get_config(model).steps, int(0.9 * 60 * float(minutes) / seconds)))
EOF
  ) || return
  echo "$steps" | tee "$state/$1.steps"
}
train() { # STAGE
  local more="FLAGS_$1" steps
  steps=$(steps_of "$1") || return
  # shellcheck disable=SC2086
  within "$1" "$PYTHON" -m spectr_jax.train --config="configs/campaign.py:${model[$1]}" --workdir="$runs/${model[$1]}" \
    --config.data.train="packed:$packed" --config.data.tokenizer="$packed/tokenizer.model" \
    --config.data.heldout="$data/heldout-*" --config.steps="$steps" ${FLAGS_train:-} ${!more:-}
}
train_2m() { train train_2m; }
train_6m() { train train_6m; }
train_20m() { train train_20m; }
train_97m() { train train_97m; }
export_() {
  for name in draft_2m draft_6m; do
    within export "$PYTHON" -m spectr_jax.export --model="$runs/$name" --out="$ladder" --part_mb=15.9 || return
  done
  for name in draft_20m target_97m; do
    within export "$PYTHON" -m spectr_jax.export --model="$runs/$name" --out="$ladder" --dtype=int8 --part_mb=15.9 || return
  done
}
pair=(--config.target="$ladder/target_97m" --config.prompts="$data/heldout-*")
quality() {
  local all="('$runs/draft_2m','$runs/draft_6m','$runs/draft_20m','$ladder/draft_20m','$runs/target_97m','$ladder/target_97m')"
  eval_in quality quality "$results/quality" --config.models="$all" --config.heldout="$data/heldout-*"
}
tables() {
  eval_in tables table2 "$results/table2" "${pair[@]}" --config.dtype=bfloat16 --config.batch_size=250 \
    --config.drafts="('$ladder/draft_2m','$ladder/draft_6m','$ladder/draft_20m')"
}
latency() {
  eval_in latency latency "$results/latency" --config.dtype=bfloat16 --config.draft="$ladder/draft_6m" \
    --config.models="('$ladder/target_97m','$ladder/draft_20m','$ladder/draft_6m','$ladder/draft_2m')"
}
fastest() {
  for batch in 1 32; do
    eval_in fastest auto "$results/fastest_$batch" "${pair[@]}" --config.dtype=bfloat16 --config.draft="$ladder/draft_6m" \
      --config.batch_size=$batch --config.num_prompts=$((batch > 16 ? batch : 16)) || return
  done
}
trees() {
  eval_in trees trees "$results/trees" "${pair[@]}" --config.dtype=bfloat16 --config.draft="$ladder/draft_6m" \
    --config.num_prompts=256 --config.batch_size=32
}
figures() {
  # shellcheck disable=SC2086
  within figures "$PYTHON" -m spectr_jax.figures --workdir="$results/figures" --only=spectr_figure_5 \
    --target="$ladder/target_97m" --draft="$ladder/draft_6m" ${FLAGS_figures:-}
}
peers() {
  [ -n "${PEERS:-}" ] || { echo "left out: PEERS is not set" && return; }
  # shellcheck disable=SC2086
  within peers "$PYTHON" scripts/compare_peers.py --workdir="$results/peers" --target="$ladder/target_97m" \
    --draft="$ladder/draft_6m" --peers_python="$PEERS" --dtypes=float32,bfloat16 ${FLAGS_peers:-}
}
collect() { # What there is, finished or not.
  rm -rf "$work/back"
  mkdir -p "$work/back"
  for run in "$runs"/*/; do
    [ ! -e "$run/metrics.jsonl" ] || for file in metrics.jsonl loss.png config.json; do
      [ ! -e "$run/$file" ] || install -D "$run/$file" "$results/runs/$(basename "$run")/$file"
    done
  done
  mkdir -p "$results/minutes"
  for file in "$state"/*.seconds; do
    [ ! -e "$file" ] || awk '{printf "%.1f\n", $1 / 60}' "$file" >"$results/minutes/$(basename "$file" .seconds)"
  done
  tar -czf - -C "$work" results | split -b 15M -d - "$work/back/results.tar.gz-"
  [ ! -d "$ladder" ] || cp "$ladder"/* "$work/back/"
  ls -l "$work/back"
}

unfinished=() failed=()
for stage in "${stages[@]}"; do
  [ "$stage" = collect ] || [ ! -e "$state/$stage.done" ] || continue
  if [ "$(date +%s)" -ge $((end - 60)) ] && [ "$stage" != collect ]; then
    unfinished+=("$stage")
    continue
  fi
  echo "== $stage ($(date -u +%H:%M:%S))"
  status=0
  if [ "$stage" = export ]; then export_ || status=$?; else "$stage" || status=$?; fi
  case $status in
  0) touch "$state/$stage.done" && continue ;;
  75) echo "== $stage was stopped in time" && unfinished+=("$stage") ;;
  *) echo "== $stage failed with status $status" && failed+=("$stage") ;;
  esac
  [ -z "$stopping" ] || break
  # What comes after a training, or after the corpus, needs it.
  case $stage in pack | speed | train_* | export)
    [ "${stages[-1]}" != collect ] || collect || failed+=(collect)
    break
    ;;
  esac
done
[ ${#unfinished[@]} -eq 0 ] ||
  echo "unfinished: ${unfinished[*]}; the same command goes on (a stage past its limit needs LIMITS=\"STAGE=MINUTES\")"
[ ${#failed[@]} -eq 0 ] || fail "failed (see above): ${failed[*]}; mend that, and give the same command again"
[ ${#unfinished[@]} -eq 0 ] || exit 75
