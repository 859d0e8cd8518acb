"""Trains one model: `python -m spectr_jax.train --config=configs/lm1b.py:draft_6m --workdir=runs/draft_6m`."""

import pathlib

from absl import app, flags, logging
from ml_collections import config_flags

from spectr_jax.errors import run_or_exit

_CONFIG = config_flags.DEFINE_config_file("config", None, "A training config; fields: spectr_jax/config.py.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; give the same one to go on with it.", required=True)


def main(_):
    logging.set_verbosity(logging.WARNING)

    def go():
        from spectr_jax.training.loop import train  # After flags are parsed: `--help` need not wait for JAX.

        train(_CONFIG.value, pathlib.Path(_WORKDIR.value))

    run_or_exit(go)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
