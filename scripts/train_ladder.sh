#!/usr/bin/env bash
# Sets up .venv and runs scripts/train_ladder.py; scripts/train_ladder.sh --help lists the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
exec .venv/bin/python scripts/train_ladder.py "$@"
