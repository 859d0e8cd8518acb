#!/usr/bin/env bash
# Trains the papers' ladder of models and makes its tables and figure, on one accelerator:
#
#     scripts/train_ladder.sh runs/lm1b                                     # on LM1B, after scripts/prepare_lm1b.sh
#     DATA='my_text/train-*' HELDOUT='my_text/held*' scripts/train_ladder.sh runs/open
#     FLAGS='--config.steps=20000' scripts/train_ladder.sh runs/lm1b train_2m train_6m
#
# The stages are pack, train_2m, train_6m, train_20m and train_97m (each also exports its weights to ladder/ in bfloat16),
# table2 (SpecTr's Tables 2 and 4), latency (Tables 1 and 3), quality, auto_1, auto_32, trees and figures. All of them run
# by default. Every program leaves finished work alone, so the same command resumes after Ctrl-C, or after SIGTERM to the
# process group. FLAGS are for the training or evaluation of each stage that runs. DATA may be packed:FOLDER; TFDS_DIR is
# where TFDS keeps LM1B, if not in its default folder.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?the folder that gets everything} stages=" ${*:2} " python=.venv/bin/python
recipe=$([ -n "${DATA:-}" ] && echo open_text || echo lm1b)
data=${DATA:-tfds:lm1b:train} heldout=${HELDOUT:-tfds:lm1b:test} packed=$work/packed
if [[ -n ${DATA:-} && -z ${HELDOUT:-} ]]; then echo "DATA needs HELDOUT, held-out text" >&2; exit 2; fi
if [[ $data == packed:* ]]; then packed=${data#packed:}; fi
read -ra flags <<<"${FLAGS:-}"
known="pack train_2m train_6m train_20m train_97m table2 latency quality auto_1 auto_32 trees figures"
for stage in $stages; do
  if [[ " $known " != *" $stage "* ]]; then echo "no stage is named $stage; the stages: $known" >&2; exit 2; fi
done
scripts/setup.sh requirements.txt

is_wanted() { [[ $stages == "  " || $stages == *" $1 "* ]]; }

table() {  # STAGE CONFIG FLAG...
  if is_wanted "$1"; then
    "$python" -m spectr_jax.eval --config="configs/$2.py" --workdir="$work/results/$1" "${@:3}" "${flags[@]}"
  fi
}

if is_wanted pack && [[ $data != packed:* ]]; then
  "$python" -m spectr_jax.pack --data="$data" --out="$packed" --tfds_dir="${TFDS_DIR:-}"
fi
for model in draft_2m draft_6m draft_20m target_97m; do
  if is_wanted "train_${model#*_}"; then
    "$python" -m spectr_jax.train --config="configs/$recipe.py:$model" --workdir="$work/$model" \
      --config.data.train="packed:$packed" --config.data.tokenizer="$packed/tokenizer.model" \
      --config.data.heldout="$heldout" --config.data.tfds_dir="${TFDS_DIR:-}" "${flags[@]}"
    "$python" -m spectr_jax.export --model="$work/$model" --out="$work/ladder"
  fi
done
ladder=$work/ladder drafts="'$work/ladder/draft_2m','$work/ladder/draft_6m','$work/ladder/draft_20m'"
models="('$ladder/target_97m',$drafts)" draft=--config.draft=$ladder/draft_6m dtype=--config.dtype=bfloat16
decoding=(--config.target="$ladder/target_97m" --config.prompts="$heldout" --config.tfds_dir="${TFDS_DIR:-}" "$dtype")
table table2 table2 "${decoding[@]}" --config.drafts="($drafts)" --config.batch_size=256 --config.num_prompts=1000
table latency latency --config.models="$models" "$draft" "$dtype"
table quality quality --config.models="$models" --config.heldout="$heldout" --config.tfds_dir="${TFDS_DIR:-}"
table auto_1 auto "${decoding[@]}" "$draft" --config.batch_size=1 --config.num_prompts=16
table auto_32 auto "${decoding[@]}" "$draft" --config.batch_size=32 --config.num_prompts=32
table trees trees "${decoding[@]}" "$draft" --config.batch_size=32 --config.num_prompts=256
table figures figures --config.only="('spectr_figure_5',)" "${decoding[0]}" "$draft"
