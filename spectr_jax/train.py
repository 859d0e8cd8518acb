"""Trains one model.

    python -m spectr_jax.train --config=configs/lm1b.py:draft_6m --workdir=runs/lm1b/draft_6m

After a stop or a crash the same command resumes from the newest checkpoint.
"""

from absl import flags

from spectr_jax.utils import cli

with cli.importing():
    from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A training config, such as configs/lm1b.py:draft_6m."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run lives; give the same one to resume.", required=True
)


def main():
    # Imported after the flags are parsed, so that `--help` does not wait for JAX.
    from spectr_jax.models.formats import runs
    from spectr_jax.utils.errors import UserError, unknown
    from spectr_jax.utils.files import expanded
    from spectr_jax.utils.memory import keep_freed_memory

    config, workdir = _CONFIG.value, expanded(_WORKDIR.value)
    if "experiment" in config:
        raise UserError(
            "--config: is an evaluation; give one such as configs/embedded.py, or `eval` it"
        )
    keep_freed_memory()
    if "kind" not in config:
        raise UserError("config field 'kind' is missing; start from train_config or distil_config")
    if config.kind == runs.LANGUAGE_MODEL:
        from spectr_jax.training.loop import train

        train(config, workdir)
    elif config.kind == runs.DRAFT_STUDENT:
        from spectr_jax.distillation.training import distil

        distil(config, workdir)
    else:
        raise unknown("kind", config.kind, runs.KINDS)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.define_process_flags()
    cli.define_import_flag()
    cli.run(main, output=_WORKDIR)
