#!/usr/bin/env bash
# Makes LM1B ready for training, once: scripts/prepare_lm1b.sh [--data_dir=DIR] [--manual_dir=DIR]
# Downloads 1.7 GB from statmt.org, unpacks it (4.2 GB) and writes 30.6 million sentences as array records. TensorFlow is
# needed for this alone, and goes to an environment of its own, .venv-lm1b (1.8 GB; delete it and DIR/downloads afterwards).
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --help "*) sed -n '2,4s/^# //p' "$0" && exit ;; esac
venv=.venv-lm1b
packages=(
  "tensorflow-cpu>=2.16,<3; sys_platform == 'linux' and platform_machine == 'x86_64'"
  "tensorflow>=2.16,<3; sys_platform != 'linux' or platform_machine != 'x86_64'"
  tensorflow-datasets importlib_resources array_record
)
if ! cat "$0" scripts/install.sh requirements.lock | cmp -s - "$venv/installed"; then
  echo "installing TensorFlow into $venv"
  "${PYTHON:-python3}" -m venv "$venv"
  scripts/install.sh "$venv" "${packages[@]}" -c requirements.lock  # Bytecode is not compiled: few modules are imported.
  cat "$0" scripts/install.sh requirements.lock >"$venv/installed"
fi
exec "$venv/bin/python" scripts/prepare_lm1b.py "$@"
