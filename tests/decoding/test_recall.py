"""Prompt lookup: the drafted tokens, their acceptance, and calls without drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Method, Policy, get_method
from spectr_jax.decoding.drafters import Recall, Sequences, Verified
from spectr_jax.decoding.drafters.recall import LATER, MATCHED, RANKED, UNRANKED, likeliest
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import parse
from spectr_jax.decoding.verifiers import FromTarget, TokenByToken
from spectr_jax.models.bigram import Bigram, BigramConfig
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.vocabulary import Constant
from spectr_jax.transport import get
from spectr_jax.utils.errors import UserError

PADDED = 24


def _matched(tokens, place, most):
    """Returns how many tokens before `place` equal the last tokens."""
    match = 0
    while match < min(most, place) and tokens[place - 1 - match] == tokens[-1 - match]:
        match += 1
    return match


def _candidates(drafter, tokens, table, count):
    """Returns the best candidates for the next token, by a search through all earlier places."""
    places = [
        (_matched(tokens, place, drafter.max_ngram), place) for place in range(1, len(tokens))
    ]
    copies = []
    for match, place in sorted(places, reverse=True):
        if match >= drafter.min_ngram and tokens[place] not in [token for token, _ in copies]:
            copies.append((tokens[place], match))
    ranked = [] if table is None else table[tokens[-1]].tolist()
    scores = {}
    for number, (token, match) in enumerate(copies[:count]):
        of_rank = RANKED[ranked.index(token)] if token in ranked else UNRANKED
        scores[token] = MATCHED[match] + LATER * (number > 0) + of_rank
    for token, of_rank in zip(ranked, RANKED, strict=False):
        if token >= 0:
            scores.setdefault(token, MATCHED[0] + of_rank)
    return sorted(scores, key=lambda token: -scores[token])[:count]


def _by_hand(drafter, tree, tokens, table=None):
    drafts, spelled = [-1] * (tree.size + 1), [None] * (tree.size + 1)
    spelled[0] = tokens
    for node in range(tree.size + 1):
        children = [child for child in tree.children_table[node].tolist() if child >= 0]
        if children and spelled[node] is not None:
            level = tree.levels[tree.depth[node] + 1]
            most = int(tree.sibling_rank[level].max()) + 1
            found = _candidates(drafter, spelled[node], table, most)
            for child, token in zip(children, found, strict=False):
                drafts[child], spelled[child] = token, [*spelled[node], token]
    return drafts[1:]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("chain:5", {"ranks": 0}),
        ("3x3", {"max_ngram": 2, "ranks": 0}),
        ("2,2", {"max_ngram": 4, "min_ngram": 2, "ranks": 0}),
        ("3,2,1", {"ranks": 0}),
        ("3,2,1", {}),
        ("recall:7", {"max_ngram": 3, "min_ngram": 2, "ranks": 3}),
        ("3,1", {"max_ngram": 0, "ranks": 2}),
        ("4", {"max_ngram": 1, "ranks": 1}),
    ],
)
def test_the_drafts_are_the_best_candidates(shape, options):
    """Tokens at `length` and later continue the pattern here, and must be ignored."""
    tree, drafter, rng = parse(shape), Recall(**options), np.random.default_rng(0)
    lengths, V = rng.integers(1, 16, 300), 5
    rows = rng.integers(0, V, (300, PADDED)).astype(np.int32)
    rows[:20] = np.arange(PADDED) % 3
    rows[20:100] %= 2
    tables = rng.permuted(np.tile(np.arange(8), (len(rows), V, 1)), axis=-1)[..., : drafter.ranks]
    tables = np.where(tables < V, tables, -1).astype(np.int32)
    table_axis = 0 if drafter.ranks else None
    tables = tables if drafter.ranks else None
    recalled = jax.vmap(functools.partial(drafter.recalled, tree), in_axes=(0, 0, table_axis))
    drafts = jax.jit(recalled)(rows, lengths, tables)
    expected = [
        _by_hand(
            drafter, tree, rows[i, : lengths[i]].tolist(), None if tables is None else tables[i]
        )
        for i in range(len(rows))
    ]
    np.testing.assert_array_equal(drafts, expected)
    assert (np.array(expected) >= 0).any()
    assert (np.array(expected) < 0).any() == (drafter.ranks < 8)  # Eight ranks know all tokens.


def test_a_large_max_ngram_does_not_enlarge_the_program():
    def size(max_ngram):
        drafter, tree = Recall(max_ngram), parse("chain:2")
        traced = jax.make_jaxpr(lambda tokens: drafter.recalled(tree, tokens, 9))(
            np.zeros(2000, np.int32)
        )
        return len(str(traced))

    assert size(64) < size(16) + 50


def test_lookup_repeats_short_copies_and_drafts_nothing_without_a_match():
    lookup, tree = Recall(), parse("chain:4")
    for tokens, drafts in (
        ([7], [-1] * 4),
        ([5, 6, 7], [-1] * 4),
        ([0, 0, 1], [-1] * 4),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # The copy reaches the end, and continues from its start.
        ([1, 1], [1, 1, 1, 1]),
        ([2, 5, 9, 9, 2, 6, 2, 5], [9, 9, 2, 6]),
        # A match of three tokens ranks before a later match of two.
        ([4, 2, 5, 1, 9, 2, 5, 2, 4, 2, 5], [1, 9, 2, 5]),
    ):
        padded = np.pad(np.array(tokens, np.int32), (0, 12 - len(tokens)))
        assert lookup.recalled(tree, padded, len(tokens)).tolist() == drafts, tokens


def test_acceptance_is_the_target_probability_of_the_drafts():
    """No exact verifier can accept more. The target never emits token 2, so drafts of it fail."""
    table = np.tile([0.35, 0.25, 0.0, 0.3, 0.1], (5, 5, 1))
    prompt, rows = [1, 0, 1, 2, 1, 3, 1], 20_000
    method = get_method("lookup", tree="2,1", max_ngram=1)  # The drafts are 3 and 2.

    def first(call):
        start = call.scored.length == len(prompt)
        accepted = start & (call.chosen.emitted > 1)
        return {"accepted": accepted, "drafts": call.scored.tokens[1:3] * start}

    arguments = TableModel(table), None, [prompt] * rows, [len(prompt)] * rows, 6
    made = generate(jax.random.key(0), method, *arguments, observe=first)
    np.testing.assert_array_equal(made.observed["drafts"][0], [3, 2])
    assert np.mean(made.observed["accepted"]) == pytest.approx(0.3, abs=4 * np.sqrt(0.21 / rows))
    new = np.asarray(made.tokens)[:, len(prompt) : len(prompt) + 6]
    assert not (new == 2).any() and new.min() >= 0
    counts = np.bincount(new.ravel(), minlength=5) / new.size
    np.testing.assert_allclose(counts, table[0, 0], atol=0.006)


def test_a_call_without_drafts_scores_only_the_root():
    """The whole tree is scored if any sequence of the batch has drafts. This changes no tokens."""
    model, method = TableModel(random_table(0, 6)), get_method("lookup", draft_length=3)
    lengths, policy = [3, 3], Policy(0.0)

    def widths(call):
        drafted = call.scored.tokens[1] >= 0
        scored = jnp.any(call.scored.logits[1:] != 0)
        seen = {"drafted": drafted, "scored": scored, "other": scored & ~drafted}
        return seen | {"counted": call.chosen.draft_counts[0]}

    def run(prompts):
        rest = prompts, lengths, 6, policy, widths
        return generate(jax.random.key(0), method, model, None, *rest)

    apart = run([[0, 1, 2]] * 2)
    np.testing.assert_array_equal(apart.observed["drafted"], apart.observed["scored"])
    np.testing.assert_array_equal(apart.observed["drafted"], apart.observed["counted"])
    assert 0 < apart.observed["drafted"][0] < apart.target_calls[0]
    both = run([[0, 1, 2], [3, 3, 3]])
    assert both.observed["other"][0] > 0
    np.testing.assert_array_equal(both.observed["drafted"], both.observed["counted"])
    np.testing.assert_array_equal(both.tokens[0], apart.tokens[0])


def test_lookup_accepts_all_drafts_of_a_repeated_cycle():
    """The target repeats a cycle of five tokens. After the first cycle, each call accepts all
    drafts."""
    table = np.full((5, 5, 5), 0.01)
    for token in range(5):
        table[:, token, (token + 1) % 5] = 0.96
    method = get_method("lookup", draft_length=4)
    made = generate(jax.random.key(0), method, TableModel(table), None, [[0]], [1], 50, Policy(0.0))
    assert np.asarray(made.tokens)[0, :51].tolist() == [token % 5 for token in range(51)]
    assert made.target_calls[0] == 5 + 45 // 5


def _state_after(drafted, path, emitted, logits):
    """Returns the table of one sequence of four tokens after a call; all its tokens were unknown."""
    drafter, V = Recall(ranks=2), logits.shape[-1]
    verified = Verified(
        drafted=jnp.array([drafted]),
        logits=jnp.asarray(logits)[None],
        features=None,
        path=jnp.array([path]),
        lengths_before=jnp.array([4]),
        after=Sequences(tokens=jnp.zeros((1, 9), jnp.int32), lengths=jnp.array([4 + emitted])),
    )
    table = jnp.full((1, V, 2), -1, jnp.int32)
    return np.asarray(drafter.commit(None, table, verified))[0]


def test_a_call_stores_what_the_target_ranked_first_after_each_scored_token():
    """Nodes 1 and 3 have one token: the accepted one counts, or else the last."""
    logits = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    logits[2, 1:] = -np.inf  # One token has a finite logit.
    drafted, top = [5, 2, 3, 2, -1], np.argsort(-logits)[:, :2]
    for path, emitted, node in (([1, 0], 2, 1), ([2, 3], 3, 3), ([1, 0], 1, 3)):
        table = _state_after(drafted, path, emitted, logits)
        expected = np.full((6, 2), -1)
        expected[5], expected[2], expected[3, 0] = top[0], top[node], 0
        np.testing.assert_array_equal(table, expected)


def test_recycled_tokens_are_those_that_the_target_ranked_first_the_last_time():
    """Replays each call. Of equal tokens, the accepted draft counts, then the root, then the rest."""
    table, rows, known = random_table(2, 6), 50, 0
    method = get_method("recycle", tree="2", max_ngram=0, ranks=2)

    def drafts(call):
        return (jnp.arange(40) == call.scored.length)[:, None] * (call.scored.tokens[1:] + 1)

    prompts = np.random.default_rng(0).integers(0, 6, (rows, 2))
    arguments = TableModel(table), None, prompts, [2] * rows, 20
    made = generate(jax.random.key(0), method, *arguments, observe=drafts)
    drafted, ranked = np.asarray(made.observed) - 1, np.argsort(-table)[..., :2]
    for row in range(rows):
        tokens, place, stored = made.tokens[row].tolist(), 2, {}
        while place < int(made.lengths[row]):
            before, last, token = tokens[place - 2 : place + 1]
            children = stored.get(last, np.array([-1, -1]))
            np.testing.assert_array_equal(drafted[row, place], children)
            known += last in stored
            accepted = token in children
            stored |= {child: ranked[last, child] for child in children.tolist() if child >= 0}
            stored[last] = ranked[before, last]
            if accepted:
                stored[token] = ranked[last, token]
            place += 1 + accepted
    assert known > rows


def test_a_bigram_model_starts_the_table():
    """The target repeats a cycle, which the table knows: each call accepts all drafts."""
    V = 5
    cycle = np.full((V, V, V), 0.01)
    for token in range(V):
        cycle[:, token, (token + 1) % V] = 0.96
    table = Bigram(BigramConfig(V, ranks=2, context=128))
    following = (np.arange(V)[:, None] + [1, 3]) % V
    table.tokens = Constant(jnp.asarray(following, jnp.uint16))
    method = get_method("recycle", tree="chain:4")
    calls = []
    for draft in (table, None):
        arguments = TableModel(cycle), draft, [[0]], [1], 10, Policy(0.0)
        made = generate(jax.random.key(0), method, *arguments)
        assert np.asarray(made.tokens)[0, :11].tolist() == [token % V for token in range(11)]
        calls.append(int(made.target_calls[0]))
    assert calls == [2, 6]


@pytest.mark.parametrize("V", [5, 700, 1_500, 49_152])
def test_likeliest_finds_the_largest_logits(V):
    """With 8 ranks and more than 1,024 tokens, a CPU looks into blocks."""
    logits = np.random.default_rng(0).standard_normal((3, 4, V)).astype(np.float32)
    logits[0, 0] = -np.inf
    logits[0, 0, [4, 1]] = [0.5, 0.7]
    logits[1, :, -1], logits[1, :, 3] = 9.0, 8.0
    found, order = np.asarray(likeliest(jnp.asarray(logits), 8)), np.argsort(-logits, axis=-1)
    expected = np.pad(order, ((0, 0), (0, 0), (0, 8)), constant_values=-1)[..., :8]
    expected[0, 0] = [1, 4, *[-1] * 6]
    np.testing.assert_array_equal(found, expected)


def test_only_methods_that_draft_with_a_model_need_one():
    names = ("baseline", "lookup", "self_speculative", "recycle", "block", "otm_layer", "gsd")
    needs = [get_method(name).needs_draft for name in names]
    assert needs == [False, False, False, False, True, True, True]
    takes = [get_method(name).takes_draft for name in names]
    assert takes == [False, False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_method("lookup", max_ngram=0), "max_ngram=0, ranks=0: nothing is drafted"),
        (
            lambda: get_method("lookup", max_ngram=65),
            r"max_ngram=65: must be an integer in 0\.\.64",
        ),
        (lambda: get_method("recycle", ranks=-1), r"ranks=-1: must be an integer in 0\.\.64"),
        (lambda: get_method("recycle", ranks=2.0), r"ranks=2\.0: must be an integer"),
        (lambda: get_method("recycle", tree="recall:0"), r"tree='recall:0': size=0: must be"),
        (lambda: get_method("lookup", max_ngram=3, min_ngram=4), "min_ngram=4: must be"),
        (lambda: get_method("self_speculative", method="lookup"), "FromTarget does not verify"),
        (
            lambda: Method("mine", parse("2"), FromTarget()),
            "FromTarget does not verify drafts of Dra",
        ),
        (
            lambda: Method("mine", parse("2"), TokenByToken(get("naive")), drafter=Recall()),
            r"TokenByToken does not verify drafts of Recall\(max_ngram=16",
        ),
    ],
)
def test_invalid_lookup_options_and_drafters_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
