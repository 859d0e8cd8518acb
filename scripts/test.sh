#!/usr/bin/env bash
# Runs lint, types and all tests but the slow ones; --all runs the slow ones too.
# Other flags go to pytest: scripts/test.sh tests/transport -k kseq
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- -m "not slow"
all=""
[ "$1" != --all ] || { all=1; shift; }
scripts/setup.sh requirements-dev.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# mypy uses one core and runs in parallel with the tests; its output is printed last.
types=$(mktemp)
trap 'kill $! 2>/dev/null || true; rm -f "$types"' EXIT
.venv/bin/mypy >"$types" 2>&1 &
status=0
tests() { .venv/bin/python -m pytest -n "${WORKERS:-2}" "$@" || status=$?; }
# Most tests lower XLA's optimization. These need users' settings, which change rounding.
only_with_defaults="whole_outputs or test_vocabularies or test_cpu or test_dense or test_one_model"
[ -z "$all" ] || set -- -k "not ($only_with_defaults)" "$@"
tests --dist loadgroup --no-loadscope-reorder "$@"
if [ -n "$all" ]; then
  XLA_DEFAULTS=1 tests --dist loadgroup -k "$only_with_defaults or test_methods and greedy"
  # Checks the shapes and dtypes of annotations in every call.
  tests -m "not slow" --jaxtyping-packages=spectr_jax.transport,spectr_jax.decoding,beartype.beartype \
    tests/transport/test_draw.py tests/decoding/test_{drafting,scoring,multipath,layer,policy}.py
fi
wait $! || status=$?
cat "$types"
exit "$status"
