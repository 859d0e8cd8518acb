"""Properties that all methods share. To test a new method, add a line to METHODS."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, decode, get_method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.decoding.request import BUCKET
from spectr_jax.decoding.tree import Tree, chain
from spectr_jax.decoding.verifiers import base
from spectr_jax.experiments.planning.on_tree import on_tree
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, exact_pmf, perturbed, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.testing import chi_square
from spectr_jax.testing import methods as checks
from spectr_jax.testing.methods import DRAFT, EOS, PROMPT, TARGET, VOCAB
from spectr_jax.transport import otm
from spectr_jax.utils.errors import UserError

UNEVEN = Tree((0, 0, 1, 1, 2))
WIDE = Tree((0, 0, 0, 0, 1))
"""The root has as many children as there are tokens, and both levels have leaves."""
METHODS = {
    "baseline": ("baseline", {}),
    "speculative L=3": ("speculative", {"draft_length": 3}),
    "spectr K=2 L=3": ("spectr", {"num_drafts": 2, "draft_length": 3}),
    "spectr gamma=1.2": ("spectr", {"num_drafts": 2, "draft_length": 3, "gamma": 1.2}),
    "naive K=2 L=3": ("naive", {"num_drafts": 2, "draft_length": 3}),
    "recursive K=3 L=2": ("recursive", {"num_drafts": 3, "draft_length": 2}),
    "spectr+ K=2 L=3": ("spectr+", {"num_drafts": 2, "draft_length": 3}),
    "spectr++ K=3 L=2": ("spectr++", {"num_drafts": 3, "draft_length": 2}),
    "otm tree 3,2": ("otm", {"tree": "3,2"}),
    "block L=4": ("block", {"draft_length": 4}),
    "otm_block tree 2,2,1": ("otm_block", {"tree": "2,2,1"}),
    "otm_layer wide": ("otm_layer", {"tree": "3,2", "competitions": 1}),
    "gbv K=3 L=3": ("gbv", {"num_drafts": 3, "draft_length": 3}),
    "gbv_conditional tree 2,2,1": ("gbv_conditional", {"tree": "2,2,1"}),
    "gsd wide": ("gsd", {"tree": WIDE}),
    "traversal wide": ("traversal", {"tree": WIDE}),
    "traversal_iid with leaves": ("traversal_iid", {"tree": Tree((0, 0, 0, 2, 2))}),
    "ersd uneven": ("ersd", {"tree": UNEVEN}),
    "greedy_drafts": ("greedy_drafts", {"tree": "3,2,1"}),
    "lookup tree 3,2,1": ("lookup", {"tree": "3,2,1", "max_ngram": 2}),
    "recycle tree 3,1,1": ("recycle", {"tree": "3,1,1"}),
    "self_speculative": ("self_speculative", {"method": "otm_block", "tree": "2,2,1"}),
}


REPEATED = (
    *("speculative L=3", "spectr gamma=1.2", "naive K=2 L=3", "recursive K=3 L=2"),
    *("spectr+ K=2 L=3", "spectr++ K=3 L=2", "otm tree 3,2", "greedy_drafts", "block L=4"),
    *("gbv_conditional tree 2,2,1", "self_speculative"),
)
"""Cases whose verifier another case also uses. Tests of transport plans check their plans."""


def _cases(cases, slow=REPEATED):
    """Marks cases of METHODS. One case of each verifier runs with users' compiler settings."""

    def marks(case):  # The tests of a method run in one process, because most share one program.
        own = [pytest.mark.xdist_group(case), pytest.mark.optimized]
        own += [pytest.mark.slow] if case in slow else []
        return own if case in REPEATED else [*own, pytest.mark.defaults]

    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=marks(case)) for case in cases]
    )


every_method = _cases(METHODS)
SHAPED = (
    *("spectr K=2 L=3", "otm tree 3,2", "gbv_conditional tree 2,2,1", "otm_layer wide"),
    *("gsd wide", "traversal wide", "ersd uneven", "lookup tree 3,2,1"),
    "recycle tree 3,1,1",
)
"""Cases that run with limits such as top-k. Policies act before methods, so a few cases suffice."""

