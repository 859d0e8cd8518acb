#!/usr/bin/env bash
# Makes .venv with the locked versions, if it is not up to date: scripts/setup.sh [requirements file]
# For an accelerator: JAX='jax[cuda13]' or JAX='jax[tpu]' in the environment, of this script or of those that call it.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=${1:-requirements.txt}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old; set PYTHON to a Python of at least 3.11" >&2
  exit 2
}
stamp=.venv/$(basename "$wanted").installed
wanted_now() {
  cat requirements.txt "$wanted" requirements.lock scripts/setup.sh
  echo "${JAX:-}"
}
if ! wanted_now | cmp -s - "$stamp"; then
  echo "installing $wanted into .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # Python keeps the bytecode of what it imports: to compile all modules here, used or not, takes a third of the time.
  compile=${PYTHONDONTWRITEBYTECODE:+--compile}
  install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check "${compile:---no-compile}")
  "${install[@]}" -r "$wanted" ${JAX:+"$JAX"} -c requirements.lock
  "${install[@]}" --no-deps -e .  # For scripts, and for use as a library.
  wanted_now >"$stamp"
fi
