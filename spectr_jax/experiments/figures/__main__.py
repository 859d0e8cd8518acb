"""Regenerates the papers' figures on acceptance.

    python -m spectr_jax.experiments.figures --workdir=runs/figures
    python -m spectr_jax.experiments.figures --only=spectr_figure_5 --prompt='The weather in May is' --workdir=runs/figures

Each is a picture, and a JSON file with its curves and points.
"""

from absl import flags

from spectr_jax.utils import cli

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the figures go: PNG and JSON.", required=True
)
_ONLY = flags.DEFINE_list(
    "only", [], "Names of figures, such as spectr_figure_5; all if none is given."
)
_TARGET = flags.DEFINE_string(
    "target",
    "6m",
    "The target of SpecTr's Figure 5: a published model, a model file or a workdir.",
)
_DRAFT = flags.DEFINE_string(
    "draft",
    "2m",
    "The draft of SpecTr's Figure 5: a published model, a model file or a workdir.",
)
_PROMPT = flags.DEFINE_string(
    "prompt", "He said he also has asked prosecutors to", "The prompt of SpecTr's Figure 5."
)
_DRAWS = flags.DEFINE_integer("draws", 20_000, "Choices per measured point.")
_PAIRS = flags.DEFINE_integer("pairs", 100, "Random pairs of distributions in SpecTr++'s figures.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random pairs and the measured points.")


def main():
    from spectr_jax.experiments.figures import (
        acceptance,  # Once flags are parsed: `--help` need not wait for JAX.
    )
    from spectr_jax.utils.files import expanded

    settings = acceptance.Settings(
        _TARGET.value, _DRAFT.value, _PROMPT.value, _DRAWS.value, _PAIRS.value, _SEED.value
    )
    acceptance.run(
        settings, tuple(_ONLY.value) or tuple(acceptance.FIGURES), expanded(_WORKDIR.value)
    )


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main, output=_WORKDIR)
