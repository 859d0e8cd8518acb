"""One table of methods x shared properties: a new method is tested by adding a line to METHODS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.request import BUCKET
from spectr_jax.decoding.tree import Tree, chain
from spectr_jax.decoding.verifiers import base
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.testing import chi_square
from spectr_jax.testing import methods as checks
from spectr_jax.testing.methods import DRAFT, EOS, PROMPT, TARGET, VOCAB
from spectr_jax.transport import otm
from spectr_jax.utils.errors import UserError

UNEVEN = Tree((0, 0, 1, 1, 2))
WIDE = Tree((0, 0, 0, 0, 1, 1, 2))
"""As many children of the root as there are tokens, and leaves of both depths."""
METHODS = {
    "baseline": ("baseline", {}),
    "speculative L=3": ("speculative", {"draft_length": 3}),
    "spectr K=2 L=5": ("spectr", {"num_drafts": 2, "draft_length": 5}),
    "kseq_gamma gamma=1.2": ("kseq_gamma", {"num_drafts": 2, "draft_length": 3, "gamma": 1.2}),
    "naive K=2 L=3": ("naive", {"num_drafts": 2, "draft_length": 3}),
    "recursive K=3 L=2": ("recursive", {"num_drafts": 3, "draft_length": 2}),
    "spectr+ K=2 L=3": ("spectr+", {"num_drafts": 2, "draft_length": 3}),
    "spectr++ K=3 L=2": ("spectr++", {"num_drafts": 3, "draft_length": 2}),
    "otm tree 3,2,1": ("otm", {"tree": "3,2,1"}),
    "block L=4": ("block", {"draft_length": 4}),
    "otm_block tree 2,2,1": ("otm_block", {"tree": "2,2,1"}),
    "otm_layer uneven": ("otm_layer", {"tree": UNEVEN, "competitions": 2}),
    "otm_layer wide": ("otm_layer", {"tree": "3,2", "competitions": 1}),
    "gbv K=3 L=3": ("gbv", {"num_drafts": 3, "draft_length": 3}),
    "gbv_conditional tree 2,2,1": ("gbv_conditional", {"tree": "2,2,1"}),
    "gsd wide": ("gsd", {"tree": WIDE}),
    "traversal specinfer": ("traversal", {"tree": "specinfer:8"}),
    "traversal wide": ("traversal", {"tree": WIDE}),
    "ersd wide": ("ersd", {"tree": WIDE}),
    "greedy_drafts": ("greedy_drafts", {"tree": "3,2,1"}),
    "lookup L=3": ("lookup", {"draft_length": 3}),
    "lookup tree 3,2,1": ("lookup", {"tree": "3,2,1", "max_ngram": 2}),
    "self_speculative": ("self_speculative", {"method": "otm_block", "tree": "2,2,1"}),
}
# The tests of a method run in one process: most share one compiled program.
every_method = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.xdist_group(case), pytest.mark.optimized])
        for case in METHODS
    ],
)

# These see a shaped distribution in all tests, the others the plain one: the policy acts before any method does.
SHAPED = (
    "spectr K=2 L=5",
    "otm tree 3,2,1",
    "gbv_conditional tree 2,2,1",
    "otm_layer wide",
    "gsd wide",
    "traversal wide",
    "ersd wide",
    "lookup tree 3,2,1",
)

GENERATIONS = 60_000
"""Fewer than `check_method` takes, and enough for the mistakes that were tried on each walk."""


def _method(case):
    name, options = METHODS[case]
    return get_method(name, **options)


def _policy(case):
    return checks.SHAPED if case in SHAPED else checks.PLAIN


@every_method
def test_whole_outputs_follow_the_target(case):
    checks.check_outputs(_method(case), _policy(case), least=1e-3, generations=GENERATIONS)


@every_method
@pytest.mark.parametrize("seed", checks.GREEDY_SEEDS)
def test_greedy_emits_the_likeliest_tokens(case, seed):
    checks.check_greedy(_method(case), seed, _policy(case))


@every_method
def test_a_row_does_not_depend_on_its_neighbours(case):
    checks.check_rows(_method(case), _policy(case))


@every_method
def test_counters_add_up(case):
    checks.check_counters(_method(case), _policy(case))


@every_method
def test_second_call_compiles_nothing(case):
    checks.check_compilations(_method(case), _method(case), _policy(case))


PERFECT = [
    case
    for case, (name, _) in METHODS.items()
    if name
    not in (
        "kseq_gamma",
        "naive",
        "gbv",
        "greedy_drafts",
        "lookup",
    )  # These may refuse drafts of the target itself.
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.xdist_group(case), pytest.mark.optimized])
        for case in PERFECT
    ],
)
def test_a_perfect_draft_is_always_accepted(case):
    """So many calls emit a path from the root to a leaf and a bonus, until the end."""
    method, policy = _method(case), _policy(case)
    prompts, lengths = checks._ragged_prompts(8)
    result = checks._texts(method, checks._keys(0), prompts, lengths, policy, TARGET, TARGET)
    new, tree = np.asarray(result.lengths) - lengths, method.tree
    leaves = sorted({*range(tree.size + 1)} - {*tree.parent[1:]})
    least, most = (
        -(-new // (depth + 1)) for depth in (tree.height, min(tree.depth[leaf] for leaf in leaves))
    )
    assert (least <= result.target_calls).all() and (result.target_calls <= most).all()


def test_compilations_are_counted():
    with checks.count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compiled


def _ragged_prompts(seed, rows=8, length=6):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    lengths[0] = 1  # The draft has no token before the last one to recall.
    return rng.integers(0, VOCAB - 1, (rows, length)).astype(np.int32), lengths


def _models():
    return TableModel(TARGET), TableModel(DRAFT)


def test_a_row_alone_is_a_row_of_a_batch():
    method, models = _method("spectr K=2 L=5"), _models()
    prompts, lengths = _ragged_prompts(5)
    keys = jax.random.split(jax.random.key(3), 8)
    together = generate(keys, method, *models, prompts, lengths, 9, Policy(eos=EOS))
    for row in range(8):
        one = slice(row, row + 1)
        alone = generate(keys[one], method, *models, prompts[one], lengths[one], 9, Policy(eos=EOS))
        for mine, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(mine[0], theirs[row])


@pytest.mark.parametrize(
    "case", [pytest.param("otm_layer uneven", marks=pytest.mark.slow), "gsd wide"]
)
def test_texts_are_the_same_in_turn_and_together(case, monkeypatch):
    """A processor walks down one tree after the other, an accelerator down all at once (`verifiers.base.in_turn`)."""
    prompts, lengths = _ragged_prompts(5, rows=200)
    texts, in_turn, lax_map = {}, [], jax.lax.map
    monkeypatch.setattr(
        jax.lax, "map", lambda *args, **options: in_turn.append(args) or lax_map(*args, **options)
    )
    for small in (0, VOCAB):
        monkeypatch.setattr(base, "SMALL_VOCABULARY", small)
        in_turn.clear()
        seen = {"observe": lambda call: {}}  # A function that jit has not seen: it traces anew.
        texts[small] = generate(
            jax.random.key(3),
            _method(case),
            *_models(),
            prompts,
            lengths,
            9,
            Policy(eos=EOS),
            **seen,
        )
        assert bool(in_turn) == (small == 0)
    for one, other in zip(*map(jax.tree.leaves, texts.values()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_drafts_have_a_policy_of_their_own():
    """By default it is the target's; another one changes what is drafted, and not what the target follows."""
    method, models = _method("gsd wide"), _models()
    prompts, lengths = _ragged_prompts(5, rows=64)

    def drafted(call):
        return {
            "entropy": -jax.numpy.sum(jax.scipy.special.xlogy(call.scored.p[0], call.scored.p[0])),
            "q": call.scored.policy.temperature,
        }

    def run(policy, own):
        made = generate(
            jax.random.key(3),
            method,
            *models,
            prompts,
            lengths,
            9,
            policy,
            observe=drafted,
            draft_policy=own,
        )
        return made, np.sum(made.observed["entropy"]) / np.sum(made.target_calls)

    shaped, sharp = Policy(0.7, top_k=3), Policy(0.05)
    (first, entropy), (second, _), (_, sharper) = (
        run(shaped, None),
        run(shaped, shaped),
        run(shaped, sharp),
    )
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert sharper < 0.3 < 0.6 < entropy
    with pytest.raises(UserError, match=r"temperature=-1\.0"):
        run(shaped, Policy(-1.0))


