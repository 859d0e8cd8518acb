#!/usr/bin/env bash
# Builds the sdist and the wheel in dist/, installs the wheel in a fresh environment, and runs README's
# example there, with the 6M target, because the wheel has no 20M. The wheel must be below 15 MB.
set -euo pipefail
cd "$(dirname "$0")/../.."
readme=$PWD/README.md
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet build
rm -rf dist
"$place/venv/bin/python" -m build --outdir dist . >"$place/log" 2>&1 || { tail -n 30 "$place/log" >&2 && exit 1; }
wheel=$(echo dist/*.whl)
bytes=$(stat -c %s "$wheel")
echo "$wheel: $((bytes / 1000000)) MB"
[ "$bytes" -lt 15000000 ]
"$place/venv/bin/python" -m pip install --quiet "$wheel"
cd "$place"
venv/bin/python - "$readme" <<'PY'
import pathlib, re, sys

example = re.search(r"```python\n(.*?)```", pathlib.Path(sys.argv[1]).read_text(), re.DOTALL)[1]
exec(example.replace('"20m"', '"6m"'))
PY
