"""Prompt lookup: the drafted tokens, their acceptance, and calls without drafts."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Method, Policy, get_method
from spectr_jax.decoding.drafters import Lookup
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import parse
from spectr_jax.decoding.verifiers import FromTarget, TokenByToken
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.transport import get
from spectr_jax.utils.errors import UserError

PADDED = 24


def _by_hand(lookup, tree, tokens):
    """Returns the drafts, found by a search through all earlier occurrences."""
    length, found = len(tokens), []
    for place in range(1, length):
        match, most = 0, min(lookup.max_ngram, place)
        while match < most and tokens[place - 1 - match] == tokens[length - 1 - match]:
            match += 1
        if match >= lookup.min_ngram:
            copied = tokens[place:]
            follow = [copied[depth % len(copied)] for depth in range(tree.height)]
            found.append((match, place, follow))
    found.sort(reverse=True)
    drafts, spelled = [-1] * (tree.size + 1), [None] * (tree.size + 1)
    spelled[0] = []
    for node in range(1, tree.size + 1):
        parent, depth = int(tree.parent[node]), int(tree.depth[node])
        if spelled[parent] is None:
            continue
        siblings = [drafts[other] for other in range(1, node) if tree.parent[other] == parent]
        follow = [copy[depth - 1] for *_, copy in found if copy[: depth - 1] == spelled[parent]]
        drafts[node] = next((token for token in follow if token not in siblings), -1)
        spelled[node] = None if drafts[node] < 0 else [*spelled[parent], drafts[node]]
    return drafts[1:]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("chain:5", {}),
        ("3x3", {"max_ngram": 2}),
        ("3,2,1", {}),
        ("2,2", {"max_ngram": 4, "min_ngram": 2}),
        ("2,1", {"max_ngram": 11}),
        ("2,1", {"max_ngram": 1000, "min_ngram": 2}),
    ],
)
def test_lookup_drafts_the_tokens_after_earlier_occurrences(shape, options):
    """Tokens at `length` and later continue the pattern here, and must be ignored."""
    tree, lookup, rng = parse(shape), Lookup(**options), np.random.default_rng(0)
    lengths = rng.integers(1, 16, 300)
    rows = rng.integers(0, 3, (300, PADDED)).astype(np.int32)
    rows[:20] = np.arange(PADDED) % 3
    drafts = jax.jit(jax.vmap(lambda tokens, length: lookup.copied(tree, tokens, length)))(
        rows, lengths
    )
    prefixes = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    expected = [_by_hand(lookup, tree, prefix) for prefix in prefixes]
    np.testing.assert_array_equal(drafts, expected)
    assert (np.array(expected) >= 0).any() and (np.array(expected) < 0).any()


def test_a_large_max_ngram_does_not_enlarge_the_program():
    def size(max_ngram):
        lookup, tree = Lookup(max_ngram), parse("chain:2")
        traced = jax.make_jaxpr(lambda tokens: lookup.copied(tree, tokens, 9))(
            np.zeros(2000, np.int32)
        )
        return len(str(traced))

    assert size(1500) < size(100) + 50


def test_lookup_repeats_short_copies_and_drafts_nothing_without_a_match():
    lookup, tree = Lookup(), parse("chain:4")
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
        assert lookup.copied(tree, padded, len(tokens)).tolist() == drafts, tokens


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


def test_only_methods_that_draft_with_a_model_need_one():
    names = ("baseline", "lookup", "self_speculative", "block", "otm_layer", "gsd")
    needs = [get_method(name).needs_draft for name in names]
    assert needs == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_method("lookup", max_ngram=0), "max_ngram=0"),
        (lambda: get_method("lookup", min_ngram=4), "min_ngram=4: must be at most max_ngram=3"),
        (lambda: get_method("self_speculative", method="lookup"), "FromTarget does not verify"),
        (
            lambda: Method("mine", parse("2"), FromTarget()),
            "FromTarget does not verify drafts of Dra",
        ),
        (
            lambda: Method("mine", parse("2"), TokenByToken(get("naive")), drafter=Lookup()),
            r"TokenByToken does not verify drafts of Lookup\(max_ngram=3",
        ),
    ],
)
def test_invalid_lookup_options_and_drafters_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.slow
def test_sample_with_lookup_needs_no_draft_model(tmp_path):
    prompt, page = "The committee will meet again. The committee", tmp_path / "page.html"
    flags = ["--target=2m", "--method=lookup", "--max_new_tokens=8", "--temperature=0"]
    flags += [f"--prompt={prompt}", f"--html={page}"]
    command = [sys.executable, "-m", "spectr_jax.sample", *flags]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(prompt) and "lookup: 8 tokens in " in shown
    assert "token of the target" in page.read_text() or "accepted draft" in page.read_text()
