"""Tests the tokenizers of GGUF files: of bytes, and like SentencePiece's."""

import io
import json
import pathlib
import random
import re

import numpy as np
import pytest
import sentencepiece
import tokenizers

from spectr_jax.data.gguf_tokenizer import SPLITS, gguf_tokenizer
from spectr_jax.utils.errors import UserError

SENTENCES = [
    f"Sentence {number} of many; it's {number}00 and MORE, again\n and   again."
    for number in range(200)
]
REFERENCES = pathlib.Path(__file__).parents[1] / "references"
LINES = [*pathlib.Path(__file__).read_text().splitlines(), *["<0x4", "1>"] * 99]
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_pairs(pre_tokenizer=None) -> tokenizers.Tokenizer:
    made = tokenizers.ByteLevelBPETokenizer()
    if pre_tokenizer:
        made._tokenizer.pre_tokenizer = pre_tokenizer
    made.train_from_iterator(
        SENTENCES, vocab_size=300, special_tokens=list(CONTROLS), show_progress=False
    )
    return made._tokenizer


def metadata(tokenizer: tokenizers.Tokenizer, pre: str, **changes) -> dict:
    given = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(given["vocab"], key=given["vocab"].get)
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in CONTROLS else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in given["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}


SINGLY = ("smollm", "qwen2", "deepseek-r1-qwen", "tekken")
"""Names under which each digit is a part of its own."""


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", *SPLITS])
def test_numbers_are_split_as_the_named_pre_tokenizer_does(pre):
    """Digits are split singly, in threes, or not at all. Decoding must restore every string."""
    read = gguf_tokenizer(metadata(byte_pairs(), pre), "file")
    split = read._tokenizer.pre_tokenizer.pre_tokenize_str
    numbers = [piece for piece, _ in split("a 12345") if any(letter.isdigit() for letter in piece)]
    of_three = {"gpt-2": ["Ġ12345"]}.get(pre, ["123", "45"])
    assert numbers == ([*"12345"] if pre in SINGLY else of_three)
    for text in (*SENTENCES[:20], "  two   spaces  ", "日本 😀 it's\r\n\n9", ""):
        assert read.decode(read.encode(text)) == text
    assert read.encode("<|im_start|>again") == [1, *read.encode("again")]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["iPhone", "'s", "ĠaÃīb", "/Ċ", "/Ċ", "/x"]),
        ("gpt-4o", ["i", "Phone's", "Ġa", "Ãīb", "/Ċ/Ċ/", "x"]),
        ("tekken", ["i", "Phone", "'s", "Ġa", "Ãīb", "/Ċ/Ċ/", "x"]),
    ],
)
def test_words_are_split_before_capitals(pre, pieces):
    """Gives the splits of the expressions in the tokenizers that Mistral and OpenAI publish."""
    read = gguf_tokenizer(metadata(byte_pairs(), pre), "file")
    split = read._tokenizer.pre_tokenizer.pre_tokenize_str("iPhone's aÉb/\n/\n/x")
    assert [piece for piece, _ in split] == pieces


def test_missing_bos_settings_default_as_in_llama_cpp():
    """As in llama.cpp, BOS may be missing, and Llama 3 adds BOS even if its file does not say so."""
    for pre, given, adds in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ):
        read = gguf_tokenizer(metadata(byte_pairs(), pre, add_bos_token=given), "file")
        assert read.prompt("again") == [*([1] if adds else []), *read.encode("again")]
    template = "{{ bos_token }}{{ messages[0].content }}"
    values = metadata(byte_pairs(), "qwen2", bos_token_id=None) | {
        "tokenizer.chat_template": template
    }
    read = gguf_tokenizer(values, "file")
    assert read.bos == 2 and read.chat([{"role": "user", "content": "again"}]) == read.encode(
        "again"
    )


@pytest.mark.parametrize(
    "end", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<end_of_turn>", "<turn|>"]
)
def test_known_end_tokens_count_as_eos(end):
    values = metadata(byte_pairs(), "gpt-2")
    values["tokenizer.ggml.tokens"][1] = end
    assert gguf_tokenizer(values, "file").eos == (2, 0, 1)
    values["tokenizer.ggml.token_type"][1] = 1  # The type is ignored, as in llama.cpp.
    read = gguf_tokenizer(values, "file")
    assert read.eos == (2, 0, 1) and read.encode(f"again{end}")[-1] == 1


