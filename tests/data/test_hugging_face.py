"""Tokenizers in Hugging Face's files: ours written, those of GPT-2's family read."""

import random

import numpy as np
import pytest
import tokenizers
import transformers

from spectr_jax.data.hugging_face import HuggingFaceTokenizer, save_tokenizer
from spectr_jax.data.tokenizer import BOS, EOS, Tokenizer
from spectr_jax.errors import UserError
from spectr_jax.loading import EMBEDDED

SENTENCES = [f"Sentence {number} of many, again and again." for number in range(200)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def ours():
    return Tokenizer(EMBEDDED / "tokenizer.model")


@pytest.fixture(scope="module")
def written(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    save_tokenizer(folder, ours, context=128)
    return folder


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    """A GPT-2 tokenizer in both of its forms: folders `new` and `old`."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(SENTENCES, vocab_size=290, special_tokens=[END])
    folder = tmp_path_factory.mktemp("byte_pairs")
    for form in ("new", "old"):
        (folder / form).mkdir()
    made.save(str(folder / "new" / "tokenizer.json"))
    made.save_model(str(folder / "old"))
    return folder


def _texts():
    rng = random.Random(0)
    letters = [*map(chr, range(32, 127)), *" " * 30, *"éßł½–“”…\u00a0\u3000日本語😀\t"]
    drawn = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(500)]
    return [*(EMBEDDED / "prompts.txt").read_text().splitlines()[:100], *drawn, "", " ", "  two   spaces  "]


def test_our_tokenizer_splits_texts_alike_there(ours, written):
    theirs = HuggingFaceTokenizer(written, BOS, EOS)
    auto = transformers.AutoTokenizer.from_pretrained(written)
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 0)
    for text in _texts():
        tokens = ours.encode(text)
        assert theirs.encode(text) == tokens, text
        assert theirs.decode([BOS, *tokens, EOS]) == ours.decode(tokens), text
    for text in _texts()[:50]:
        assert auto.encode(text) == ours.encode(text), text


def test_a_vocabulary_is_the_same_in_either_form(ours, written, byte_pairs):
    assert HuggingFaceTokenizer(written, BOS, EOS).vocabulary == ours.vocabulary
    new, old = (HuggingFaceTokenizer(byte_pairs / form, 0, 0) for form in ("new", "old"))
    assert new.vocabulary == old.vocabulary != ours.vocabulary
    assert new.vocab_size == old.vocab_size > 256


def test_byte_pairs_split_and_join(byte_pairs):
    for form in ("new", "old"):
        tokenizer = HuggingFaceTokenizer(byte_pairs / form, 0, 0)
        for text in ("Sentence 7 of many", " again", "日本 😀", ""):
            assert tokenizer.decode([0, *tokenizer.encode(text), 0]) == text
        pieces = [tokenizer.piece(token) for token in tokenizer.encode("Sentence 7 again")]
        assert "".join(pieces) == "Sentence 7 again" and " again" in pieces
        assert tokenizer.piece(0) == END


def test_pieces_look_as_in_the_text(ours, written):
    theirs = HuggingFaceTokenizer(written, BOS, EOS)
    tokens = ours.encode("The committee will meet \\ again")
    for tokenizer in (ours, theirs):
        assert "".join(map(tokenizer.piece, tokens)) == " The committee will meet \\ again"
        assert tokenizer.piece(EOS) == "</s>"
        assert [tokenizer.piece(token) for token in tokenizer.encode("日")] == [" ", "<0xE6>", "<0x97>", "<0xA5>"]


def test_strings_to_prompts_and_back(ours, byte_pairs):
    """In both kinds: BOS first and behind the shorter ones; what is behind a length is not part of a text."""
    for tokenizer in (ours, HuggingFaceTokenizer(byte_pairs / "new", 0, 5)):
        texts = ["Sentence 7 of many", "again", ""]
        tokens, lengths = tokenizer.prompts(texts)
        assert tokens.dtype == lengths.dtype == np.int32 and tokens.shape == (3, max(lengths))
        for row, length, text in zip(tokens.tolist(), lengths, texts, strict=True):
            assert row[:length] == [tokenizer.bos, *tokenizer.encode(text)]
            assert set(row[length:]) <= {tokenizer.bos}
        assert tokenizer.texts(tokens, lengths) == texts
        assert tokenizer.texts(np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 8), lengths) == texts
        alone, one = tokenizer.prompts(texts[0])
        assert alone.tolist() == [tokens[0, : lengths[0]].tolist()] and one.tolist() == [lengths[0]]
        with pytest.raises(UserError, match="no prompts; give at least one string"):
            tokenizer.prompts([])


def test_a_folder_without_a_tokenizer(byte_pairs, tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer that can be read \(no tokenizer\.json, and not both of vocab"):
        HuggingFaceTokenizer(tmp_path, 0, 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer that can be read"):
        HuggingFaceTokenizer(tmp_path, 0, 0)
