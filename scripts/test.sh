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
tests() {
  .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadgroup --no-loadscope-reorder "$@" || status=$?
}
if [ -z "$all" ]; then
  tests "$@"
else
  # Every test runs once: with users' compiler settings, with a check of the shapes and dtypes of
  # annotations in every call, or as in the quick run.
  checked=(tests/transport/test_draw.py tests/decoding/test_{drafting,scoring,multipath,layer,policy}.py)
  XLA_DEFAULTS=1 tests -m defaults "$@"
  tests --jaxtyping-packages=spectr_jax.transport,spectr_jax.decoding,beartype.beartype \
    "${checked[@]}" "$@"
  tests -m "not defaults" "${checked[@]/#/--ignore=}" "$@"
fi
wait $! || status=$?
cat "$types"
exit "$status"
