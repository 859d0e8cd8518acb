#!/usr/bin/env bash
# Installs packages into an environment: scripts/install.sh .venv -r requirements.txt
# Uses uv, which takes half the time, and pip where uv is not available or fails.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python
shift
pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
for uv in "$(dirname "$python")/uv" .venv/bin/uv; do
  [ ! -x "$uv" ] || break
done
[ -x "$uv" ] || { "${pip[@]}" uv && uv=$(dirname "$python")/uv; } 2>/dev/null || true
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
export UV_INDEX=${PIP_EXTRA_INDEX_URL:-} ${index:+"UV_DEFAULT_INDEX=$index"}
"$uv" pip install --quiet --python "$python" "$@" 2>/dev/null || "${pip[@]}" "$@"
