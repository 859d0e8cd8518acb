"""Methods: a draft tree, a drafter and a verifier, by name.

To add a method, add a line to `METHODS`, or call `register` in your own program. A factory is a
function of keyword options that returns a `Method`; `get_method` sets its name. Methods on i.i.d.
drafts take `num_drafts` (K) and `draft_length` (L), or instead a `tree`, as in `tree.parse`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from spectr_jax import transport
from spectr_jax.decoding import drafters, verifiers
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.drafters import Drafter, DraftModel
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import Block, TokenByToken, Verifier
from spectr_jax.decoding.verifiers.layer import COMPETITIONS
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils import registry
from spectr_jax.utils.errors import UserError

Shape: TypeAlias = Tree | str | None
Count: TypeAlias = int | None

NUM_DRAFTS, DRAFT_LENGTH = 8, 4
"""The default K and L."""

ANY_TREE = "4,2,1,1"
"""The default tree of methods that draft any tree."""

RECALLED_TREE = "recall:5"
"""The default tree of `recycle`."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How each call drafts tokens and chooses among them.

    Attributes:
      name: the name in `METHODS`.
      tree: the tree that is drafted; `tree.none()` for no drafts.
      verifier: chooses the tokens that a call emits; its `rule` says how siblings are drawn.
      drafter: proposes the tokens of the tree; a draft model by default.

    Raises:
      UserError: the verifier is not exact on the tree, or not for the drafts of this drafter.
    """

    name: str
    tree: Tree
    verifier: Verifier
    drafter: Drafter = dataclasses.field(default_factory=DraftModel)

    def __post_init__(self) -> None:
        owner = f"method {self.name!r}"
        for part, kind, example in (
            ("tree", Tree, "tree.parse('4,2,1')"),
            ("verifier", Verifier, "TokenByToken(plan)"),
            ("drafter", Drafter, "Recall()"),
        ):
            value = getattr(self, part)
            if not isinstance(value, kind):
                wrong = f"the {part} is a {type(value).__name__}; give one, like {example}"
                raise UserError(f"{owner}: {wrong}")
            registry.check_equality(value)
        registry.check_equality(self.verifier.rule)
        try:
            self.verifier.check(self.tree)
        except UserError as error:
            raise UserError(f"{owner}: {error}") from None
        if self.tree.size and self.drafter.draws == (self.verifier.rule is None):
            pair = f"{type(self.verifier).__name__} does not verify drafts of {self.drafter}"
            hint = "use FromTarget() for drafters that do not draw, and only for these"
            raise UserError(f"{owner}: {pair}; {hint}")

    @property
    def needs_draft(self) -> bool:
        """Returns whether the method needs a draft model."""
        return self.tree.size > 0 and self.drafter.needs_model

    @property
    def takes_draft(self) -> bool:
        """Returns whether the method uses a draft model if there is one."""
        return self.tree.size > 0 and self.drafter.takes_model

    def drafter_for(self, draft: Frozen | None) -> Drafter:
        """Returns the drafter; without nodes none is needed, and features need `FeatureModel`."""
        if not self.tree.size:
            return drafters.NoDrafts()
        sees_features = draft is not None and draft.features_seen
        by_default = self.drafter == DraftModel()  # A drafter of one's own stays.
        return drafters.FeatureModel() if sees_features and by_default else self.drafter


Factory: TypeAlias = Callable[..., Method]


def _on_chain(verifier: Verifier, *, draft_length: int = DRAFT_LENGTH) -> Method:
    """Returns a method on one chain of L drafts."""
    return Method("", trees.chain(draft_length), verifier)


def _on_iid_drafts(
    verifier: Verifier, *, num_drafts: Count = None, draft_length: Count = None, tree: Shape = None
) -> Method:
    """Returns a method on K i.i.d. chains of L drafts, or on a prefix tree."""
    return Method("", _shape(num_drafts, draft_length, tree), verifier)


def _on_any_tree(verifier: Verifier, *, tree: Tree | str = ANY_TREE) -> Method:
    """Returns a method on a tree of any shape."""
    return Method("", trees.parse(tree), verifier)


def spectr(
    *,
    num_drafts: Count = None,
    draft_length: Count = None,
    tree: Shape = None,
    gamma: float | None = 1.0,
) -> Method:
    """Returns SpecTr's method: K-SEQ (`transport.kseq`) at gamma*, or at a given gamma."""
    verifier = TokenByToken(transport.get("kseq", gamma=gamma))
    return Method("", _shape(num_drafts, draft_length, tree), verifier)


def otm_layer(
    *,
    num_drafts: Count = None,
    draft_length: Count = None,
    tree: Shape = None,
    competitions: int = COMPETITIONS,
) -> Method:
    """Returns the method in which all drafts of a layer compete (`decoding.verifiers.layer`)."""
    return Method("", _shape(num_drafts, draft_length, tree), verifiers.Layer(competitions))


def gbv(*, num_drafts: int = NUM_DRAFTS, draft_length: int = DRAFT_LENGTH) -> Method:
    """Returns greedy multi-path block verification of K i.i.d. chains (Thomas and Pal, 2026)."""
    return Method("", _shape(num_drafts, draft_length, None), verifiers.MultiPath())


