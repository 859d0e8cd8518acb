#!/usr/bin/env bash
# The paper's experiment from LM1B to the table: tokenizer, four models, Tables 2 and 4. Stop it at any time (Ctrl-C, kill, a
# lost machine); the same command goes on from there. Flags go to all four trainings: scripts/train_ladder.sh --config.steps=20000
#
#   RUNS     where the models go (runs/lm1b)
#   RESULTS  where the table goes (results/table2)
#   EVAL     flags of the evaluation ("--config.num_prompts=200 ...")
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
runs=${RUNS:-runs/lm1b} results=${RESULTS:-results/table2}
models=(draft_2m draft_6m draft_20m target_97m)

for model in "${models[@]}"; do  # Those that are done end at once.
  .venv/bin/python -m spectr_jax.train --config="configs/lm1b/$model.py" --config.data.tokenizer="$runs/tokenizer.model" \
    --workdir="$runs/$model" "$@"
done

if [ -e "$results/tokens_per_call.json" ]; then
  echo "the table is done: $results/tokens_per_call.md"
  exit
fi
# shellcheck disable=SC2086  # EVAL holds several flags.
.venv/bin/python -m spectr_jax.eval --config=configs/table2.py --config.target="$runs/target_97m" \
  --config.drafts="('$runs/draft_2m','$runs/draft_6m','$runs/draft_20m')" --workdir="$results" ${EVAL:-}
