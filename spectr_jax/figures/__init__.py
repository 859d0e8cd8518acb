"""Figures of the papers: `python -m spectr_jax.figures`; and what draws them, and trees."""
