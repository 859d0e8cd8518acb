#!/usr/bin/env bash
# Sets up and runs lint, types and tests, but for the longest of them; --all runs every test.
# Other flags go to pytest, which then runs all that they select: scripts/test.sh tests/transport -k kseq
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- -m "not slow"
all=""
[ "$1" != --all ] || { all=1; shift; }
scripts/setup.sh requirements-dev.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# mypy runs in parallel with the tests because it uses one core; its output is printed last.
types=$(mktemp)
trap 'kill $! 2>/dev/null || true; rm -f "$types"' EXIT
.venv/bin/mypy >"$types" 2>&1 &
status=0
.venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadgroup --no-loadscope-reorder "$@" || status=$?
if [ -n "$all" ]; then
  # The tests above lower XLA's optimisation. Exactness is about rounding, so these use users' settings.
  XLA_DEFAULTS=1 .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadgroup \
    -k "whole_outputs or greedy or two_tokens or test_cpu or products" \
    tests/decoding/test_{methods,vocabularies}.py tests/models/test_{cpu,quantized,dense}.py || status=$?
  # Shapes and dtypes of annotations, checked in every call.
  .venv/bin/python -m pytest -n "${WORKERS:-2}" -m "not slow" tests/transport/test_draw.py \
    tests/decoding/test_{drafting,scoring,multipath,layer,policy}.py \
    --jaxtyping-packages=spectr_jax.transport,spectr_jax.decoding,beartype.beartype || status=$?
fi
wait $! || status=$?
cat "$types"
exit "$status"
