"""Figures of the papers: `python -m spectr_jax.experiments.figures`; and what draws them, and
trees."""
