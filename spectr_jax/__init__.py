"""Exact speculative sampling with many drafts, in JAX: SpecTr and its family.

```python
import jax
from spectr_jax import Policy, generate, get_method, load

target, draft = load("20m", dtype="int8"), load("2m", dtype="int8")  # or your own models
tokenizer, key = target.tokenizer, jax.random.key(0)
prompts, lengths = tokenizer.prompts(["The committee will meet again next week to"])
method, policy = get_method("block", draft_length=2), Policy(eos=tokenizer.eos)
out = generate(key, method, target, draft, prompts, lengths, max_new_tokens=40, policy=policy)
print(tokenizer.texts(out.tokens, out.lengths)[0])
```

`load` returns a model with its tokenizer (`spectr_jax.loading.by_name`), `get_method` returns a
method (`spectr_jax.decoding.methods`), and `generate` continues prompts. `generate_all` continues
a list of any length. Inside your own `jax.jit` use `spectr_jax.decoding.generate.decode`. Your own
`Method` combines a `Tree` and a verifier. Your own model is an `nnx.Module`, an Equinox module, or
a `FunctionalModel` of any JAX library. `check_plan`, `check_method` and `check_model` verify your
own plans, methods and models.

| package | question it answers | read first |
| --- | --- | --- |
| `spectr_jax.transport` | How is one token chosen among drafts? | `base`, then `kseq` and `otm` |
| `spectr_jax.decoding` | How are tokens drafted and chosen? | `methods`, then `generate` |
| `spectr_jax.testing` | Is my plan, method or model correct? | `check_plan` |
| `spectr_jax.models` | What predicts the next token? | `base`, then `transformer` |
| `spectr_jax.data` | Where do tokens come from? | `corpus` |
| `spectr_jax.loading` | How is a model found by its name? | `by_name` |
| `spectr_jax.training` | How does a model learn? | `loop`, then `step` |
| `spectr_jax.distillation` | How does a draft learn from its target? | `training`, `losses` |
| `spectr_jax.experiments` | How are the papers' tables and figures made? | `tokens_per_call` |
| `spectr_jax.sampling` | Where did each token of a sequence come from? | `session` |
| `spectr_jax.utils` | What do the programs share? | `cli`, `errors` |

Entry points: `python -m spectr_jax.train`, `eval`, `sample`, `pack`, `label`, `tabulate` and
`export`. Each one has `--help`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectr_jax import transport
    from spectr_jax.decoding.generate import generate
    from spectr_jax.decoding.methods import Method, get_method
    from spectr_jax.decoding.policy import Policy
    from spectr_jax.decoding.slots import generate_all
    from spectr_jax.decoding.tree import Tree
    from spectr_jax.loading.by_name import load
    from spectr_jax.models.functional import FunctionalModel
    from spectr_jax.testing import check_method, check_model, check_plan

__all__ = [
    "FunctionalModel",
    "Method",
    "Policy",
    "Tree",
    "check_method",
    "check_model",
    "check_plan",
    "generate",
    "generate_all",
    "get_method",
    "load",
    "transport",
]

_PLACES = {
    "FunctionalModel": "models.functional",
    "Method": "decoding.methods",
    "Policy": "decoding.policy",
    "Tree": "decoding.tree",
    "check_method": "testing",
    "check_model": "testing",
    "check_plan": "testing",
    "generate": "decoding.generate",
    "generate_all": "decoding.slots",
    "get_method": "decoding.methods",
    "load": "loading",
}
"""The module of each name. Imports are lazy so that a command's `--help` does not wait for JAX."""


def __getattr__(name: str) -> Any:
    if name == "transport":
        return importlib.import_module("spectr_jax.transport")
    if name not in _PLACES:
        raise AttributeError(f"module 'spectr_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spectr_jax.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
