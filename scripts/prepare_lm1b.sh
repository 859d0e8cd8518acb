#!/usr/bin/env bash
# Prepares LM1B for training: scripts/prepare_lm1b.sh [--data_dir=DIR] [--manual_dir=DIR]
# Downloads 1.7 GB from statmt.org, unpacks 4.2 GB and writes 30.6 million sentences as array
# records. Only this needs TensorFlow, which gets its own environment, .venv-lm1b (1.8 GB). You can
# delete it and DIR/downloads afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --help "*) sed -n '2,5s/^# //p' "$0" && exit ;; esac
venv=.venv-lm1b
packages=(
  "tensorflow-cpu>=2.16,<3; sys_platform == 'linux' and platform_machine == 'x86_64'"
  "tensorflow>=2.16,<3; sys_platform != 'linux' or platform_machine != 'x86_64'"
  tensorflow-datasets importlib_resources array_record
)
if ! cat "$0" scripts/install.sh requirements.lock | cmp -s - "$venv/installed"; then
  echo "installing TensorFlow into $venv"
  "${PYTHON:-python3}" -m venv "$venv"
  scripts/install.sh "$venv" "${packages[@]}" -c requirements.lock
  cat "$0" scripts/install.sh requirements.lock >"$venv/installed"
fi
exec "$venv/bin/python" scripts/prepare_lm1b.py "$@"
