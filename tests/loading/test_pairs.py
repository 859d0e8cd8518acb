"""Tests pairs whose vocabularies differ by added or padded tokens, and refused pairs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from spectr_jax import check_model, generate, get_method, load
from spectr_jax.loading import Trained
from spectr_jax.loading.pairs import fitted, load_pair
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.table import TableModel
from spectr_jax.models.vocabulary import SharedTokens
from spectr_jax.utils.errors import UserError

SIZE = 264


@pytest.fixture(scope="module")
def folders(write_gpt2, tmp_path_factory):
    """Returns a folder of GPT-2s: `plain`, `added` (two extra tokens), `padded` (extra rows), and
    `another` (another vocabulary)."""
    folder = tmp_path_factory.mktemp("pairs")
    for seed, (name, size, added) in enumerate(
        [
            ("plain", SIZE, []),
            ("added", SIZE + 2, ["<think>", "</think>"]),
            ("padded", SIZE + 14, []),
            ("another", SIZE, []),
        ]
    ):
        made = tokenizers.ByteLevelBPETokenizer()
        text = [f"{'other' if name == 'another' else 'law'} {number}" for number in range(99)]
        made.train_from_iterator(
            text, vocab_size=SIZE, special_tokens=["<s>", "</s>"][: 1 + (name == "another")]
        )
        made.add_special_tokens(added)
        write_gpt2(folder / name, size, layers=1, seed=seed)
        made.save(str(folder / name / "tokenizer.json"))
    return folder


def logits_of(model, tokens):
    call = jnp.arange(tokens.shape[1])[None], causal(jnp.ones(tokens.shape, jnp.int32))
    return np.asarray(model.extend(tokens, *call)[0])


@pytest.mark.parametrize(
    ("draft", "target"),
    [("plain", "added"), pytest.param("padded", "plain", marks=pytest.mark.slow)],
)
def test_pairs_with_added_or_padded_tokens_decode(folders, draft, target):
    loaded_target, (loaded_draft,) = load_pair(
        f"hf:{folders / target}", (f"hf:{folders / draft}",), "float32"
    )
    alone = load(f"hf:{folders / draft}").model
    assert (
        loaded_draft.model.vocab_size == loaded_target.model.vocab_size
        and loaded_draft.model.context == alone.context
    )
    tokens = jnp.array([[0, 5, 17, SIZE - 1]])
    masked = logits_of(loaded_draft.model, tokens)
    shared = (
        SIZE
        if "added" in (draft, target)
        else min(alone.vocab_size, loaded_target.model.vocab_size)
    )
    np.testing.assert_array_equal(masked[..., :shared], logits_of(alone, tokens)[..., :shared])
    assert (masked[..., shared:] == -np.inf).all()
    check_model(loaded_draft.model, tolerance=5e-5)
    prompts, lengths = loaded_target.tokenizer.prompts(["law 3", "law 77 law"])
    pair = get_method("speculative", draft_length=2), loaded_target, loaded_draft
    made = generate(jax.random.key(0), *pair, prompts, lengths, 12)
    assert (made.lengths > lengths).all()


def test_tokens_that_the_draft_lacks_are_read_as_0(folders):
    alone = load(f"hf:{folders / 'plain'}").model
    model = SharedTokens(alone, (np.arange(SIZE + 2) < SIZE) & (np.arange(SIZE + 2) != 7))
    tokens = jnp.array([[3, 7, 5, SIZE + 1]])
    read = logits_of(model, tokens)
    np.testing.assert_array_equal(
        read[..., 8:SIZE], logits_of(alone, jnp.array([[3, 0, 5, 0]]))[..., 8:SIZE]
    )
    assert (read[..., 7] == -np.inf).all()


def test_a_draft_of_the_same_vocabulary_is_unchanged(folders):
    plain = load(f"hf:{folders / 'plain'}")
    assert fitted(plain, plain) is plain


def test_pairs_of_different_vocabularies_are_refused(folders):
    with pytest.raises(
        UserError,
        match=r"draft 'another' and target 'plain' have different vocabularies of 264 and 264 tokens: "
        r"263 of 264 common ids differ, such as 1 \('</s>', '!'\), 2 \('!', ",
    ):
        load_pair(f"hf:{folders / 'plain'}", (f"hf:{folders / 'another'}",), "float32")
    alone, other = load(f"hf:{folders / 'plain'}"), load(f"hf:{folders / 'padded'}")
    with pytest.raises(UserError, match="draft: has 278 tokens"):
        generate(jax.random.key(0), get_method("speculative"), alone, other, [[0, 0]], [2], 4)


def _with_tokens(name, tokens):
    """Returns a model that has the tokens `tokens`; None if its tokenizer does not know them."""
    tokenizer = types.SimpleNamespace(vocabulary=name, tokens=tokens)
    model = TableModel(np.full((20,) * 3, 1 / 20))
    return Trained(name, model, tokenizer)


LETTERS = [*"abcdefghijklmnopqrst"]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (  # One token too many, and the only one of a smaller vocabulary that differs.
            [*LETTERS[:9], "\n" + 40 * "x"],
            r" of 10 and 20 tokens: 1 of 10 common ids differ, such as 9 \('\\nx{21}, 'j'\); 9 tokens "
            "are in both at any ids; give models that share one",
        ),
        (
            LETTERS[1:],
            r" of 19 and 20 tokens: 19 of 19 common ids differ, such as 0 \('b', 'a'\), 1 \('c', 'b'\), "
            r"2 \('d', 'c'\); 19 tokens are in both at any ids; ",
        ),
        (None, ": the tokenizer of 'draft' lists no tokens; give models"),
        ([], ": the tokenizer of 'draft' lists no tokens; give models"),
    ],
)
def test_the_error_says_which_tokens_differ(draft, message):
    pair = _with_tokens("draft", draft), _with_tokens("target", LETTERS)
    start = "^draft 'draft' and target 'target' have different vocabularies"
    with pytest.raises(UserError, match=start + message) as error:
        fitted(*pair)
    assert "\n" not in str(error.value)


def test_the_error_names_the_target_without_tokens():
    with pytest.raises(UserError, match="the tokenizer of 'target' lists no tokens"):
        fitted(_with_tokens("draft", LETTERS), _with_tokens("target", None))


def test_one_different_token_of_twenty_is_not_drafted():
    draft = fitted(_with_tokens("draft", [*LETTERS[:19], "z"]), _with_tokens("target", LETTERS))
    assert logits_of(draft.model, jnp.array([[3]]))[0, 0].tolist().count(-np.inf) == 1
