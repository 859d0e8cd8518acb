#!/usr/bin/env bash
# Sets up and runs lint, types and tests. Flags go to pytest: scripts/test.sh tests/transport -k kseq
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh requirements-dev.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadgroup "$@"
