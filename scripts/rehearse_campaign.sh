#!/usr/bin/env bash
# Rehearses scripts/campaign.sh at toy size on a CPU, on sentences that it makes up: every stage but `speed` and `peers`, in five
# minutes. It tells whether the script works, and nothing about models.
#
#   scripts/rehearse_campaign.sh WORK [STAGE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?error: give WORK: scripts/rehearse_campaign.sh WORK [STAGE ...]}
shift
mkdir -p "$work/data"
if [ -z "${PYTHON:-}" ]; then
  scripts/setup.sh requirements.txt
  export PYTHON=.venv/bin/python
fi
for split in heldout train; do
  [ -e "$work/data/$split-0.txt" ] || "$PYTHON" - "$split" >"$work/data/$split-0.txt" <<'EOF'
import random, sys
words, draw = "draft target token law plan tree chain model accepts emits".split(), random.Random(sys.argv[1])
for index in range({"train": 900, "heldout": 60}[sys.argv[1]]):
    print(" ".join(draw.choices(words, k=draw.randint(3, 11))), f"{index}.")
EOF
done

export STEPS=20
export FLAGS_pack="--vocab_size=320 --length=32"
shape="--config.model.width=16 --config.model.mlp=32 --config.model.heads=2 --config.model.layers=1"
shape+=" --config.model.vocab_size=320 --config.model.context=32"
every="--config.log_every=5 --config.eval_every=10 --config.checkpoint_every=10"
export FLAGS_train="$shape $every --config.batch_size=8 --config.optimizer.warmup_steps=4"
texts="--config.prompt_tokens=3 --config.max_new_tokens=5 --config.seeds=(0,1) --config.num_prompts=5 --config.batch_size=4"
export FLAGS_quality="--config.sentences=50 --config.dtypes=('float32',)"
export FLAGS_tables="$texts --config.num_drafts=(1,2) --config.draft_lengths=(2,) --config.methods=('otm_block',)"
export FLAGS_trees="$texts --config.sizes=(1,) --config.draft_length=1 --config.extra_trees=('1',) --config.exit_layer=0"
export FLAGS_fastest="$texts --config.methods=('speculative',) --config.num_drafts=(1,) --config.draft_lengths=(1,2)"
FLAGS_fastest+=" --config.size=2 --config.tries=1"
export FLAGS_latency="--config.runs=2 --config.context=4 --config.lengths=(2,) --config.batch_sizes=(1,)"
FLAGS_latency+=" --config.methods=('spectr',) --config.num_drafts=2 --config.phase_batch_sizes=(1,)"
export FLAGS_figures="--draws=200 --prompt=draft"
exec scripts/campaign.sh "$work/data" "$work/campaign" "$@"