def test_smollm_tokenizers_equal_those_of_hugging_face():
    """Compares with a tokenizer of Hugging Face's library that splits digits."""
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    splitter = tokenizers.pre_tokenizers.Sequence(
        [digits, tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made = byte_pairs(splitter)
    read = gguf_tokenizer(metadata(made, "smollm"), "file")
    for text in (*SENTENCES, "x1y22 333", "<|im_end|> again"):
        assert read.encode(text) == made.encode(text, add_special_tokens=False).ids
    assert read.vocab_size == made.get_vocab_size()


OWN = ["<tag>", "ab", "\n", "\n\n", "▁▁", "▁▁▁"]
"""User-defined symbols, with Gemma's runs of spaces and of newlines."""
TRAINED = {
    "prefix": {},
    "no prefix": {
        "add_dummy_prefix": False,
        "split_by_number": False,
        "split_by_unicode_script": False,
    },
    "digits": {"split_digits": True},
    "own symbols": {
        "add_dummy_prefix": False,
        "user_defined_symbols": OWN,
        "control_symbols": ["<turn>"],
    },
    "no bytes": {"byte_fallback": False},
}


@pytest.fixture(scope="module", params=TRAINED)
def trained(request):
    """Returns a model that SentencePiece trained, its metadata in a GGUF file, and its options."""
    written, options = io.BytesIO(), TRAINED[request.param]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        model_type="bpe",
        vocab_size=700,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{"byte_fallback": True, **options},
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return processor, _values(processor, options), options


def _values(processor, options):
    """Returns metadata as llama.cpp's converter writes them: own symbols have plain spaces."""
    tokens, ids = [], range(processor.vocab_size())
    types = [1] * len(ids)
    for index in ids:
        token = processor.id_to_piece(index)
        kinds = {2: processor.is_unknown, 3: processor.is_control, 6: processor.is_byte}
        types[index] = next((kind for kind, holds in kinds.items() if holds(index)), 1)
        if token in options.get("user_defined_symbols", ()):
            token, types[index] = token.replace("▁", " "), 4
        tokens.append(token)
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [processor.get_score(index) for index in ids],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": options.get("add_dummy_prefix", True),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def _strings(processor, count):
    """Returns random strings of pieces of the vocabulary and of characters outside it."""
    rng = random.Random(0)
    pieces = [processor.id_to_piece(index) for index in range(3, processor.vocab_size())]
    pieces = [piece.replace("▁", " ") for piece in pieces if not piece.startswith("<")]
    letters = [
        *"sentce of 0123 ;'",
        "  ",
        "\n",
        "\n\n\n",
        "\t",
        "é",
        "日本",
        "😀",
        "ab",
        "<tag>",
        "<0x41>",
    ]
    for _ in range(count):
        parts = rng.choice((pieces, letters, pieces + letters))
        yield "".join(rng.choices(parts, k=rng.randint(1, 20)))


def test_text_is_tokenized_as_by_sentencepiece(trained):
    processor, values, options = trained
    read = gguf_tokenizer(values, "file")
    pieces, prefix = read.pieces, " " if options.get("add_dummy_prefix", True) else ""
    assert read.tokens == values["tokenizer.ggml.tokens"]
    for text in ("", *LINES[:50], *_strings(processor, 500)):
        tokens = processor.encode(text)
        assert read.encode(text) == tokens, text
        assert read.prompt(text) == [1, *tokens]
        if options.get("byte_fallback", True):
            assert read.decode(tokens) == processor.decode(tokens) == text
            spelled = b"".join(pieces[token] for token in tokens)
            assert spelled.decode() == (prefix if text else "") + text


def test_text_between_control_tokens_is_tokenized_separately(trained):
    """With a prefix, each part has its own, as in llama.cpp and for Llama 2's turns."""
    processor, values, _ = trained
    read = gguf_tokenizer(values, "file")
    first, second = processor.encode("of many"), processor.encode(" again")
    tokens = [1, *first, 2, *second]
    assert read.encode("<s>of many</s> again") == tokens
    assert read.encode("<unk>") == [0]
    assert read.decode([*first, 2]) == "of many" and read.ends(2)
    if "<turn>" in values["tokenizer.ggml.tokens"]:
        assert read.encode("<turn>of many<tag>") == [
            processor.piece_to_id("<turn>"),
            *first,
            processor.piece_to_id("<tag>"),
        ]
        assert read.decode(read.encode("<turn>of many<tag>")) == "of many<tag>"
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}</s>"}
    chat = gguf_tokenizer(values | template, "file").chat([{"role": "user", "content": "of many"}])
    assert chat == [1, *first, 2]


def test_merges_of_gemma_4_are_read(trained):
    """Its files have merges besides scores, and never a prefix."""
    processor, values, _ = trained
    expected = gguf_tokenizer(values | {"tokenizer.ggml.add_space_prefix": False}, "file")
    merges = json.loads(expected._tokenizer.to_str())["model"]["merges"]
    values = values | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    read = gguf_tokenizer(values, "file")
    for text in (*LINES[:50], *_strings(processor, 100)):
        assert read.prompt(text) == expected.prompt(text)


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_prompts_and_chats_of_gemma_are_those_of_transformers(kind):
    """A recorded tokenizer in the format of Gemma's has merges; its scores follow their order."""
    recorded = np.load(REFERENCES / "gemma3_with_tokenizer.npz")
    files = json.loads(str(recorded["files"]))
    given = json.loads(files["tokenizer.json"])
    settings = json.loads(files["tokenizer_config.json"])
    tokens = sorted(given["model"]["vocab"], key=given["model"]["vocab"].get)
    controls = {each["content"] for each in given["added_tokens"]}
    kinds = [3 if each in controls else 6 if each.startswith("<0x") else 1 for each in tokens]
    values = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": settings["chat_template"],
    }
    if kind == "llama":
        values["tokenizer.ggml.scores"] = [-float(index) for index in range(len(tokens))]
    else:
        values["tokenizer.ggml.merges"] = [" ".join(pair) for pair in given["model"]["merges"]]
    read = gguf_tokenizer(values, "file")
    prompts = json.loads(str(recorded["prompts"]))
    assert [read.prompt(each) for each in prompts] == json.loads(str(recorded["tokens"]))
    chat = read.chat([{"role": "user", "content": prompts[0]}])
    assert chat == json.loads(str(recorded["chat"])) and read.eos == (1, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "has a tokenizer of kind 't5': only gpt2, llama, gemma4 are read; give"),
        ({"pre": "bloom"}, "pre-tokenizes as 'bloom'; known are smollm, gpt-2, llama-bpe, llama3"),
        ({"merges": None}, "lacks 'tokenizer.ggml.merges' in its metadata"),
        ({"merges": ["no such"]}, "has merges that do not fit its tokens"),
        ({"merges": [3]}, "has merges that are not strings"),
        ({"tokens": [3], "token_type": [1]}, "has tokens that are not strings"),
        ({"model": "llama"}, "lacks 'tokenizer.ggml.scores' in its metadata"),
        ({"model": "llama", "scores": [1.0]}, "has 300 tokens, but not as many scores"),
        ({"model": "llama", "scores": ["1"] * 300}, "has 300 tokens, but not as many scores"),
        ({"unknown_token_id": 300}, "names token 300, but has only 300 tokens"),
        ({"eot_token_id": [2, 3]}, "names token [2, 3], but has only 300 tokens"),
        ({"eos_token_id": 300}, "names token 300, but has only 300 tokens"),
        (
            {"eos_token_id": "2"},
            "has tokenizer.ggml.eos_token_id='2': must be of type int; fetch it again",
        ),
        ({"bos_token_id": "2"}, "names token '2', but has only 300 tokens"),
        (
            {"token_type": 3},
            "has tokenizer.ggml.token_type=3: must be of type list; fetch it again",
        ),
        (
            {"pre": ["smollm"]},
            "has tokenizer.ggml.pre=['smollm']: must be of type str; fetch it again",
        ),
        ({"pre": None}, "lacks 'tokenizer.ggml.pre' in its metadata"),
        ({"pre": "default"}, "'default'"),  # llama.cpp warns about this name.
        ({"token_type": [1, 3]}, "has 300 tokens, but 2 token types; fetch it again"),
    ],
)
def test_unsupported_or_invalid_tokenizers_are_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        gguf_tokenizer(metadata(byte_pairs(), changes.pop("pre", "gpt-2"), **changes), "file")
