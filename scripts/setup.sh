#!/usr/bin/env bash
# Creates or updates .venv with the locked versions: scripts/setup.sh [REQUIREMENTS_FILE]
# For an accelerator set JAX='jax[cuda13]' or JAX='jax[tpu]', also for the scripts that call this
# one, and use Python 3.12: with jax 0.10 of Python 3.11 some methods do not compile for a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=${1:-requirements.txt}
[ -f "$wanted" ] || {
  echo "error: $wanted: no such file; give a requirements file, such as requirements.txt" >&2
  exit 2
}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old; set PYTHON to a Python of at least 3.11" >&2
  exit 2
}
stamp=.venv/$(basename "$wanted").installed
wanted_now() {
  cat requirements.txt "$wanted" requirements.lock scripts/{setup,install}.sh pyproject.toml setup.py
  cat spectr_jax/models/layers/cpu/*.{cc,h}
  echo "${JAX:-}"
}
if ! wanted_now | cmp -s - "$stamp"; then
  echo "installing $wanted into .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  scripts/install.sh .venv -r "$wanted" ${JAX:+"$JAX"} -c requirements.lock
  scripts/install.sh .venv --no-deps -e .
  # Prints a note if there are no kernels.
  JAX_PLATFORMS=cpu .venv/bin/python -c 'from spectr_jax.models.layers import cpu; cpu.library()'
  # Compiling bytecode on all cores, without rarely imported modules, is faster than in pip.
  seldom='/tests?/|/transformers/(models|generation|integrations|pipelines)/'
  seldom+='|/site-packages/(pip|mypyc?|setuptools)/'
  .venv/bin/python -m compileall -q -j 0 -x "$seldom" .venv/lib >/dev/null || true
  wanted_now >"$stamp"
fi
