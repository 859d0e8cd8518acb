#!/usr/bin/env bash
# Regenerates the tables and figures of the published models: four to six hours on two idle cores.
#
#     HELDOUT='corpus/heldout-*.txt.xz' scripts/dev/remake_tables.sh runs/tables [NAME ...]      # demo, ladder/trees, ...
#
# NAME is a folder under results/; a suffix after a colon names one of several tables there. Ctrl-C stops the script, or
# SIGTERM to its process group. The same command resumes and skips finished tables, so give other weights another folder.
# SmolLM2's tables are made only if they are named, and need its package (docs/models.md). At the end:
# cp -r runs/tables/. results/, then fix the pages until tests/test_figures_on_pages.py passes. PYTHON names another
# interpreter. Not made here: results/sample, latency, spec_bench, smollm2/drafts/chats and the tables of scripts/dev
# (results/README.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?the folder that gets the tables}
out=${out%/} heldout=${HELDOUT:-}
wanted=" ${*:2} " python=${PYTHON:-.venv/bin/python} known=" "
if [[ ( $wanted == "  " || $wanted == *" quality "* ) && -z $heldout ]]; then
  echo "quality needs HELDOUT, held-out sentences" >&2; exit 2
fi

evaluated() {  # NAME CONFIG FLAG...
  known+="$1 "
  if [[ $wanted != *" $1 "* && ( $wanted != "  " || $1 == *smollm2* ) ]]; then return; fi
  echo "== $1"
  "$python" -m spectr_jax.eval --config="configs/$2" --workdir="$out/${1%%:*}" "${@:3}"
}

pair=(--config.target=20m --config.draft=2m)
evaluated quality quality.py --config.heldout="$heldout" --config.sentences=5000 --config.batch_size=16 \
  --config.models="('2m','6m','20m','97m')"
evaluated target_97m/cpu ladder.py:97m
evaluated target_97m/fastest_1 auto.py --config.target=97m --config.draft=6m --config.dtype=int8
evaluated demo demo.py:full
evaluated ladder ladder.py
evaluated ladder/greedy ladder.py --config.temperature=0 --config.seeds='(0,)' --config.num_drafts='(1,2)' \
  --config.methods="('otm_block','otm_layer')"
evaluated ladder/fastest_1 auto.py "${pair[@]}" --config.dtype=int8
evaluated ladder/fastest_32 auto.py "${pair[@]}" --config.batch_size=32 --config.num_prompts=32 \
  --config.dtype=bfloat16
evaluated ladder/trees trees.py "${pair[@]}" --config.sizes='(8,32)' --config.num_prompts=48 \
  --config.extra_trees="('4,1,1,1,1,1,1,1',)"
evaluated trees trees.py
evaluated frontier/97m frontier.py --config.target=97m --config.draft=6m --config.dtype=bfloat16 \
  --config.seeds='(0,1)' --config.batch_size=32
evaluated figures figures.py
evaluated ladder:figure figures.py --config.only="('spectr_figure_5',)" --config.target=20m --config.draft=6m
pair=(--config.target=smollm2 --config.draft=smollm2-draft --config.dtype=int8)
evaluated smollm2/ladder ladder.py:smollm2
evaluated smollm2/latency latency.py --config.dtype=bfloat16 --config.runs=100 --config.draft=smollm2-6m \
  --config.models="('smollm2','smollm2-6m')"
evaluated frontier/smollm2 frontier.py --config.target=smollm2 --config.draft=smollm2-draft \
  --config.dtype=bfloat16 --config.seeds='(0,)' --config.num_prompts=24 --config.batch_size=24
evaluated smollm2/fastest_1 auto.py "${pair[@]}"
evaluated smollm2/fastest_8 auto.py "${pair[@]}" --config.batch_size=8
for name in $wanted; do
  if [[ $known != *" $name "* ]]; then echo "no table is named $name; the tables:$known" >&2; exit 2; fi
done