GENERATIONS = 60_000
"""Fewer than in `check_method`, but enough to detect the errors injected into each verifier."""


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
def test_a_sequence_does_not_depend_on_other_rows(case):
    checks.check_rows(_method(case), _policy(case))


@every_method
def test_counters_add_up_to_the_emitted_tokens(case):
    checks.check_counters(_method(case), _policy(case))


@every_method
def test_a_second_call_compiles_nothing(case):
    checks.check_compilations(_method(case), _method(case), _policy(case))


QUICK_ON_X64 = ("otm_layer wide", "gsd wide", "ersd uneven", "lookup tree 3,2,1")
FIRST = [case for case in METHODS if case not in (*REPEATED, "baseline")]


@_cases(FIRST, slow=[case for case in FIRST if case not in QUICK_ON_X64])
def test_tokens_do_not_depend_on_the_batch_on_x64_or_on_the_jit_of_a_user(case):
    """One program differs in all three from that of the other tests."""
    method, policy = _method(case), _policy(case)
    rows = checks._keys(3), *checks._ragged_prompts(5)
    expected = checks._decode(method, *rows, policy).tokens
    models = [model and freeze(model) for model in checks._models(method)]

    @jax.jit
    def alone(target, draft, keys, prompts, lengths):
        new = checks.LENGTH
        return decode(keys, method, target, draft, prompts, lengths, new, policy).tokens

    with jax.enable_x64(True):
        for row in range(64):
            one = (part[row : row + 1] for part in rows)
            np.testing.assert_array_equal(alone(*models, *one), expected[row : row + 1])


MAY_REFUSE = ("naive", "gbv", "greedy_drafts", "lookup", "recycle")
"""Methods that may reject drafts even if the draft model is the target."""


@_cases(
    [
        case
        for case, (name, options) in METHODS.items()
        if name not in MAY_REFUSE and "gamma" not in options
    ]
)
def test_a_perfect_draft_is_always_accepted(case):
    """Each call emits all tokens on a path from the root to a leaf, and a bonus token."""
    method, policy = _method(case), _policy(case)
    prompts, lengths = checks._ragged_prompts(8)
    result = checks._decode(method, checks._keys(0), prompts, lengths, policy, TARGET, TARGET)
    new, tree = np.asarray(result.lengths) - lengths, method.tree
    leaves = sorted({*range(tree.size + 1)} - {*tree.parent[1:]})
    shortest = min(tree.depth[leaf] for leaf in leaves)
    least, most = (-(-new // (depth + 1)) for depth in (tree.height, shortest))
    assert (least <= result.target_calls).all() and (result.target_calls <= most).all()


def test_count_compilations_detects_a_compiled_program():
    with checks.count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compiled


def _ragged_prompts(seed, rows=8, length=6):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    lengths[0] = 1  # The draft has no second token to recall.
    return rng.integers(0, VOCAB - 1, (rows, length)).astype(np.int32), lengths


def _models():
    return TableModel(TARGET), TableModel(DRAFT)


def _single(name, options, models, prompts, new, *policy, **given):
    """Returns the generation of `get_method(name, **options)` with the key 0, as NumPy arrays."""
    lengths = np.full(len(prompts), prompts.shape[1])
    method = get_method(name, **options)
    out = generate(jax.random.key(0), method, *models, prompts, lengths, new, *policy, **given)
    return jax.tree.map(np.asarray, out)


def _assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("otm_layer wide", "otm_block tree 2,2,1")
        ),
        "gsd wide",
    ],
)
def test_sequential_and_batched_verification_give_equal_results(case, monkeypatch):
    """CPUs verify trees one after another, and accelerators verify all at once (`base.in_turn`), but
    compute nodes on demand where tables would be large (`base.is_large`)."""
    prompts, lengths = _ragged_prompts(5, rows=200)
    outs, in_turn, lax_map = [], [], jax.lax.map
    monkeypatch.setattr(
        jax.lax, "map", lambda *args, **options: in_turn.append(args) or lax_map(*args, **options)
    )
    for small, large in ((0, base.LARGE), (VOCAB, base.LARGE), (VOCAB, 0)):
        monkeypatch.setattr(base, "SMALL_VOCABULARY", small)
        monkeypatch.setattr(base, "LARGE", large)
        in_turn.clear()
        rows = prompts, lengths, 9, Policy(eos=EOS)
        new = {"observe": lambda call: {}}  # A new function makes jit trace again.
        outs.append(generate(jax.random.key(3), _method(case), *_models(), *rows, **new))
        assert bool(in_turn) == (small == 0)
    for other in outs[1:]:
        _assert_equal(outs[0], other)


