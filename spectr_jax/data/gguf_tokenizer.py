"""The tokenizer in a GGUF file's metadata, of bytes or like SentencePiece's, with the meaning that
llama.cpp gives them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spectr_jax.data.hugging_face import ENDS, HuggingFaceTokenizer
from spectr_jax.data.tokenizer import SPACE
from spectr_jax.utils.errors import UserError

KINDS = ("gpt2", "llama", "gemma4")
"""Byte pairs; SentencePiece's BPE, whose merges follow from scores; the same with its merges."""
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens that no merge makes."""
LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
"""Names of Llama 3's pre-tokenizer."""
ADDS_BOS = (*LLAMA3, "tekken", "llama", "gemma4")
"""BOS is added there unless the file says otherwise."""
OTHERS = r"|%s| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + OTHERS
LARGE, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
FIRST, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASES = f"{FIRST}{LARGE}*{SMALL}+%s|{FIRST}{LARGE}+{SMALL}*%s" + OTHERS
ONE, THREE = r"\p{N}", r"\p{N}{1,3}"
SPLITS = {
    **dict.fromkeys((*LLAMA3, "smaug-bpe"), WORDS % (THREE, "")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WORDS % (ONE, "")),
    **dict.fromkeys(("gpt-4o", "llama4"), CASES % (AFTER, AFTER, THREE, "/")),
    "tekken": CASES % ("", "", ONE, "/"),
}
"""The expressions that split text before byte pairing, by llama.cpp's names."""


Pairs = list[tuple[str, ...]]


class _Values:
    """The values of the tokenizer in the metadata of a file that errors name as `source`."""

    def __init__(self, metadata: Any, source: str):
        self.metadata, self.source = metadata, source

    def damaged(self, problem: str) -> UserError:
        return UserError(f"{self.source!r} {problem}; fetch it again")

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def need(self, name: str, kind: type) -> Any:
        value, name = self.get(name), f"tokenizer.ggml.{name}"
        if value is None:
            raise self.damaged(f"lacks {name!r} in its metadata")
        if not isinstance(value, kind):
            raise self.damaged(f"has {name}={value!r:.40}: must be of type {kind.__name__}")
        return value


def gguf_tokenizer(metadata: Any, source: str) -> HuggingFaceTokenizer:
    """Returns the tokenizer that a file's metadata describe. Errors name the file as `source`.

    Raises:
      UserError: a value is missing, or this kind of tokenizer is not supported.
    """
    values = _Values(metadata, source)
    if (kind := values.need("model", str)) not in KINDS:
        raise UserError(
            f"{source!r} has a tokenizer of kind {kind!r:.40}: only {', '.join(KINDS)} are read; "
            "give a Hugging Face folder"
        )
    tokens, types = values.need("tokens", list), values.need("token_type", list)
    if len(types) != len(tokens):
        raise values.damaged(f"has {len(tokens)} tokens, but {len(types)} token types")
    if not all(isinstance(token, str) for token in tokens):
        raise values.damaged("has tokens that are not strings")
    pre = values.need("pre", str) if kind == "gpt2" else kind
    numbers = {token: number for number, token in enumerate(tokens)}
    eos, bos = values.need("eos_token_id", int), values.get("bos_token_id")
    first = eos if bos is None else bos  # Qwen's files have no BOS.
    named = [values.get(f"{name}_token_id", eos) for name in ("eos", "eot", "eom")]
    unknown = values.get("unknown_token_id", first)
    for token in (first, *named, unknown):
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise values.damaged(f"names token {token!r:.40}, but has only {len(tokens)} tokens")
    types = [
        CONTROL if token in ENDS or one == UNKNOWN else one
        for token, one in zip(tokens, types, strict=True)
    ]
    merges = _derived(tokens, types, values) if kind == "llama" else _listed(values)
    prefixed = kind == "llama" and bool(values.get("add_space_prefix", True))
    try:
        if kind == "gpt2":
            tokenizer = _of_bytes(numbers, merges, pre, source)
        else:
            tokenizer = _like_sentencepiece(numbers, merges, tokens[unknown], prefixed)
    except UserError:
        raise
    except Exception as error:  # The library raises bare exceptions.
        raise values.damaged(f"has merges that do not fit its tokens ({error})") from error
    for added in (CONTROL, USER_DEFINED):
        options = {"special": added == CONTROL, "normalized": False}
        found = (token for token, one in zip(tokens, types, strict=True) if one == added)
        tokenizer.add_tokens([tokenizers.AddedToken(token, **options) for token in found])
    return HuggingFaceTokenizer(
        tokenizer,
        first,
        tuple(dict.fromkeys([*named, *(numbers[end] for end in ENDS if end in numbers)])),
        adds_bos=bool(values.get("add_bos_token", pre in ADDS_BOS)),
        template=metadata.get("tokenizer.chat_template"),
        names={"bos_token": None} if bos is None else None,
    )


def _listed(values: _Values) -> Pairs:
    """Returns the pairs of tokens that the file merges, the first one first."""
    merges = values.need("merges", list)
    if not all(isinstance(merge, str) for merge in merges):
        raise values.damaged("has merges that are not strings")
    return [tuple(merge.split(" ", 1)) for merge in merges]


def _derived(tokens: Sequence[str], types: Sequence[int], values: _Values) -> Pairs:
    """Returns the pairs of tokens that SentencePiece merges, the highest score first.

    Any two tokens may be merged whose concatenation is a token; its score is that of the merge.
    In vocabularies of SentencePiece's trainer, the order of pairs with equal scores has no effect.
    """
    scores = np.asarray(values.need("scores", list))
    if scores.shape != (len(tokens),) or scores.dtype.kind not in "if":
        raise values.damaged(f"has {len(tokens)} tokens, but not as many scores")
    ordered = [
        tokens[index]
        for index in np.argsort(-scores, kind="stable")
        if types[index] not in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
    ]
    # Pairs refer to these strings: a million copies of their parts take 100 MB.
    own = {token: token for token in ordered}
    pairs: Pairs = []
    for token in ordered:
        for cut in range(1, len(token)):
            if (left := own.get(token[:cut])) and (right := own.get(token[cut:])):
                pairs.append((left, right))
    return pairs


def _of_bytes(
    numbers: dict[str, int], merges: Pairs, pre: str, source: str
) -> tokenizers.Tokenizer:
    """Returns a tokenizer of bytes, split before as llama.cpp does under the name `pre`."""
    made = tokenizers.Tokenizer(
        models.BPE(vocab=numbers, merges=merges, ignore_merges=pre in (*LLAMA3, "tekken"))
    )
    if pre == "gpt-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, by_words])
    elif pre in SPLITS:
        splitter = pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([splitter, by_bytes])
    else:
        known = ", ".join(("smollm", "gpt-2", *SPLITS))
        raise UserError(
            f"{source!r} pre-tokenizes as {pre!r}; known are {known}; give a Hugging Face folder"
        )
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _like_sentencepiece(
    numbers: dict[str, int], merges: Pairs, unknown: str, prefixed: bool
) -> tokenizers.Tokenizer:
    """Returns a tokenizer of characters, and of bytes where the vocabulary lacks a character.

    With `prefixed`, a space precedes the text and the text after each control or user-defined
    token, as in llama.cpp.
    """
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab=numbers, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    first = [normalizers.Prepend(SPACE)] if prefixed else []
    made.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    replace = decoders.Replace(SPACE, " ")
    made.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made
