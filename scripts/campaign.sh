#!/usr/bin/env bash
# The paper's experiment at its own size on open text: trains the ladder and makes every table and figure on it, stage by stage.
# Stop it at any time (Ctrl-C, kill, a lost machine); the same command goes on from there. Where a stage fails or is stopped, those
# that do not need it still run.
#
#   scripts/campaign.sh DATA WORK [STAGE ...]
#
# DATA holds the sentences: train-* and heldout-*, text with one sentence a line, plain, .gz or .xz; or, in place of train-*, a
# folder packed/ that `python -m spectr_jax.pack` wrote. Only pack and the trainings read those. WORK gets everything; where
# WORK/ladder has an earlier campaign's weights, name the stages to be made on them. In order; without a name, all of them:
#
#   pack                                      tokenizer of 8,192 pieces, uint16 shards
#   speed                                     time of a training step of each size, from which follow the steps that fit
#   train_2m train_6m train_20m train_97m     as configs/campaign.py says; then the weights go to WORK/ladder, 2M and 6M in
#                                             bfloat16, 20M and 97M in int8, in files of at most 16 MB
#   tables                                    SpecTr's Tables 2 and 4, with the rows of the exact plan
#   quality                                   bits per character on held-out sentences, in float32, bfloat16 and int8
#   latency                                   SpecTr's Tables 1 and 3, and where the time of a call goes
#   fastest                                   which method is fastest, one text at once and 32
#   trees                                     all methods at equal numbers of nodes, ERSD's Figures 3 and 4
#   figures                                   SpecTr's Figure 5
#   peers                                     against Hugging Face transformers, where PEERS names an interpreter that has it
#   collect                                   WORK/back: all that is worth keeping, in files of at most 16 MB
#
# In the environment:
#   MINUTES            that this call may take; it stops what runs in time, and ends with status 75
#   LIMITS             minutes of a stage over all calls, where others than below are wanted: "train_97m=20 trees=5"; a training
#                      takes the steps that fit, and is not stopped if they take longer
#   STEPS              of every training, without asking `speed`
#   FLAGS_<STAGE>      more flags of a stage: FLAGS_tables="--config.num_prompts=100"; FLAGS_train, FLAGS_export of all trainings;
#                      FLAGS_train_97m="--config.init=FOLDER/target_97m" goes on from what an earlier campaign brought back, and
#                      "--config.steps=N" lets one that is under way end, its rate at zero, at step N
#   PYTHON             an interpreter with all that requirements.txt names; without it .venv is made
#   SPECTR_JAX_COMMIT  to name in the tables, where there is no .git
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # PYTHON may not have the package itself.
stages=(pack speed train_2m train_6m train_20m train_97m tables quality latency fastest trees figures peers collect)
declare -A model=([train_2m]=draft_2m [train_6m]=draft_6m [train_20m]=draft_20m [train_97m]=target_97m)
declare -A stored=([draft_2m]=bfloat16 [draft_6m]=bfloat16 [draft_20m]=int8 [target_97m]=int8)
declare -A limit=([pack]=10 [speed]=3 [train_2m]=3 [train_6m]=3 [train_20m]=5 [train_97m]=12 [tables]=15 [quality]=3
  [latency]=5 [fastest]=8 [trees]=15 [figures]=3 [peers]=10 [collect]=1)
left_out=64 # The status of a stage that has nothing to do in this call, and may have in another.

