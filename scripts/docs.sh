#!/usr/bin/env bash
# Renders the documentation as a static site: scripts/docs.sh [FOLDER], runs/docs by default.
set -euo pipefail
case "${1:-}" in -*) sed -n '2s/^# //p' "$0" && exit 2 ;; esac
folder=$(realpath -m "${1:-$(dirname "$0")/../runs/docs}")
cd "$(dirname "$0")/.."
scripts/setup.sh requirements-docs.txt
exec env JAX_PLATFORMS=cpu .venv/bin/python scripts/dev/docs.py "$folder"
