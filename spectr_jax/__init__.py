"""Exact speculative sampling with many drafts, in JAX: SpecTr and its family.

A whole program:

```python
import jax
from spectr_jax import Policy, generate, get_method, load

target, draft = load("20m", dtype="int8"), load("2m", dtype="int8")  # or your own models tokenizer
= target.tokenizer prompts, lengths = tokenizer.prompts(["The committee will meet again next week
to"]) method, policy = get_method("speculative", draft_length=2), Policy(eos=tokenizer.eos) out =
generate(jax.random.key(0), method, target, draft, prompts, lengths, max_new_tokens=40,
policy=policy) print(tokenizer.texts(out.tokens, out.lengths)[0]) ```

`load` reads a model with its tokenizer (`spectr_jax.loading.by_name`), `get_method` makes a method
(`spectr_jax.decoding.methods`), and `generate` continues prompts (`spectr_jax.decoding.generate`;
its `decode` stands inside a `jax.jit` of your own). A `Method` of your own is a `Tree` and a plan
of `transport`; `check_plan`, `check_method` and `check_model` say whether yours are right.

The packages, in an order to read them:

| package | question | read first |
| --- | --- | --- |
| `spectr_jax.transport` | how is one token chosen among drafts? | `spectr_jax.transport.base`, then
`kseq` and `otm` |
| `spectr_jax.decoding` | how are the tokens of a call drafted and chosen? |
`spectr_jax.decoding.methods`, then `generate` |
| `spectr_jax.testing` | is a plan or a method of mine exact? | `spectr_jax.testing.check_plan` |
| `spectr_jax.models` | what predicts? | `spectr_jax.models.base`, then `transformer` |
| `spectr_jax.data` | where do tokens come from? | `spectr_jax.data.corpus` |
| `spectr_jax.training` | how does a model learn? | `spectr_jax.training.loop`, then `step` |
| `spectr_jax.distillation` | how does a draft learn from its target? |
`spectr_jax.distillation.training`, `losses` |
| `spectr_jax.experiments.planning` | which tree to draft, and what to expect of it? |
`spectr_jax.experiments.planning.tree_search` |
| `spectr_jax.experiments.measure` | what does one method do on prompts? |
`spectr_jax.experiments.measure.measurement` |
| `spectr_jax.experiments` | what do the papers tabulate? | `spectr_jax.experiments.tokens_per_call`
|
| `spectr_jax.experiments.figures` | what do the papers draw? |
`spectr_jax.experiments.figures.acceptance` |
| `spectr_jax.sampling` | how does a decoded sequence look, token by token? |
`spectr_jax.sampling.session` |

Entry points: `python -m spectr_jax.train`, `eval`, `sample`, `figures`, `pack`, `label`, `export`;
each has `--help`.

.. include:: ../README.md
.. include:: ../docs/which_method.md
.. include:: ../docs/sampling.md
.. include:: ../docs/otm_layer.md
.. include:: ../docs/drafts.md
.. include:: ../docs/speed.md
.. include:: ../docs/training.md
.. include:: ../docs/architecture.md
.. include:: ../docs/models.md
.. include:: ../docs/extending.md
.. include:: ../CONTRIBUTING.md
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectr_jax import transport
    from spectr_jax.decoding.generate import generate
    from spectr_jax.decoding.methods import Method, get_method
    from spectr_jax.decoding.policy import Policy
    from spectr_jax.decoding.tree import Tree
    from spectr_jax.loading.by_name import load
    from spectr_jax.testing import check_method, check_model, check_plan

__all__ = [
    "Method",
    "Policy",
    "Tree",
    "check_method",
    "check_model",
    "check_plan",
    "generate",
    "get_method",
    "load",
    "transport",
]

_PLACES = {
    "Method": "decoding.methods",
    "Policy": "decoding.policy",
    "Tree": "decoding.tree",
    "check_method": "testing",
    "check_model": "testing",
    "check_plan": "testing",
    "generate": "decoding.generate",
    "get_method": "decoding.methods",
    "load": "loading",
}
"""The module of each name. It is imported when the name is asked for: a command's `--help` need not
wait for JAX."""


def __getattr__(name: str) -> Any:
    if name == "transport":
        return importlib.import_module("spectr_jax.transport")
    if name not in _PLACES:
        raise AttributeError(f"module 'spectr_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spectr_jax.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
