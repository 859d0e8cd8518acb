"""The tokenizer in a GGUF file's metadata: byte pairs, split as by one of the pre-tokenizers that
llama.cpp knows by name."""

from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spectr_jax.data.hugging_face import ENDS, HuggingFaceTokenizer
from spectr_jax.utils.errors import UserError

CONTROL, USER_DEFINED = 3, 4
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
"""Names of Llama 3's pre-tokenizer. BOS is added there unless the file says otherwise."""
DIGITS = {**dict.fromkeys(LLAMA3, r"\p{N}{1,3}"), "qwen2": r"\p{N}"}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Metadata(Protocol):
    """The values of a GGUF file by name."""

    def get(self, name: str, default: Any = None) -> Any: ...


def gguf_tokenizer(metadata: Metadata, source: str) -> HuggingFaceTokenizer:
    """Returns the tokenizer that a file's metadata describe. Errors name the file as `source`.

    Raises:
      UserError: a value is missing, or this kind of tokenizer is not supported.
    """

    def damaged(problem):
        return UserError(f"{source!r} {problem}; fetch it again")

    def need(name, kind):
        name = f"tokenizer.ggml.{name}"
        value = metadata.get(name)
        if value is None:
            raise damaged(f"lacks {name!r} in its metadata")
        if not isinstance(value, kind):
            raise damaged(f"has {name}={value!r:.40}: must be of type {kind.__name__}")
        return value

    if (kind := need("model", str)) != "gpt2":
        raise UserError(
            f"{source!r} has a tokenizer of kind {kind!r}, and only 'gpt2' is read; give a Hugging "
            "Face folder"
        )
    tokens, types = need("tokens", list), need("token_type", list)
    if len(types) != len(tokens):
        raise damaged(f"has {len(tokens)} tokens, but {len(types)} token types")
    merges = need("merges", list)
    if not all(isinstance(text, str) for text in (*tokens, *merges)):
        raise damaged("has tokens or merges that are not strings")
    merges = [tuple(merge.split(" ", 1)) for merge in merges]
    numbers = {token: number for number, token in enumerate(tokens)}
    pre = need("pre", str)
    try:
        bpe = models.BPE(vocab=numbers, merges=merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # The library raises bare exceptions.
        raise damaged(f"has merges that do not fit its tokens ({error})") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, source)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    types = [CONTROL if token in ENDS else kind for token, kind in zip(tokens, types, strict=True)]
    for kind in (CONTROL, USER_DEFINED):
        added = [token for token, one in zip(tokens, types, strict=True) if one == kind]
        options = {"special": kind == CONTROL, "normalized": False}
        tokenizer.add_tokens([tokenizers.AddedToken(token, **options) for token in added])
    eos = need("eos_token_id", int)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id", eos) for name in ("eos", "eot", "eom")]
    known = [numbers[end] for end in ENDS if end in numbers]
    first = eos if bos is None else bos  # Qwen's files have no BOS.
    for token in (first, *named):
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise damaged(f"names token {token!r:.40}, but has only {len(tokens)} tokens")
    ends = tuple(dict.fromkeys([*named, *known]))
    return HuggingFaceTokenizer(
        tokenizer,
        first,
        ends,
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre in LLAMA3)),
        template=metadata.get("tokenizer.chat_template"),
        names={"bos_token": None} if bos is None else None,
    )


def _pre_tokenizer(name: str, source: str) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of this llama.cpp name, which splits text before byte pairing."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "smollm":
        splitter = pre_tokenizers.Digits(individual_digits=True)
    elif name in DIGITS:
        splitter = pre_tokenizers.Split(tokenizers.Regex(WORDS % DIGITS[name]), "isolated")
    else:
        known = ", ".join(("smollm", "gpt-2", *DIGITS))
        raise UserError(
            f"{source!r} pre-tokenizes as {name!r}; known are {known}; give a Hugging Face folder"
        )
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm")
    return pre_tokenizers.Sequence([splitter, by_bytes])
