#!/usr/bin/env bash
# Creates or updates .venv with the locked versions: scripts/setup.sh [REQUIREMENTS_FILE]
# For an accelerator set JAX='jax[cuda13]' or JAX='jax[tpu]', also for the scripts that call this
# one. jax and flax are then the newest that requirements.txt allows, because with the locked ones
# some methods do not compile for a GPU.
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
kernels=spectr_jax/models/layers/cpu
stamp=.venv/$(basename "$wanted").installed
wanted_now() {
  cat requirements.txt "$wanted" requirements.lock scripts/{setup,install}.sh pyproject.toml setup.py
  cat $kernels/*.{cc,h}
  echo "${JAX:-}"
}
if ! wanted_now | cmp -s - "$stamp"; then
  echo "installing $wanted into .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  sed ${JAX:+-e '/^jax/d' -e '/^flax/d'} -e '' requirements.lock >.venv/constraints.txt
  scripts/install.sh .venv -r "$wanted" ${JAX:+--upgrade "$JAX"} -c .venv/constraints.txt
  rm -f $kernels/_products*.so  # Kernels of another source or Python would be loaded.
  scripts/install.sh .venv --no-deps -e .
  compgen -G "$kernels/_products*.so" >/dev/null ||
    echo "note: no CPU kernels, decoding on a CPU is slower; install a C++ compiler (g++)" >&2
  # Compiling bytecode on all cores, without rarely imported modules, is faster than in pip.
  seldom='/tests?/|/transformers/(models|generation|integrations|pipelines)/'
  seldom+='|/site-packages/(pip|mypyc?|setuptools)/'
  .venv/bin/python -m compileall -q -j 0 -x "$seldom" .venv/lib >/dev/null || true
  wanted_now >"$stamp"
fi
