"""One method on prompts, timed and observed: what the tables of `spectr_jax.experiments` share."""
