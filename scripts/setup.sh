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
  # uv takes half the time of pip, which does where uv cannot be had or fails.
  install() {
    "$@" -r "$wanted" ${JAX:+"$JAX"} -c requirements.lock && "$@" --no-deps -e .  # For scripts, and for use as a library.
  }
  pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
  [ -x .venv/bin/uv ] || "${pip[@]}" uv 2>/dev/null || true
  index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
  export UV_INDEX=${PIP_EXTRA_INDEX_URL:-} ${index:+"UV_DEFAULT_INDEX=$index"}
  install .venv/bin/uv pip install --quiet --python .venv/bin/python 2>/dev/null || install "${pip[@]}"
  # Bytecode is compiled afterwards, by all cores and without what is seldom imported: installers take longer for it.
  seldom='/tests?/|/transformers/(models|generation|integrations|pipelines)/|/site-packages/(pip|mypyc?|setuptools)/'
  .venv/bin/python -m compileall -q -j 0 -x "$seldom" .venv/lib >/dev/null || true
  wanted_now >"$stamp"
fi
