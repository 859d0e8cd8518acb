#!/usr/bin/env bash
# Makes .venv with the locked versions, if it is not up to date: scripts/setup.sh [requirements file]
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=${1:-requirements.txt}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old; set PYTHON to a Python of at least 3.11" >&2
  exit 2
}
stamp=.venv/$(basename "$wanted").installed
if ! cat requirements.txt "$wanted" requirements.lock | cmp -s - "$stamp"; then
  echo "installing $wanted into .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$wanted" -c requirements.lock
  cat requirements.txt "$wanted" requirements.lock >"$stamp"
fi
