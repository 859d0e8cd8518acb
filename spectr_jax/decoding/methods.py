"""Methods: a draft tree and a verifier, by name.

A new method is a function here with its options as keyword arguments, and a line in `METHODS`; in a program of your own, a
call of `register`. Where a method drafts `num_drafts` i.i.d. chains of `draft_length` tokens, `tree` gives another shape, as
in `tree.parse`; but for `gbv`, which takes chains only.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxtyping import Array, Int

from spectr_jax import transport
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.lookup import Lookup
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import (
    Block,
    FromTarget,
    Layer,
    MultiPath,
    TokenByToken,
    Traversal,
    Verifier,
)
from spectr_jax.decoding.verifiers.from_target import GIVEN
from spectr_jax.decoding.verifiers.layer import COMPETITIONS
from spectr_jax.transport.kseq_gamma import checked
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils.errors import UserError, unknown

Shape: TypeAlias = Tree | str | None
Drafter: TypeAlias = Callable[[Tree, Int[Array, " time"], IntScalar], Int[Array, " nodes"]]
"""Drafts without a model: a function of the tree, the tokens of a sequence and their number that returns the tokens of the
nodes 1..N, -1 for none, with distinct siblings. Equal ones hash alike. `lookup.Lookup` is one."""
NUM_DRAFTS, DRAFT_LENGTH = 8, 4
"""K and L of i.i.d. chains, where neither they nor a tree are given."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How a call's tokens are drafted and chosen.

    Attributes:
      name: as registered.
      tree: the shape that is drafted; empty for none.
      verifier: chooses the tokens that a call emits; its rule says how siblings are drafted.
      exit_layer: self-speculation: the draft is this number of the target's first layers; 0 for a draft model.
      drafter: drafts without a model; None for a draft model.

    Raises:
      UserError: the verifier is not exact on the tree, or not for these drafts.
    """

    name: str
    tree: Tree
    verifier: Verifier
    exit_layer: int = 0
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.verifier, Verifier):
            raise UserError(
                f"method {self.name!r}: the verifier is a {type(self.verifier).__name__}, which must be a `Verifier`; "
                "give one of `decoding.verifiers`, such as TokenByToken(plan)"
            )
        try:
            self.verifier.check(self.tree)
        except UserError as error:
            raise UserError(f"method {self.name!r}: {error}") from None
        if (self.verifier.rule == GIVEN) != (self.drafter is not None):
            raise UserError(
                f"method {self.name!r}: drafts of a drafter go with the verifier FromTarget(), and only those; give both"
            )
        if self.exit_layer and self.drafter is not None:
            raise UserError(
                f"exit_layer={self.exit_layer}: the method {self.name!r} has a drafter; give one of the two"
            )

    @property
    def needs_draft(self) -> bool:
        """Whether it drafts with a draft model."""
        return self.tree.size > 0 and not self.exit_layer and self.drafter is None


def baseline() -> Method:
    """One token per call, drawn from the target."""
    return Method("baseline", trees.none(), TokenByToken(transport.get("maximal")))


def speculative(*, draft_length: int = 4) -> Method:
    """One chain of L drafts and maximal coupling (Leviathan et al., Chen et al.; SpecTr, Algorithms 1 and 4)."""
    return Method("speculative", trees.chain(draft_length), TokenByToken(transport.get("maximal")))


def block(*, draft_length: int = 4) -> Method:
    """One chain of L drafts and block verification (Sun et al., 2024)."""
    return Method("block", trees.chain(draft_length), Block(transport.get("maximal")))


def spectr(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts, or a prefix tree, and K-SEQ at gamma* (SpecTr, Algorithms 2, 3 and 5)."""
    return _iid("spectr", TokenByToken(transport.get("kseq")), num_drafts, draft_length, tree)


def kseq_gamma(
    *,
    num_drafts: int | None = None,
    draft_length: int | None = None,
    tree: Shape = None,
    gamma: float | None = None,
) -> Method:
    """As `spectr` with a given gamma (SpecTr, Algorithm 2); None for the number of live drafts, which needs no search."""
    if gamma is not None:
        checked(gamma)
    return _iid(
        "kseq_gamma",
        TokenByToken(transport.get("kseq_gamma", gamma=gamma)),
        num_drafts,
        draft_length,
        tree,
    )