def test_the_draft_policy_shapes_the_draft_distribution():
    """By default the draft uses the target's policy. A low draft temperature lowers its entropy."""
    method, models = _method("gsd wide"), _models()
    prompts, lengths = _ragged_prompts(5, rows=64)

    def drafted(call):
        return -jnp.sum(jax.scipy.special.xlogy(call.scored.p[0], call.scored.p[0]))

    def run(policy, own):
        given = {"observe": drafted, "draft_policy": own}
        made = generate(jax.random.key(3), method, *models, prompts, lengths, 9, policy, **given)
        return made, np.sum(made.observed) / np.sum(made.target_calls)

    shaped = Policy(0.7, top_k=3)
    (first, entropy), (second, _) = run(shaped, None), run(shaped, shaped)
    _assert_equal(first, second)
    assert run(shaped, Policy(0.05))[1] < 0.3 < 0.6 < entropy
    with pytest.raises(UserError, match=r"draft_temperature=-1\.0"):
        run(shaped, Policy(-1.0))


L2, ONE_CHAIN = {"draft_length": 2}, {"num_drafts": 1, "draft_length": 2}
SAME_DRAWS = [
    (("block", L2), ("otm_block", ONE_CHAIN)),
    (("block", L2), ("gbv", ONE_CHAIN)),
    (("otm", {"tree": "3"}), ("otm_block", {"tree": "3"})),
]


@pytest.mark.parametrize(
    "pair", SAME_DRAWS, ids=lambda pair: " equals ".join(name for name, _ in pair)
)
@pytest.mark.xdist_group("chains")  # They share programs.
def test_equivalent_methods_generate_the_same_tokens(pair):
    arguments = *_models(), *_ragged_prompts(8, rows=64), 20
    methods = (get_method(name, **options) for name, options in pair)
    _assert_equal(*(generate(jax.random.key(4), method, *arguments) for method in methods))


