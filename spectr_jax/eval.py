"""Generates the papers' tables and figures; the config chooses which.

    python -m spectr_jax.eval --config=configs/demo.py --workdir=runs/demo

After a stop the same command resumes the table. A finished table of the same config and weights is
left as it is, unless --again is given.
"""

import importlib

from absl import flags

from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import expanded

with cli.importing():
    from ml_collections import config_flags

TABLES = ("tokens_per_call", "trees", "frontier", "latency", "auto", "quality", "spec_bench")
EXPERIMENTS = {**{name: name for name in TABLES}, "figures": "figures.acceptance"}
"""The modules in `experiments/`, by the name that a config gives in `experiment`."""

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "An evaluation config, such as configs/demo.py."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where tables and figures go: Markdown, JSON and PNG.", required=True
)
_AGAIN = flags.DEFINE_bool("again", False, "Measure a finished table again, and replace it.")


def main():
    # Imported after the flags are parsed, so that `--help` does not wait for JAX.
    import jax

    from spectr_jax.experiments.measure.finished import Finished
    from spectr_jax.utils import hosts

    name = _CONFIG.value.get("experiment")
    if name is None:
        raise UserError(
            "--config: must be an evaluation with a field `experiment`; give one such as "
            "configs/demo.py, or `train` it"
        )
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    experiment = importlib.import_module(f"spectr_jax.experiments.{EXPERIMENTS[name]}")
    if jax.process_count() > 1 and not getattr(experiment, "SEVERAL_HOSTS", False):
        raise UserError(
            f"experiment={name!r}: runs in one process only; drop --coordinator and --distributed"
        )
    try:
        experiment.run(_CONFIG.value, expanded(_WORKDIR.value), _AGAIN.value)
    except Finished as finished:
        if hosts.is_first():
            print(finished)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.define_process_flags()
    cli.define_import_flag()
    cli.run(main, output=_WORKDIR)