def naive(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts, and tokens drawn from the target regardless of the drafts: a reference point."""
    return _iid("naive", TokenByToken(transport.get("naive")), num_drafts, draft_length, tree)


def recursive(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts and recursive rejection (SpecInfer's multi-step verification)."""
    return _iid(
        "recursive", TokenByToken(transport.get("recursive")), num_drafts, draft_length, tree
    )


def spectr_plus(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts and one iteration of iOPT (SpecTr++, Definition 4)."""
    return _iid("spectr+", TokenByToken(transport.get("spectr+")), num_drafts, draft_length, tree)


def spectr_plus_plus(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts and iOPT until it ends (SpecTr++, Definition 4)."""
    return _iid("spectr++", TokenByToken(transport.get("spectr++")), num_drafts, draft_length, tree)


def otm(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """K i.i.d. chains of L drafts, or a prefix tree, and the exact optimal plan for one token (`transport.otm`)."""
    return _iid("otm", TokenByToken(transport.get("otm")), num_drafts, draft_length, tree)


def otm_block(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """As `otm`, with block verification along the path of the plan's winners (`decoding/verifiers/block.py`)."""
    return _iid("otm_block", Block(transport.get("otm")), num_drafts, draft_length, tree)


def otm_layer(
    *,
    num_drafts: int | None = None,
    draft_length: int | None = None,
    tree: Shape = None,
    competitions: int = COMPETITIONS,
) -> Method:
    """As `otm`, where all drafts of a layer compete and any path can be accepted (`decoding/verifiers/layer.py`)."""
    return _iid("otm_layer", Layer(competitions), num_drafts, draft_length, tree)


def gbv(*, num_drafts: int = NUM_DRAFTS, draft_length: int = DRAFT_LENGTH) -> Method:
    """Greedy multi-path block verification of K i.i.d. chains of L drafts (Thomas and Pal, 2026;
    `decoding/verifiers/multipath.py`)."""
    return _iid("gbv", MultiPath(), num_drafts, draft_length, None)


def gbv_conditional(
    *, num_drafts: int | None = None, draft_length: int | None = None, tree: Shape = None
) -> Method:
    """As `gbv`, on any prefix tree: the winner's distribution is given how many drafts are live, which that one is not."""
    return _iid(
        "gbv_conditional", Block(transport.get("greedy_multipath")), num_drafts, draft_length, tree
    )


def gsd(*, tree: Tree | str = "4,2,1,1") -> Method:
    """Greedy speculative decoding on any tree, drafted without replacement (ERSD, Algorithm 4)."""
    return Method(
        "gsd", trees.parse(tree), TokenByToken(transport.get("recursive_without_replacement"))
    )


def traversal_verification(*, tree: Tree | str = "4,2,1,1") -> Method:
    """Traversal verification (Weng et al., 2025): from the leaves to the root of any tree that is drafted without
    replacement."""
    return Method("traversal", trees.parse(tree), Traversal())


def ersd(*, tree: Tree | str = "4,2,1,1") -> Method:
    """Exponential race speculative decoding on any tree (ERSD, Algorithm 5). Its output does not depend on the draft
    model."""
    return Method("ersd", trees.parse(tree), TokenByToken(transport.get("race")))


def greedy_drafts(*, tree: Tree | str = "4,2,1,1") -> Method:
    """The likeliest tokens and one draw at each node, and the plan that is optimal for these (Hu et al., 2025)."""
    return Method("greedy_drafts", trees.parse(tree), TokenByToken(transport.get("greedy")))


def lookup(
    *,
    num_drafts: int | None = None,
    draft_length: int | None = None,
    tree: Shape = None,
    max_ngram: int = 3,
    min_ngram: int = 1,
) -> Method:
    """Drafts what followed the last tokens where they occurred before (`decoding/lookup.py`), without a draft model.

    One chain of L drafts, K of them with different first tokens, or any tree.
    """
    if tree is None and num_drafts is None:
        num_drafts = 1
    shape = _shape("lookup", num_drafts, draft_length, tree)
    return Method("lookup", shape, FromTarget(), drafter=Lookup(max_ngram, min_ngram))


def self_speculative(*, layers: int = 1, method: str = "speculative", **options: Any) -> Method:
    """Any method, with the target's first `layers` and its own head as the draft; they share keys and values.

    `options` are the method's. It takes no draft model, and is useful where the target was trained with `early_exit`.
    """
    trees.checked(layers=layers)
    return dataclasses.replace(
        get_method(method, **options), name="self_speculative", exit_layer=layers
    )


def _iid(
    name: str, verifier: Verifier, num_drafts: int | None, draft_length: int | None, tree: Shape
) -> Method:
    """Returns the method that verifies i.i.d. drafts on a tree, or on K chains of L tokens."""
    return Method(name, _shape(name, num_drafts, draft_length, tree), verifier)


def _shape(name: str, num_drafts: int | None, draft_length: int | None, tree: Shape) -> Tree:
    """Returns the tree, or K chains of L tokens."""
    if tree is None:
        drafts = NUM_DRAFTS if num_drafts is None else num_drafts
        return trees.iid_chains(drafts, DRAFT_LENGTH if draft_length is None else draft_length)
    if num_drafts is None and draft_length is None:
        return trees.parse(tree)
    raise UserError(
        f"method {name!r} is given tree={tree!r} and num_drafts or draft_length; give one of them"
    )


METHODS: dict[str, Callable[..., Method]] = {
    "baseline": baseline,
    "speculative": speculative,
    "block": block,
    "spectr": spectr,
    "kseq_gamma": kseq_gamma,
    "naive": naive,
    "recursive": recursive,
    "spectr+": spectr_plus,
    "spectr++": spectr_plus_plus,
    "otm": otm,
    "otm_block": otm_block,
    "otm_layer": otm_layer,
    "gbv": gbv,
    "gbv_conditional": gbv_conditional,
    "gsd": gsd,
    "traversal": traversal_verification,
    "ersd": ersd,
    "greedy_drafts": greedy_drafts,
    "lookup": lookup,
    "self_speculative": self_speculative,
}


def register(name: str, factory: Callable[..., Method]) -> None:
    """Adds a method of your own: from now on `get_method(name, **options)` returns `factory(**options)`.

    `spectr_jax.testing.check_method` says whether it is exact.

    Args:
      name: not taken yet.
      factory: a function of keyword options with defaults. Equal options must give equal methods, or `generate`
        compiles again.

    Raises:
      UserError: the name is taken, or `factory` is no function.
    """
    if name in METHODS:
        raise UserError(f"method {name!r} is there already; choose another name")
    if not callable(factory):
        raise UserError(
            f"the factory of method {name!r} is {factory!r}; give a function of options that returns a Method"
        )
    METHODS[name] = factory


def get_method(name: str, **options: Any) -> Method:
    """Returns the method `name` with its options, such as `get_method("spectr", num_drafts=8, draft_length=4)`.

    It has that name.

    Raises:
      UserError: an unknown method or option, or a value out of range.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise unknown("method", name, METHODS)
    known = inspect.signature(METHODS[name]).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not passes_on:
            raise UserError(
                f"method {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
    # A factory may return another method with changes; tables tell methods apart by their names.
    return dataclasses.replace(METHODS[name](**options), name=name)


def options_for(name: str, tree: Tree) -> dict[str, Any] | None:
    """Returns the options with which the method `name` drafts `tree`, or None where it cannot.

    They are the tree, K and L, L alone or none. The method is asked, by making it: each one that is
    registered answers for itself.

    Raises:
      UserError: an unknown method.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    length = {"draft_length": tree.height}
    for options in (
        ({"tree": tree}, {"num_drafts": len(tree.levels[1]), **length}, length, {})
        if tree.size
        else ({},)
    ):
        try:
            if get_method(name, **options).tree == tree:
                return options
        except UserError:  # It has no such option, or refuses the value.
            continue
    return None


def on_tree(name: str, tree: Tree) -> Method | None:
    """Returns the method `name` drafting `tree`, or None where it cannot; raises `UserError` for an unknown method."""
    options = options_for(name, tree)
    return None if options is None else get_method(name, **options)


def cannot_branch(name: str) -> bool:
    """Returns whether the method `name` cannot draft trees that branch; raises `UserError` for an unknown method."""
    return options_for(name, trees.batch(2)) is None
