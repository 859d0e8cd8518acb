"""One table of methods x shared properties: a new method is tested by adding a line to METHODS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spectr_jax.decoding import Policy, generate, get_method
from spectr_jax.decoding.generate import BUCKET
from spectr_jax.errors import UserError
from spectr_jax.models.table import TableModel, exact_law, perturbed, random_table

METHODS = {
    "baseline": ("baseline", {}),
    "speculative L=3": ("speculative", {"draft_length": 3}),
    "spectr K=3 L=2": ("spectr", {"num_drafts": 3, "draft_length": 2}),
    "spectr K=2 L=5": ("spectr", {"num_drafts": 2, "draft_length": 5}),
    "kseq_gamma gamma=1.2": ("kseq_gamma", {"num_drafts": 2, "draft_length": 3, "gamma": 1.2}),
    "naive K=2 L=3": ("naive", {"num_drafts": 2, "draft_length": 3}),
    "recursive K=3 L=2": ("recursive", {"num_drafts": 3, "draft_length": 2}),
    "spectr+ K=2 L=3": ("spectr+", {"num_drafts": 2, "draft_length": 3}),
    "spectr++ K=3 L=2": ("spectr++", {"num_drafts": 3, "draft_length": 2}),
    "otm K=3 L=2": ("otm", {"num_drafts": 3, "draft_length": 2}),
    "otm tree 3,2,1": ("otm", {"tree": "3,2,1"}),
    "block L=4": ("block", {"draft_length": 4}),
    "otm_block K=3 L=3": ("otm_block", {"num_drafts": 3, "draft_length": 3}),
    "otm_block tree 2,2,1": ("otm_block", {"tree": "2,2,1"}),
    "gbv K=3 L=3": ("gbv", {"num_drafts": 3, "draft_length": 3}),
    "gsd specinfer": ("gsd", {"tree": "specinfer:8"}),
    "gsd wide": ("gsd", {"tree": "4,2"}),
    "ersd specinfer": ("ersd", {"tree": "specinfer:8"}),
    "ersd wide": ("ersd", {"tree": "4,2"}),
    "greedy_drafts": ("greedy_drafts", {"tree": "3,2,1"}),
    "self_speculative": ("self_speculative", {"method": "otm_block", "tree": "2,2,1"}),
}
# The tests of a method run in one process: most share one compiled program.
every_method = pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in METHODS])

VOCAB, PROMPT, LENGTH, EOS = 4, (1, 2), 4, 3
TARGET = random_table(0, VOCAB)
DRAFT = perturbed(TARGET, 1, 0.8)
POLICIES = {"plain": Policy(), "shaped": Policy(temperature=0.7, top_k=3, top_p=0.9, eos=EOS)}
# Methods with two cases see the plain law in one and a shaped one in the other: the policy acts before any method does.
SHAPED = ("spectr K=2 L=5", "otm K=3 L=2", "otm_block tree 2,2,1", "gsd wide", "ersd wide")
GENERATIONS, BATCH = 200_000, 50_000


def _method(case):
    name, options = METHODS[case]
    return get_method(name, **options)


def _shaped(table, policy):
    """The policy applied to a table of probabilities, written without regard to the code under test."""
    logits = np.log(table) / policy.temperature
    shaped = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-shaped, axis=-1)
    for index in np.ndindex(table.shape[:-1]):
        row, ranked = shaped[index], order[index]
        keep = list(ranked[: policy.top_k or None])
        row[[token for token in ranked if token not in keep]] = 0
        row /= row.sum()
        mass = 0.0
        for token in ranked:
            if mass >= policy.top_p:
                row[token] = 0
            mass += row[token]
        row /= row.sum()
    return shaped


def _ragged_prompts(seed, rows=8, length=6):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    lengths[0] = 1  # The draft has no token before the last one to recall.
    return rng.integers(0, VOCAB - 1, (rows, length)).astype(np.int32), lengths


def _generate(case, keys, prompts, lengths, temperature=1.0, table=TARGET, draft=DRAFT):
    """Nine tokens or up to EOS, in the one program that the tests below share."""
    method = _method(case)  # A new, equal object each time.
    policy = Policy(temperature=temperature, eos=EOS)
    return generate(keys, method, *_models(table, draft), prompts, lengths, 9, policy)


def _models(table=TARGET, draft=DRAFT):
    """The target, with the draft as its first layer too, and the draft."""
    return TableModel(table, exits=(draft,)), TableModel(draft)


@pytest.mark.parametrize(
    ("case", "policy"),
    [pytest.param(case, "shaped" if case in SHAPED else "plain", marks=pytest.mark.xdist_group(case)) for case in METHODS],
)
def test_whole_outputs_follow_the_target(case, policy):
    policy = POLICIES[policy]
    target, draft = _models()
    law = exact_law(_shaped(TARGET, policy), PROMPT, LENGTH, policy.eos if policy.eos >= 0 else None)
    counts = dict.fromkeys(law, 0)
    prompts, lengths = np.tile(PROMPT, (BATCH, 1)), np.full(BATCH, len(PROMPT))
    for chunk in range(GENERATIONS // BATCH):
        key = jax.random.fold_in(jax.random.key(11), chunk)
        result = generate(key, _method(case), target, draft, prompts, lengths, LENGTH, policy)
        new = np.asarray(result.lengths) - len(PROMPT)
        rows, repeats = np.unique(
            np.column_stack([np.asarray(result.tokens)[:, len(PROMPT) :], new]), axis=0, return_counts=True
        )
        for row, repeat in zip(rows, repeats, strict=True):
            counts[tuple(row[: row[-1]].tolist())] += repeat  # A KeyError is a continuation that cannot be.

    expected = np.array([GENERATIONS * probability for probability in law.values()])
    observed = np.array(list(counts.values()))
    assert not observed[expected == 0].any()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    likely = expected > 0
    assert scipy.stats.chisquare(observed[likely], expected[likely]).pvalue > 1e-3


@every_method
@pytest.mark.parametrize("seed", [0, 3, 4, 5])
def test_greedy_emits_the_baseline_tokens(case, seed):
    table = random_table(seed, VOCAB)
    rest = *_ragged_prompts(seed), 0.0, table, perturbed(table, seed + 1, 0.8)
    ours = _generate(case, jax.random.split(jax.random.key(seed), 8), *rest)
    baseline = _generate("baseline", jax.random.split(jax.random.key(99), 8), *rest)
    np.testing.assert_array_equal(ours.tokens, baseline.tokens)
    np.testing.assert_array_equal(ours.lengths, baseline.lengths)
    if seed == 5 and case == "baseline":  # The cases are not vacuous: some texts end early, some at the limit.
        new = np.asarray(baseline.lengths) - rest[1]
        assert (new < 9).any() and (new == 9).any()


@every_method
def test_a_row_does_not_depend_on_its_neighbours(case):
    prompts, lengths = _ragged_prompts(5)
    keys = jax.random.split(jax.random.key(3), 8)
    together = _generate(case, keys, prompts, lengths)
    others, other_lengths = _ragged_prompts(55)
    other_keys = jax.random.split(jax.random.key(33), 8)
    for row in range(8):
        place = 7 - row  # Another slot, among others.
        mixed = _generate(
            case,
            other_keys.at[place].set(keys[row]),
            np.where(np.arange(8)[:, None] == place, prompts[row], others),
            np.where(np.arange(8) == place, lengths[row], other_lengths),
        )
        for mine, theirs in zip(jax.tree.leaves(mixed), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(mine[place], theirs[row])


def test_a_row_alone_is_a_row_of_a_batch():
    models = _models()
    prompts, lengths = _ragged_prompts(5)
    keys = jax.random.split(jax.random.key(3), 8)
    together = _generate("spectr K=3 L=2", keys, prompts, lengths)
    for row in range(8):
        one = slice(row, row + 1)
        alone = generate(keys[one], _method("spectr K=3 L=2"), *models, prompts[one], lengths[one], 9, Policy(eos=EOS))
        for mine, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(mine[0], theirs[row])


@every_method
def test_counters_add_up(case):
    prompts, lengths = _ragged_prompts(6)
    result = _generate(case, jax.random.split(jax.random.key(0), 8), prompts, lengths)
    histogram = np.asarray(result.emitted_per_call)
    np.testing.assert_array_equal(histogram @ np.arange(histogram.shape[1]), np.asarray(result.lengths) - lengths)
    np.testing.assert_array_equal(histogram.sum(1), result.target_calls)
    assert not histogram[:, 0].any()
    past = np.arange(result.tokens.shape[1]) >= np.asarray(result.lengths)[:, None]
    assert not np.asarray(result.tokens)[past].any()
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(result.tokens[row, :length], prompts[row, :length])


@every_method
def test_second_call_compiles_nothing(case, count_compilations):
    prompts, lengths = _ragged_prompts(7)
    keys = [jax.random.split(jax.random.key(seed), 8) for seed in range(2)]
    _generate(case, keys[0], prompts, lengths, 0.9)
    with count_compilations() as second:
        _generate(case, keys[1], prompts, lengths, 0.3)
    assert not second


def test_compilations_are_counted(count_compilations):
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compiled


DRAW_FOR_DRAW = {
    "spectr, one chain": (("speculative", {"draft_length": 4}), ("spectr", {"num_drafts": 1, "draft_length": 4})),
    "otm, one chain": (("speculative", {"draft_length": 4}), ("otm", {"num_drafts": 1, "draft_length": 4})),
    "otm_block, one chain": (("block", {"draft_length": 4}), ("otm_block", {"num_drafts": 1, "draft_length": 4})),
    "gbv, one chain": (("block", {"draft_length": 4}), ("gbv", {"num_drafts": 1, "draft_length": 4})),
    "otm_block, one level": (("otm", {"tree": "4"}), ("otm_block", {"tree": "4"})),
}


@pytest.mark.parametrize("pair", DRAW_FOR_DRAW)
@pytest.mark.xdist_group("chains")  # These and the perfect drafts share programs.
def test_special_cases_draw_for_draw(pair):
    prompts, lengths = _ragged_prompts(8, rows=64)
    results = [
        generate(jax.random.key(4), get_method(name, **options), *_models(), prompts, lengths, 20)
        for name, options in DRAW_FOR_DRAW[pair]
    ]
    for ours, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_races_give_the_same_text_whatever_the_draft_and_the_tree():
    prompts, lengths = _ragged_prompts(8, rows=64)
    other = perturbed(TARGET, 2, 3.0)
    texts, calls = [], []
    for tree, draft in (("3,1", DRAFT), ("specinfer:8", DRAFT), ("chain:2", other), ("3,1", TARGET)):
        method = get_method("ersd", tree=tree)
        result = generate(jax.random.key(4), method, TableModel(TARGET), TableModel(draft), prompts, lengths, 20)
        texts.append(np.asarray(result.tokens))
        calls.append(int(np.sum(result.target_calls)))
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
    assert calls[3] < calls[0] < calls[2]


def test_block_verification_accepts_more_of_the_same_drafts():
    """The first call has the same drafts: with at most L + 1 tokens to go, fewer calls mean that it emitted more."""
    prompts, lengths = np.tile(PROMPT, (50_000, 1)), np.full(50_000, 2)
    models = TableModel(TARGET), TableModel(perturbed(TARGET, 1, 2.0))
    calls = {}
    for name in ("speculative", "block"):
        result = generate(jax.random.key(0), get_method(name, draft_length=2), *models, prompts, lengths, 3)
        calls[name] = float(np.mean(np.asarray(result.target_calls)))
    assert calls["block"] < calls["speculative"] - 0.005


def test_expected_accepted_tokens_of_block_verification():
    """Two drafts, by enumeration: token by token, and by Sun et al. (2024)."""
    prompts, lengths = np.tile(PROMPT, (100_000, 1)), np.full(100_000, 2)
    seen = {}

    def emitted(call):
        return {"emitted": jnp.float32(call.chosen.emitted)}

    for name in ("speculative", "block"):
        method = get_method(name, draft_length=2)
        result = generate(jax.random.key(0), method, *_models(), prompts, lengths, 1, observe=emitted)
        seen[name] = float(np.mean(np.asarray(result.observed["emitted"])))
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
    assert seen["speculative"] == pytest.approx(1 + token, abs=0.01)
    assert seen["block"] == pytest.approx(1 + block, abs=0.01)
    assert block > token + 0.02


PERFECT = {
    "speculative": ("speculative", {"draft_length": 4}),
    "block": ("block", {"draft_length": 4}),
    "spectr": ("spectr", {"tree": "2,2,1,1"}),
    "otm": ("otm", {"tree": "2,2,1,1"}),
    "otm_block": ("otm_block", {"tree": "2,2,1,1"}),
    "gsd": ("gsd", {"tree": "2,2,1,1"}),
    "ersd": ("ersd", {"tree": "2,2,1,1"}),
}


@pytest.mark.parametrize("case", PERFECT)
@pytest.mark.xdist_group("chains")
def test_a_perfect_draft_is_always_accepted(case):
    name, options = PERFECT[case]
    models = TableModel(TARGET, exits=(TARGET,)), TableModel(TARGET)
    prompts, lengths = _ragged_prompts(8, rows=64)
    result = generate(jax.random.key(0), get_method(name, **options), *models, prompts, lengths, 20)
    np.testing.assert_array_equal(result.target_calls, 4)  # 20 tokens, 4 drafts and a bonus a call.


def test_one_call_of_the_target_a_step_whatever_the_tree():
    calls = []

    class Counting(TableModel):
        def extend(self, tokens, *args, **kwargs):
            calls.append(tokens.shape[1])
            return super().extend(tokens, *args, **kwargs)

    for tree, nodes in (("4,2,1,1", 28), ("specinfer:9", 9)):
        calls.clear()
        generate(jax.random.key(0), get_method("gsd", tree=tree), Counting(TARGET), TableModel(DRAFT), [[1, 2]], [2], 12)
        assert calls == [BUCKET, nodes + 1]  # The prompt, and one pass over the tree in the loop's body.


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spectre", {}, r"unknown method 'spectre'; did you mean 'spectr'\?"),
        ("spectr", {"num_drafts": 0}, "num_drafts=0 is not a whole number of at least 1"),
        ("speculative", {"draft_length": -2}, "draft_length=-2 is not a whole number of at least 1"),
        ("spectr", {"drafts": 2}, "method 'spectr' has no option 'drafts'; it has num_drafts, draft_length"),
        ("otm", {"tree": "batch:x"}, "tree 'batch:x' is not known; give the children of each level, such as 4,2,1, or one"),
        ("gsd", {"tree": "2,0"}, "k_2=0 is not a whole number of at least 1"),
        ("self_speculative", {"layers": 0}, "layers=0 is not a whole number of at least 1"),
        ("self_speculative", {"method": "otm", "drafts": 2}, "method 'otm' has no option 'drafts'"),
    ],
)
def test_bad_methods(name, options, message):
    with pytest.raises(UserError, match=message):
        get_method(name, **options)