def lookup(
    *,
    num_drafts: Count = None,
    draft_length: Count = None,
    tree: Shape = None,
    max_ngram: int = 16,
    min_ngram: int = 1,
) -> Method:
    """Returns the method that drafts by prompt lookup (`decoding.drafters.recall`).

    It drafts one chain of L tokens, K chains with distinct first tokens, or any tree.
    """
    if tree is None and num_drafts is None:
        num_drafts = 1
    drafter = drafters.Recall(max_ngram, min_ngram, ranks=0)
    return Method("", _shape(num_drafts, draft_length, tree), verifiers.FromTarget(), drafter)


def recycle(
    *, tree: Tree | str = RECALLED_TREE, max_ngram: int = 16, min_ngram: int = 1, ranks: int = 8
) -> Method:
    """Returns the method that drafts by token recycling after lookup (`decoding.drafters.recall`).

    `max_ngram=0` is Token Recycling alone. The draft model is optional: a `Bigram` of the target.
    """
    drafter = drafters.Recall(max_ngram, min_ngram, ranks)
    return Method("", trees.parse(tree), verifiers.FromTarget(), drafter)


def self_speculative(*, layers: int = 1, method: str = "speculative", **options: Any) -> Method:
    """Returns a method whose draft is the target's first `layers` with the target's head.

    Both share keys and values. `options` are those of `method`. There is no draft model. This pays
    if the target was trained with `early_exit`.
    """
    return dataclasses.replace(get_method(method, **options), drafter=drafters.EarlyExit(layers))


def _shape(num_drafts: int | None, draft_length: int | None, tree: Shape) -> Tree:
    """Returns `tree`, or K chains of L tokens if it is None."""
    if tree is None:
        drafts = NUM_DRAFTS if num_drafts is None else num_drafts
        return trees.iid_chains(drafts, DRAFT_LENGTH if draft_length is None else draft_length)
    if num_drafts is None and draft_length is None:
        return trees.parse(tree)
    raise UserError(f"tree={tree!r}: replaces num_drafts and draft_length; give only one of them")


_plan = transport.get

METHODS: dict[str, Factory] = {
    # Each call emits one token, drawn from the target.
    "baseline": lambda: Method("", trees.none(), TokenByToken(_plan("maximal"))),
    # Leviathan et al., 2023; Chen et al., 2023; SpecTr, Algorithms 1 and 4.
    "speculative": partial(_on_chain, TokenByToken(_plan("maximal"))),
    # Block verification: Sun et al., 2024.
    "block": partial(_on_chain, Block(_plan("maximal"))),
    # K-SEQ: SpecTr, Algorithms 2, 3 and 5.
    "spectr": spectr,
    # A reference point: tokens are drawn from the target, whatever the drafts are.
    "naive": partial(_on_iid_drafts, TokenByToken(_plan("naive"))),
    # SpecInfer's multi-step verification.
    "recursive": partial(_on_iid_drafts, TokenByToken(_plan("recursive"))),
    # One iteration of iOPT, and iOPT until it ends: SpecTr++, Definition 4.
    "spectr+": partial(_on_iid_drafts, TokenByToken(_plan("spectr+"))),
    "spectr++": partial(_on_iid_drafts, TokenByToken(_plan("spectr++"))),
    # The optimal plan for one token (`transport.otm`).
    "otm": partial(_on_iid_drafts, TokenByToken(_plan("otm"))),
    # Block verification along the path of that plan's winners.
    "otm_block": partial(_on_iid_drafts, Block(_plan("otm"))),
    "otm_layer": otm_layer,
    "gbv": gbv,
    # `gbv` on prefix trees: the winner's distribution is conditioned on the number of live drafts.
    "gbv_conditional": partial(_on_iid_drafts, Block(_plan("greedy_multipath"))),
    # Greedy speculative decoding, drafted without replacement: ERSD, Algorithm 4.
    "gsd": partial(_on_any_tree, TokenByToken(_plan("recursive_without_replacement"))),
    # Traversal verification, from the leaves to the root: Weng et al., 2025.
    "traversal": partial(_on_any_tree, verifiers.Traversal()),
    # The same for i.i.d. drafts, as compared by Thomas et al., 2026 (arXiv 2602.16994).
    "traversal_iid": partial(_on_iid_drafts, verifiers.Traversal(transport.rules.IID)),
    # Exponential races: ERSD, Algorithm 5. The output does not depend on the draft model.
    "ersd": partial(_on_any_tree, TokenByToken(_plan("race"))),
    # The likeliest tokens and one draw, with the optimal plan for them: Hu et al., 2025.
    "greedy_drafts": partial(_on_any_tree, TokenByToken(_plan("greedy"))),
    # Drafts without a model: copies of what followed earlier, and what the target ranked first.
    "lookup": lookup,
    "recycle": recycle,
    "self_speculative": self_speculative,
}


def register(name: str, factory: Factory) -> None:
    """Adds a method: from now on `get_method(name, **options)` returns `factory(**options)`.

    `spectr_jax.testing.check_method` checks that it is exact.

    Args:
      name: a name that is not taken.
      factory: a function of keyword options with defaults. Equal options must give equal methods,
        or `generate` compiles again.

    Raises:
      UserError: the name is taken, or `factory` is not callable.
    """
    registry.check_free(Method, METHODS, name)
    if not callable(factory):
        raise UserError(f"factory={factory!r}: must be a function of options that returns a Method")
    METHODS[name] = factory


def get_method(name: str, **options: Any) -> Method:
    """Returns the method `name`, such as `get_method("spectr", num_drafts=8, draft_length=4)`.

    Raises:
      UserError: the method or an option is unknown, or a value is out of range.
    """
    # A factory may build on another method, but tables tell methods apart by name.
    return dataclasses.replace(registry.make(Method, METHODS, name, options), name=name)
