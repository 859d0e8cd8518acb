#!/usr/bin/env bash
# The main job on the embedded models: makes an environment, installs, and prints the table of tokens per serial call.
# A quarter of an hour on two CPU cores, installation included. Flags go to the evaluation: scripts/demo.sh --config.num_prompts=32
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
exec .venv/bin/python -m spectr_jax.eval --config=configs/demo.py --workdir="${WORKDIR:-runs/demo}" "$@"