DRAW_FOR_DRAW = {
    "spectr, one chain": (
        ("speculative", {"draft_length": 2}),
        ("spectr", {"num_drafts": 1, "draft_length": 2}),
    ),
    "otm, one chain": (
        ("speculative", {"draft_length": 2}),
        ("otm", {"num_drafts": 1, "draft_length": 2}),
    ),
    "otm_block, one chain": (
        ("block", {"draft_length": 2}),
        ("otm_block", {"num_drafts": 1, "draft_length": 2}),
    ),
    "gbv, one chain": (
        ("block", {"draft_length": 2}),
        ("gbv", {"num_drafts": 1, "draft_length": 2}),
    ),
    "gbv_conditional, one chain": (
        ("block", {"draft_length": 2}),
        ("gbv_conditional", {"tree": "1,1"}),
    ),
    "otm_block, one level": (("otm", {"tree": "3"}), ("otm_block", {"tree": "3"})),
}


@pytest.mark.parametrize("pair", DRAW_FOR_DRAW)
@pytest.mark.xdist_group("chains")  # They share programs.
def test_special_cases_draw_for_draw(pair):
    prompts, lengths = _ragged_prompts(8, rows=64)
    results = [
        generate(jax.random.key(4), get_method(name, **options), *_models(), prompts, lengths, 20)
        for name, options in DRAW_FOR_DRAW[pair]
    ]
    for ours, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("otm", (0, 0, 0, 2, 3)),
        pytest.param("otm_block", (0, 0, 0, 2, 3), marks=pytest.mark.slow),
        ("spectr", (0, 0, 0, 2, 3)),
        ("otm_block", (0, 0, 0, 1, 1, 2)),
    ],
)
def test_iid_drafts_may_have_children_of_one_twin_only(name, tree):
    """Two live nodes spell the same token, and one of them is a leaf: the drafts are distributed as those of the other."""
    V, texts = 3, 40_000
    target, draft = (
        random_table(0, V, 0.7),
        np.random.default_rng(5).dirichlet(np.full(V, 0.5), size=(V, V)),
    )
    draft[1, 2] = target[1, 2] = [0.4, 0.35, 0.25]  # The first draft is always accepted.
    method, models = get_method(name, tree=Tree(tree)), (TableModel(target), TableModel(draft))
    result = generate(
        jax.random.key(0), method, *models, np.tile([1, 2], (texts, 1)), np.full(texts, 2), 2
    )
    first, second = np.asarray(result.tokens)[:, 2:4].T
    pmf = np.array([target[1, 2, token] * target[2, token] for token in range(V)])
    assert chi_square.p_value(np.bincount(first * V + second, minlength=V * V), pmf.ravel()) > 1e-4


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("spectr", (0, 0, 0, 2, 3)),
        pytest.param("otm", (0, 0, 0, 2, 3), marks=pytest.mark.slow),
        ("otm_block", (0, 0, 0, 1, 1, 2)),
        pytest.param("otm_layer", (0, 0, 0, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_the_cache_of_the_draft_follows_the_path_where_one_twin_only_has_children(name, tree):
    """A model that drafts for itself: at the root of every call p = q, as it is if the rows in its cache are the path's."""
    model = Transformer(
        TransformerConfig(layers=1, width=16, mlp=32, heads=2, vocab_size=3, context=32),
        rngs=nnx.Rngs(0),
    )
    method = get_method(name, tree=Tree(tree))

    def apart(call):
        return {"calls": jnp.max(jnp.abs(call.scored.p[0] - call.scored.q(0))) > 1e-5}

    prompts, lengths = np.tile([1, 2], (50, 1)), np.full(50, 2)
    result = generate(jax.random.key(0), method, model, model, prompts, lengths, 20, observe=apart)
    assert np.sum(result.observed["calls"]) == 0


NOWHERE = {"at the root": (slice(None), slice(None)), "below it": (2, (1, 3))}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("otm_block", {"tree": "3,1"}, marks=pytest.mark.slow),
        pytest.param("gbv", {"num_drafts": 3, "draft_length": 2}, marks=pytest.mark.slow),
        ("otm_layer", {"tree": "3,1", "competitions": 4}),
        pytest.param("traversal", {"tree": "3,1"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.optimized
def test_drafts_of_no_distribution_are_not_used(name, options):
    """Logits that are all -inf make a p that is NaN: what was drawn from it is no draft."""
    V, texts = 5, 40_000
    method, prompts, lengths = (
        get_method(name, **options),
        np.tile([1, 2], (texts, 1)),
        np.full(texts, 2),
    )
    for where, places in NOWHERE.items():  # One program for both.
        draft = np.tile([0.4, 0.3, 0.15, 0.1, 0.05], (V, V, 1))
        draft[places] = 0
        models = TableModel(np.full((V, V, V), 0.2)), TableModel(draft)
        result = generate(jax.random.key(0), method, *models, prompts, lengths, 2)
        first, second = np.asarray(result.tokens)[:, 2:4].T
        seen = np.bincount(first * V + second, minlength=V * V)
        assert chi_square.p_value(seen, np.full(V * V, 1 / V**2)) > 1e-4, where


@pytest.mark.parametrize("name", ["otm", "otm_block", "otm_layer", "traversal", "gbv", "lookup"])
def test_a_target_without_a_distribution_ends_the_sequence(name):
    """Logits that are all -inf: the token is -1, whatever the walk, and no other follows."""
    target = np.full((3, 3, 3), 1 / 3)
    target[1, 2] = 0
    method = get_method(
        name, **({"num_drafts": 2, "draft_length": 2} if name == "gbv" else {"tree": "2,1"})
    )
    models, prompts = (
        (TableModel(target), TableModel(np.full((3, 3, 3), 1 / 3))),
        np.tile([1, 2], (8, 1)),
    )
    result = generate(jax.random.key(0), method, *models, prompts, np.full(8, 2), 3, Policy(eos=0))
    assert np.all(np.asarray(result.tokens)[:, 2] == -1)
    np.testing.assert_array_equal(result.lengths, 3)


@pytest.mark.parametrize("name", ["block", "otm_block", "otm_layer", "traversal", "gbv"])
def test_sequences_that_come_to_no_distribution_are_as_likely_as_any(name):
    """The token -1 follows a 0 as all of the target's mass there: verification of whole paths does not avoid it."""
    target, halves, rows = np.full((2, 2, 2), 0.5), np.full((2, 2, 2), 0.5), 20_000
    target[1, 0] = 0
    shape = {"block": {"draft_length": 2}, "gbv": {"num_drafts": 2, "draft_length": 2}}
    method = get_method(name, **shape.get(name, {"tree": "2,1"}))
    models = TableModel(target), TableModel(halves)
    result = generate(
        jax.random.key(0), method, *models, np.tile([0, 1], (rows, 1)), np.full(rows, 2), 3
    )
    new = [
        tuple(row[2:length].tolist())
        for row, length in zip(np.asarray(result.tokens), result.lengths, strict=True)
    ]
    expected = {(0, -1): 0.5, (1, 0, -1): 0.25, (1, 1, 0): 0.125, (1, 1, 1): 0.125}
    counts = np.array([new.count(each) for each in expected])
    assert (
        counts.sum() == rows
        and chi_square.p_value(counts, np.array(list(expected.values()))) > 1e-4
    )


@pytest.mark.parametrize("name", ["gsd", "greedy_drafts", "traversal"])
def test_what_is_left_of_a_confident_draft_may_be_next_to_nothing(name):
    """Behind the likeliest token, at a temperature of 0.053, is a mass of 1e-37, whose products are 0 in float32."""
    V, texts = 5, 20_000
    models = (
        TableModel(np.full((V, V, V), 0.2)),
        TableModel(np.tile([1, 0.01, 0.0099, 0.0098, 0.0097], (V, V, 1))),
    )
    prompts, lengths = np.tile([1, 2], (texts, 1)), np.full(texts, 2)
    method, own = get_method(name, tree="3"), Policy(0.053)
    result = generate(jax.random.key(0), method, *models, prompts, lengths, 1, draft_policy=own)
    assert (
        chi_square.p_value(
            np.bincount(np.asarray(result.tokens)[:, 2], minlength=V), np.full(V, 0.2)
        )
        > 1e-4
    )


def test_races_give_the_same_text_whatever_the_draft_and_the_tree():
    prompts, lengths = _ragged_prompts(8, rows=64)
    other = perturbed(TARGET, 2, 3.0)
    texts, calls = [], []
    for tree, draft in (
        ("3,1", DRAFT),
        ("specinfer:8", DRAFT),
        ("chain:2", other),
        ("3,1", TARGET),
    ):
        method = get_method("ersd", tree=tree)
        result = generate(
            jax.random.key(4), method, TableModel(TARGET), TableModel(draft), prompts, lengths, 20
        )
        texts.append(np.asarray(result.tokens))
        calls.append(int(np.sum(result.target_calls)))
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
    assert calls[3] < calls[0] < calls[2]


@pytest.mark.slow
def test_expected_accepted_tokens_of_block_verification():
    """Two drafts, by enumeration: token by token, and by Sun et al. (2024)."""
    prompts, lengths = np.tile(PROMPT, (50_000, 1)), np.full(50_000, 2)
    seen = {}

    def emitted(call):
        return {"emitted": jnp.float32(call.chosen.emitted)}

    few = {"competitions": 4}  # Any number accepts as many on one chain, and on one level.
    for name in ("speculative", "block", "otm_layer", "traversal"):
        method = (
            get_method(name, tree=chain(2), **few)
            if name == "otm_layer"
            else on_tree(name, chain(2))
        )
        result = generate(
            jax.random.key(0), method, *_models(), prompts, lengths, 1, observe=emitted
        )
        seen[name] = float(np.mean(np.asarray(result.observed["emitted"])))
    # On one level it accepts as the plan does.
    method = get_method("otm_layer", tree="3", **few)
    result = generate(jax.random.key(0), method, *_models(), prompts, lengths, 1, observe=emitted)
    level = float(np.mean(np.asarray(result.observed["emitted"])))
    assert level == pytest.approx(1 + otm.acceptance(DRAFT[PROMPT], TARGET[PROMPT], 3), abs=0.015)
    p1, q1 = DRAFT[PROMPT], TARGET[PROMPT]
    token, block = 0.0, 0.0
    for x in range(VOCAB):
        p2, q2 = DRAFT[PROMPT[1], x], TARGET[PROMPT[1], x]
        token += min(p1[x], q1[x]) * (1 + np.minimum(p2, q2).sum())
        run = min(1.0, q1[x] / p1[x])
        whole = np.minimum(run * q2, p2).sum()  # Accepted with both drafts.
        rest = np.maximum(run * q2 - p2, 0).sum()
        one = (1 - whole) * rest / (rest + 1 - run) if rest else 0.0
        block += p1[x] * (2 * whole + one)
    assert seen["speculative"] == pytest.approx(1 + token, abs=0.015)
    for name in ("block", "otm_layer", "traversal"):  # On one chain the same.
        assert seen[name] == pytest.approx(1 + block, abs=0.015)
    assert block > token + 0.02


def test_one_call_of_the_target_a_step_whatever_the_tree():
    calls = []

    class Counting(TableModel):
        def extend(self, tokens, *args, **kwargs):
            calls.append(tokens.shape[1])
            return super().extend(tokens, *args, **kwargs)

    for tree, nodes in (("4,2,1,1", 28), ("specinfer:9", 9)):
        calls.clear()
        generate(
            jax.random.key(0),
            get_method("gsd", tree=tree),
            Counting(TARGET),
            TableModel(DRAFT),
            [[1, 2]],
            [2],
            12,
        )
        assert calls == [
            BUCKET,
            nodes + 1,
        ]  # The prompt, and one pass over the tree in the loop's body.


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spectre", {}, r"unknown method 'spectre'; did you mean 'spectr'\?"),
        ("spectr", {"num_drafts": 0}, "num_drafts=0 is not a whole number of at least 1"),
        (
            "speculative",
            {"draft_length": -2},
            "draft_length=-2 is not a whole number of at least 1",
        ),
        (
            "spectr",
            {"drafts": 2},
            "method 'spectr' has no option 'drafts'; it has num_drafts, draft_length",
        ),
        (
            "otm",
            {"tree": "batch:x"},
            "tree 'batch:x' is not known; give the children of each level, such as 4,2,1, or one",
        ),
        ("gsd", {"tree": "2,0"}, "k_2=0 is not a whole number of at least 1"),
        ("self_speculative", {"layers": 0}, "layers=0 is not a whole number of at least 1"),
        ("self_speculative", {"method": "otm", "drafts": 2}, "method 'otm' has no option 'drafts'"),
    ],
)
def test_bad_methods(name, options, message):
    with pytest.raises(UserError, match=message):
        get_method(name, **options)