@pytest.mark.parametrize(
    ("name", "tree"), [("spectr", (0, 0, 0, 2, 3)), ("otm_block", (0, 0, 0, 1, 1, 2))], ids=str
)
def test_outputs_are_exact_where_only_one_duplicate_has_children(name, tree):
    """If one of two siblings with equal tokens is a leaf, drafts below the other remain i.i.d."""
    V = 3
    target = random_table(0, V, 0.7)
    draft = np.random.default_rng(5).dirichlet(np.full(V, 0.5), size=(V, V))
    draft[1, 2] = target[1, 2] = [0.4, 0.35, 0.25]  # The first draft is always accepted.
    models, prompts = (TableModel(target), TableModel(draft)), np.tile([1, 2], (40_000, 1))
    first, second = _single(name, {"tree": Tree(tree)}, models, prompts, 2).tokens[:, 2:4].T
    pmf = np.array([target[1, 2, token] * target[2, token] for token in range(V)])
    assert chi_square.p_value(np.bincount(first * V + second, minlength=V * V), pmf.ravel()) > 1e-4


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("spectr", (0, 0, 0, 2, 3)),
        ("otm_block", (0, 0, 0, 1, 1, 2)),
        pytest.param("otm_layer", (0, 0, 0, 2, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_draft_cache_follows_the_duplicate_with_children(name, tree):
    """The model drafts for itself, so p = q at the root if the cache has the rows of the path."""
    shape = TransformerConfig(layers=1, width=16, mlp=32, heads=2, vocab_size=3, context=32)
    model = Transformer(shape, rngs=nnx.Rngs(0))

    def differs(call):
        return jnp.max(jnp.abs(call.scored.p[0] - call.scored.q(0))) > 1e-5

    prompts = np.tile([1, 2], (50, 1))
    result = _single(name, {"tree": Tree(tree)}, (model, model), prompts, 20, observe=differs)
    assert np.sum(result.observed) == 0


UNDEFINED = {"at the root": (slice(None), slice(None)), "below the root": (2, (1, 3))}
"""Contexts of the table in which the draft model has no distribution."""


def _outputs(case, prompt, target, draft, batches=5):
    """Returns the number of times that each output follows a prompt of two tokens."""
    prompts = np.tile(np.pad(prompt, (0, BUCKET - 2)), (checks.BATCH, 1))
    rows, counts = (prompts, np.full(checks.BATCH, 2)), collections.Counter()
    for seed in range(batches):
        arguments = _method(case), checks._keys(seed), *rows, _policy(case)
        result = checks._decode(*arguments, target, draft)
        for tokens, length in zip(result.tokens.tolist(), result.lengths, strict=True):
            counts[tuple(tokens[2:length])] += 1
    return counts


def _check_outputs(counts, pmf):
    assert counts.keys() <= pmf.keys()
    observed = np.array([counts[each] for each in pmf])
    assert chi_square.p_value(observed, np.array([*pmf.values()])) > 1e-4


PATHS = (*("otm_block tree 2,2,1", "otm_layer wide", "traversal wide"), "gbv K=3 L=3")
"""A case for each verifier of whole paths."""


@_cases(PATHS)
def test_drafts_from_undefined_distributions_are_not_used(case):
    """If all draft logits are -inf, p is NaN, and tokens drawn from it do not count as drafts."""
    target = np.full((VOCAB,) * 3, 1 / VOCAB)
    pmf = exact_pmf(target, PROMPT, checks.LENGTH, EOS)
    for places in UNDEFINED.values():
        draft = np.tile([0.4, 0.3, 0.2, 0.1], (VOCAB, VOCAB, 1))
        draft[places] = 0
        _check_outputs(_outputs(case, PROMPT, target, draft), pmf)


@_cases((*PATHS, "otm tree 3,2", "lookup tree 3,2,1"))
def test_target_logits_of_minus_infinity_end_the_sequence(case):
    """After (1, 0) the target has no distribution, so -1 follows and ends the sequence. Verifying
    whole paths must not avoid such paths."""
    halves = np.tile([0.5, 0.5, 0, 0], (VOCAB, VOCAB, 1))
    target = halves.copy()
    target[1, 0] = 0
    assert _outputs(case, (1, 0), target, halves, batches=1) == {(-1,): checks.BATCH}
    pmf = collections.Counter()
    for bits in itertools.product((0, 1), repeat=checks.LENGTH):
        ended = (*bits, 0).index(0) + 1
        pmf[(*bits[:ended], -1)[: checks.LENGTH]] += 1 / 2**checks.LENGTH
    _check_outputs(_outputs(case, (0, 1), target, halves), pmf)


@pytest.mark.parametrize("name", ["gsd", "greedy_drafts", "traversal"])
def test_outputs_are_exact_where_the_draft_residual_underflows(name):
    """At temperature 0.053, all other tokens of p have a mass of 1e-37, and products underflow."""
    V = 5
    draft = np.tile([1, 0.01, 0.0099, 0.0098, 0.0097], (V, V, 1))
    models = TableModel(np.full((V, V, V), 0.2)), TableModel(draft)
    prompts = np.tile([1, 2], (20_000, 1))
    result = _single(name, {"tree": "3"}, models, prompts, 1, draft_policy=Policy(0.053))
    counts = np.bincount(result.tokens[:, 2], minlength=V)
    assert chi_square.p_value(counts, np.full(V, 0.2)) > 1e-4


@_cases(["ersd uneven"])
def test_ersd_sequences_do_not_depend_on_draft_or_tree(case):
    method, rows = _method(case), (checks._keys(4), *checks._ragged_prompts(8), _policy(case))
    other, chained = perturbed(TARGET, 2, 3.0), get_method("ersd", tree="chain:2")
    runs = (method, DRAFT), (chained, other), (method, TARGET)
    first, *others = (checks._decode(each, *rows, TARGET, draft) for each, draft in runs)
    for other in others:
        np.testing.assert_array_equal(other.tokens, first.tokens)
    calls = [np.sum(each.target_calls) for each in (others[1], first, others[0])]
    assert calls == sorted(calls)


@pytest.mark.slow
def test_block_verification_emits_the_expected_tokens_per_call():
    """Compares token-by-token and block verification (Sun et al., 2024) with enumeration."""

    def mean(method):
        def emitted(call):
            return jnp.float32(call.chosen.emitted)

        prompts, lengths = np.tile(PROMPT, (50_000, 1)), np.full(50_000, 2)
        key = jax.random.key(0)
        result = generate(key, method, *_models(), prompts, lengths, 1, observe=emitted)
        return float(np.mean(np.asarray(result.observed)))

    few = {"competitions": 4}  # The acceptance on one chain or level is the same for any number.
    seen = {"otm_layer": mean(get_method("otm_layer", tree=chain(2), **few))}
    for name in ("speculative", "block", "traversal"):
        seen[name] = mean(on_tree(name, chain(2)))
    # On one level, `otm_layer` accepts as the plan does.
    level = mean(get_method("otm_layer", tree="3", **few))
    assert level == pytest.approx(1 + otm.acceptance(DRAFT[PROMPT], TARGET[PROMPT], 3), abs=0.015)
    p1, q1 = DRAFT[PROMPT], TARGET[PROMPT]
    token, block = 0.0, 0.0
    for x in range(VOCAB):
        p2, q2 = DRAFT[PROMPT[1], x], TARGET[PROMPT[1], x]
        token += min(p1[x], q1[x]) * (1 + np.minimum(p2, q2).sum())
        run = min(1.0, q1[x] / p1[x])
        whole = np.minimum(run * q2, p2).sum()  # Both drafts are accepted.
        rest = np.maximum(run * q2 - p2, 0).sum()
        one = (1 - whole) * rest / (rest + 1 - run) if rest else 0.0
        block += p1[x] * (2 * whole + one)
    assert seen["speculative"] == pytest.approx(1 + token, abs=0.015)
    for name in ("block", "otm_layer", "traversal"):  # All three are equal on one chain.
        assert seen[name] == pytest.approx(1 + block, abs=0.015)
    assert block > token + 0.02


def test_each_step_calls_the_target_once_on_any_tree():
    calls = []

    class Counting(TableModel):
        def extend(self, tokens, *args, **kwargs):
            calls.append(tokens.shape[1])
            return super().extend(tokens, *args, **kwargs)

    for tree, nodes in (("4,2,1,1", 28), ("specinfer:9", 9)):
        calls.clear()
        models = Counting(TARGET), TableModel(DRAFT)
        lower(jax.random.key(0), get_method("gsd", tree=tree), *models, [[1, 2]], [2], 12)
        # One call for the prompt, one for the tree in the loop.
        assert calls == [BUCKET, nodes + 1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spectre", {}, r"did you mean 'spectr'\?"),
        ("spectr", {"num_drafts": 0}, "num_drafts=0"),
        ("speculative", {"draft_length": -2}, "draft_length=-2"),
        ("spectr", {"drafts": 2}, "no option 'drafts'; it has num_drafts, draft_length"),
        ("otm", {"tree": "batch:x"}, "tree='batch:x'"),
        ("gsd", {"tree": "2,0"}, "k_2=0"),
        ("self_speculative", {"layers": 0}, "layers=0"),
        ("self_speculative", {"method": "otm", "drafts": 2}, "method 'otm' has no option 'drafts'"),
    ],
)
def test_bad_names_and_options_of_methods_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        get_method(name, **options)


@pytest.mark.parametrize("name", ["gsd", "traversal", "otm_layer"])
def test_a_tree_without_drafts_emits_one_token_per_call(name):
    method, models = get_method(name, tree=Tree(())), (TableModel(TARGET), TableModel(DRAFT))
    out = generate(jax.random.key(0), method, *models, np.array([PROMPT]), np.array([2]), 3)
    assert out.target_calls.tolist() == [3] and out.lengths.tolist() == [5]
