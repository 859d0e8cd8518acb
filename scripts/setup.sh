#!/usr/bin/env bash
# Makes .venv with the locked versions, if it is not up to date: scripts/setup.sh [requirements file]
# For an accelerator: JAX='jax[cuda13]' or JAX='jax[tpu]' in the environment, of this script and of all that call it. Then
# jax and flax are the newest that requirements.txt allows, and not the locked ones: with those some methods do not compile for a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=${1:-requirements.txt}
[ -f "$wanted" ] || {
  echo "error: no requirements file $wanted; give requirements.txt, requirements-dev.txt or requirements-docs.txt" >&2
  exit 2
}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old; set PYTHON to a Python of at least 3.11" >&2
  exit 2
}
stamp=.venv/$(basename "$wanted").installed
wanted_now() {
  cat requirements.txt "$wanted" requirements.lock scripts/setup.sh scripts/install.sh pyproject.toml setup.py spectr_jax/models/layers/cpu/*.{cc,h}
  echo "${JAX:-}"
}
if ! wanted_now | cmp -s - "$stamp"; then
  echo "installing $wanted into .venv"
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  sed ${JAX:+-e '/^jax/d' -e '/^flax/d'} -e '' requirements.lock >.venv/constraints.txt
  scripts/install.sh .venv -r "$wanted" ${JAX:+--upgrade "$JAX"} -c .venv/constraints.txt
  rm -f spectr_jax/models/layers/cpu/_products*.so  # Those of another source or Python, which would be loaded.
  scripts/install.sh .venv --no-deps -e .  # For scripts, and for use as a library.
  compgen -G 'spectr_jax/models/layers/cpu/_products*.so' >/dev/null ||
    echo "note: without a C++ compiler there are no CPU kernels, and decoding on a CPU is slower; install one (Debian: g++)" >&2
  # Bytecode is compiled afterwards, by all cores and without what is seldom imported: installers take longer for it.
  seldom='/tests?/|/transformers/(models|generation|integrations|pipelines)/|/site-packages/(pip|mypyc?|setuptools)/'
  .venv/bin/python -m compileall -q -j 0 -x "$seldom" .venv/lib >/dev/null || true
  wanted_now >"$stamp"
fi
