"""The papers' figures on acceptance: SpecTr 1, 2, 3, 5 and SpecTr++ 1, 2.

    python -m spectr_jax.eval --config=configs/figures.py --workdir=runs/figures
    python -m spectr_jax.eval --config=configs/figures.py --workdir=runs/figure_5 \\
        --config.only="('spectr_figure_5',)" --config.prompt='The weather in May is'

Each figure is written as PNG and JSON. Together they take minutes on two CPU cores. SpecTr's
Figure 5 compares the next-token distributions of a target and a draft; the others need no model.
"""

from spectr_jax.experiments.config import figures_config


def get_config():
    return figures_config()
