"""Methods: named triples of a draft tree, a drafting rule and a transport plan.

A new method is a function here with its options as keyword arguments, and a line in `METHODS`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from spectr_jax import transport
from spectr_jax.decoding import drafting, tree
from spectr_jax.errors import UserError, unknown


@dataclasses.dataclass(frozen=True)
class Method:
    """How a call's tokens are drafted and chosen.

    Attributes:
      name: as registered.
      tree: the shape that is drafted; empty for none.
      rule: how sibling tokens are drawn, `rule(key, p, count)`.
      plan: how one token is chosen.
    """

    name: str
    tree: tree.Tree
    rule: Callable
    plan: transport.Plan


def baseline() -> Method:
    """One token a call, drawn from the target."""
    return Method("baseline", tree.none(), drafting.iid, transport.get("maximal"))


def speculative(*, draft_length: int = 4) -> Method:
    """One chain of L drafts and maximal coupling (Leviathan et al., Chen et al.; SpecTr, Algorithms 1 and 4)."""
    return Method("speculative", tree.chain(draft_length), drafting.iid, transport.get("maximal"))


def spectr(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts and K-SEQ at gamma* (SpecTr, Algorithms 2 and 3)."""
    return _iid_chains("spectr", "kseq", num_drafts, draft_length)


def kseq_gamma(*, num_drafts: int = 8, draft_length: int = 4, gamma: float | None = None) -> Method:
    """As `spectr` with a given gamma (SpecTr, Algorithm 2); None for the number of live drafts, which needs no search."""
    return _iid_chains("kseq_gamma", "kseq_gamma", num_drafts, draft_length, gamma=gamma)


def naive(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts, and tokens drawn from the target whatever the drafts (SpecTr, section 4)."""
    return _iid_chains("naive", "naive", num_drafts, draft_length)


def recursive(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts and recursive rejection (SpecInfer's multi-step verification)."""
    return _iid_chains("recursive", "recursive", num_drafts, draft_length)


def spectr_plus(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts and one iteration of iOPT (SpecTr++, Definition 4)."""
    return _iid_chains("spectr+", "spectr+", num_drafts, draft_length)


def spectr_plus_plus(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts and iOPT until it ends (SpecTr++, Definition 4)."""
    return _iid_chains("spectr++", "spectr++", num_drafts, draft_length)


def otm(*, num_drafts: int = 8, draft_length: int = 4) -> Method:
    """K i.i.d. chains of L drafts and the exact optimal plan for one token (SpecTr, section 5; `transport.otm`)."""
    return _iid_chains("otm", "otm", num_drafts, draft_length)


def _iid_chains(name: str, plan: str, num_drafts: int, draft_length: int, **options: Any) -> Method:
    return Method(name, tree.iid_chains(num_drafts, draft_length), drafting.iid, transport.get(plan, **options))


METHODS: dict[str, Callable[..., Method]] = {
    "baseline": baseline,
    "speculative": speculative,
    "spectr": spectr,
    "kseq_gamma": kseq_gamma,
    "naive": naive,
    "recursive": recursive,
    "spectr+": spectr_plus,
    "spectr++": spectr_plus_plus,
    "otm": otm,
}


def get_method(name: str, **options: Any) -> Method:
    """The method `name` with its options, such as `get_method("spectr", num_drafts=8, draft_length=4)`.

    Raises:
      UserError: an unknown method or option, or a value out of range.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    known = inspect.signature(METHODS[name]).parameters
    for option in options:
        if option not in known:
            raise UserError(f"method {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return METHODS[name](**options)
