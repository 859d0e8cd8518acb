#!/usr/bin/env bash
# Makes an environment and runs scripts/train_ladder.py there, which says what the flags are: scripts/train_ladder.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements.txt
exec .venv/bin/python scripts/train_ladder.py "$@"
