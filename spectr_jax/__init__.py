"""Exact speculative sampling with many drafts, in JAX: SpecTr and its family.

The rooms, from the ground floor up:

| room | question | read first |
| --- | --- | --- |
| `spectr_jax.transport` | how is one token chosen among drafts? | `spectr_jax.transport.base`, then `kseq` and `otm` |
| `spectr_jax.decoding` | how are the tokens of a call drafted and chosen? | `spectr_jax.decoding.methods`, then `generate` |
| `spectr_jax.testing` | is a plan or a method of mine exact? | `spectr_jax.testing.check_plan` |
| `spectr_jax.models` | what predicts? | `spectr_jax.models.base`, then `transformer` |
| `spectr_jax.data` | where do tokens come from? | `spectr_jax.data.corpus` |
| `spectr_jax.training` | how does a model learn? | `spectr_jax.training.loop`, then `step` |
| `spectr_jax.measure` | what does one method do on prompts? | `spectr_jax.measure.measurement` |
| `spectr_jax.experiments` | what do the papers tabulate? | `spectr_jax.experiments.tokens_per_call` |
| `spectr_jax.figures` | what do the papers draw? | `spectr_jax.figures.acceptance` |
| `spectr_jax.sampling` | how does a decoded text look, token by token? | `spectr_jax.sampling.session` |

Entry points: `python -m spectr_jax.train`, `eval`, `sample`, `figures`, `pack`, `export`; each has `--help`.

.. include:: ../README.md
.. include:: ../docs/which_method.md
.. include:: ../CONTRIBUTING.md
"""