fail() {
  echo "error: $1" >&2
  exit 2
}
[ $# -ge 2 ] || fail "give DATA and WORK: scripts/campaign.sh DATA WORK [STAGE ...]"
data=$1 work=$2
shift 2
[ -d "$data" ] || fail "DATA '$data' is no folder; give one with heldout-*, and train-* or packed/"
compgen -G "$data/heldout-*" >/dev/null || fail "DATA '$data' has no heldout-*; put held-out sentences there, one a line"
for pair in ${LIMITS:-}; do
  [[ $pair =~ ^([a-z_0-9]+)=([0-9.]+)$ && -n ${limit[${BASH_REMATCH[1]}]:-} ]] ||
    fail "LIMITS has '$pair'; give STAGE=MINUTES with a stage of: ${stages[*]}"
  limit[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
done
for stage in "$@"; do
  [ -n "${limit[$stage]:-}" ] || fail "there is no stage '$stage'; give some of: ${stages[*]}"
done
[ $# -eq 0 ] || stages=("$@")
case " ${stages[*]} " in *" pack "* | *" train_"*)
  [ -d "$data/packed" ] || compgen -G "$data/train-*" >/dev/null ||
    fail "DATA '$data' has no train-* and no packed/; put text there"
  ;;
esac
[[ ${MINUTES:-1} =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "MINUTES is '$MINUTES'; give a number of minutes, such as 9"
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
  local stage=$1 used=0 most left begun status=0
  shift
  [ -z "$stopping" ] || return 75
  [ ! -e "$state/$stage.seconds" ] || used=$(<"$state/$stage.seconds")
  most=${limit[$stage]}
  [ -z "${model[$stage]:-}" ] || most=1e6 # Its limit is in its steps.
  left=$(awk "BEGIN {a = 60 * $most - $used; b = $end - 40 - $(date +%s); print int(a < b ? a : b)}")
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
  [ -z "${STEPS:-}" ] || { echo "left out: STEPS is set" && return $left_out; }
  # shellcheck disable=SC2086
  within speed "$PYTHON" scripts/dev/bench_train.py --data="$data/heldout-*" --tokenizer="$packed/tokenizer.model" --dtype=bfloat16 \
    --optimizer=muon --batch_sizes=256,256,256,256 --rounds=2 --seconds=3 --workdir="$results/training" ${FLAGS_speed:-}
}
steps_of() { # STAGE: the steps that fit its limit beside start, compilation, evaluation and export, at most those of the config
  local steps=${STEPS:-}
  [ ! -e "$state/$1.steps" ] || steps=$(<"$state/$1.steps")
  local measured=$results/training/training.json
  [ -n "$steps" ] || [ -e "$measured" ] || fail "the time of a training step is not known; run the stage speed, or give STEPS"
  [ -n "$steps" ] || steps=$("$PYTHON" - "$measured" "${model[$1]}" "${limit[$1]}" <<'EOF'
import json, sys
from configs.campaign import get_config
path, model, minutes = sys.argv[1:]
seconds = next(row["step_seconds"] for row in json.load(open(path))["rows"] if row["model"] == model)
print(max(1, min(get_config(model).steps, int((60 * float(minutes) - 90) / (1.1 * seconds)))))
EOF
  ) || return
  echo "$steps" | tee "$state/$1.steps"
}
train() { # STAGE
  local more="FLAGS_$1" name=${model[$1]} steps
  steps=$(steps_of "$1") || return
  # shellcheck disable=SC2086
  within "$1" "$PYTHON" -m spectr_jax.train --config="configs/campaign.py:$name" --workdir="$runs/$name" \
    --config.data.train="packed:$packed" --config.data.tokenizer="$packed/tokenizer.model" \
    --config.data.heldout="$data/heldout-*" --config.steps="$steps" ${FLAGS_train:-} ${!more:-} || return
  # At once: what comes later may not come.
  # shellcheck disable=SC2086
  within "$1" "$PYTHON" -m spectr_jax.export --model="$runs/$name" --out="$ladder" --dtype="${stored[$name]}" --part_mb=15.9 \
    ${FLAGS_export:-}
}
train_2m() { train train_2m; }
train_6m() { train train_6m; }
train_20m() { train train_20m; }
train_97m() { train train_97m; }
untrained() { # The models that are not in the ladder.
  local name
  for name in "${model[@]}"; do compgen -G "$ladder/$name*.safetensors" >/dev/null || echo "$name"; done
}
pair=(--config.target="$ladder/target_97m" --config.prompts="$data/heldout-*")
quality() {
  local all="" name
  for name in draft_2m draft_6m draft_20m target_97m; do # Beside what is stored in int8 as it was trained, where that is at hand.
    [ "${stored[$name]}" != int8 ] || [ ! -e "$runs/$name/config.json" ] || all+="'$runs/$name',"
    all+="'$ladder/$name',"
  done
  eval_in quality quality "$results/quality" --config.models="($all)" --config.heldout="$data/heldout-*"
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
  [ -n "${PEERS:-}" ] || { echo "left out: PEERS is not set" && return $left_out; }
  # shellcheck disable=SC2086
  within peers "$PYTHON" scripts/dev/compare_peers.py --workdir="$results/peers" --target="$ladder/target_97m" \
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
  case $stage in tables | quality | latency | fastest | trees | figures | peers)
    missing=$(untrained | xargs)
    [ -z "$missing" ] || { echo "== $stage waits for: $missing" && unfinished+=("$stage") && continue; }
    ;;
  esac
  status=0
  "$stage" || status=$?
  case $status in
  0) touch "$state/$stage.done" && continue ;;
  "$left_out") continue ;;
  75) echo "== $stage was stopped in time" && unfinished+=("$stage") ;;
  *) echo "== $stage failed with status $status" && failed+=("$stage") ;;
  esac
  [ -z "$stopping" ] || break
  if [ "$stage" = pack ]; then # All else needs it.
    [ "${stages[-1]}" != collect ] || collect || failed+=(collect)
    break
  fi
done
[ ${#unfinished[@]} -eq 0 ] ||
  echo "unfinished: ${unfinished[*]}; the same command goes on (a stage past its limit needs LIMITS=\"STAGE=MINUTES\")"
[ ${#failed[@]} -eq 0 ] || fail "failed (see above): ${failed[*]}; mend that, and give the same command again"
[ ${#unfinished[@]} -eq 0 ] || exit 75
