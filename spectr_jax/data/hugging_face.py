"""Tokenizers in Hugging Face's files and in GGUF files are read, and our SentencePiece models are
written as the former."""

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from spectr_jax.data.tokenizer import (
    BOS,
    EOS,
    NO_PIECE,
    PAD,
    SPACE,
    UNK,
    AnyTokenizer,
    Tokenizer,
    checked_text,
    vocabulary_digest,
)
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched, write_json, write_whole

FILE, OLD_FILES = "tokenizer.json", ("vocab.json", "merges.txt")
SETTINGS, ADDED, TEMPLATE = "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"


LIKE_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Kinds of decoders that together spell a token as SentencePiece does."""


def _bytes_by_letter() -> dict[str, int]:
    """Returns the byte that each letter stands for in GPT-2's vocabulary: itself, if it can be
    printed, or one after another."""
    printed = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTES = _bytes_by_letter()


def _spelled(name: str, of_bytes: bool) -> bytes:
    """Returns what a token of this name adds to a text."""
    if of_bytes:
        return (
            bytes(BYTES[letter] for letter in name)
            if all(letter in BYTES for letter in name)
            else name.encode()
        )
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[3:-1], 16)])
    return name.replace(SPACE, " ").encode()


class HuggingFaceTokenizer(AnyTokenizer):
    """A tokenizer of Hugging Face's library, with what its model adds: BOS, EOS and a chat
    template."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        bos: int,
        eos: int | tuple[int, ...],
        *,
        adds_bos: bool = True,
        template: str | None = None,
        names: Mapping[str, str | None] | None = None,
    ):
        """Wraps `tokenizer`; `bos` and `eos` are the model's, `template` is in Jinja.

        With `adds_bos` a prompt begins with BOS; without it, only one of no tokens does. `names`
        are what a template calls `bos_token` and `eos_token`, where these are not the tokens `bos`
        and the first of `eos`; None if it has none.
        """
        self.bos, self.eos = bos, eos
        self.template = template
        self._tokenizer, self._adds_bos = tokenizer, adds_bos
        ids = {"bos_token": bos, "eos_token": eos if isinstance(eos, int) else eos[0]}
        known = {
            **{name: tokenizer.id_to_token(token) for name, token in ids.items()},
            **(names or {}),
        }
        self._names = {name: token for name, token in known.items() if token is not None}

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @functools.cached_property
    def vocabulary(self) -> str:
        """See `AnyTokenizer.vocabulary`."""
        return vocabulary_digest(self.tokens)

    @property
    def tokens(self) -> list[str]:
        """See `AnyTokenizer.tokens`; an id without a token has ""."""
        ids = self._tokenizer.get_vocab()
        tokens = [""] * (max(ids.values(), default=-1) + 1)
        for token, index in ids.items():
            tokens[index] = token
        return tokens

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """See `AnyTokenizer.pieces`; known of tokenizers of bytes, and of those like
        SentencePiece."""
        decoder = (
            json.loads(self._tokenizer.decoder.__getstate__())
            if self._tokenizer.decoder
            else {"type": None}
        )
        kinds = {each["type"] for each in decoder.get("decoders", [decoder])}
        if not (kinds == {"ByteLevel"} or kinds <= LIKE_SENTENCEPIECE):
            return super().pieces
        added = self._tokenizer.get_added_tokens_decoder()
        silent = {token for token, given in added.items() if given.special} | {self.bos}
        of_bytes = kinds == {"ByteLevel"}
        return [
            b"" if token in silent or self.ends(token) else _spelled(name, of_bytes)
            for token, name in enumerate(self.tokens)
        ]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without BOS and EOS."""
        return self._tokenizer.encode(checked_text(text), add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """See `AnyTokenizer.prompt`."""
        tokens = self.encode(text)
        return [self.bos, *tokens] if self._adds_bos or not tokens else tokens

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """See `AnyTokenizer.chat`."""
        if self.template is None:
            return super().chat(messages)
        from spectr_jax.data.templates import render  # Imported late, for those who do not chat.

        return self.encode(render(self.template, messages, self._names))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`, without BOS, EOS and -1."""
        kept = [
            int(token)
            for token in tokens
            if token >= 0 and token != self.bos and not self.ends(int(token))
        ]
        if (
            kept and max(kept) >= 2**32
        ):  # A model's vocabulary may be padded: smaller numbers without a token are no text.
            raise UserError(
                f"token {max(kept)} must be in the vocabulary; give those of a Generation"
            )
        return self._tokenizer.decode(kept)

    def piece(self, token: int) -> str:
        """See `AnyTokenizer.piece`."""
        if token < 0:
            return NO_PIECE
        name = self._tokenizer.id_to_token(int(token)) or f"<{int(token)}>"
        if token == self.bos or self.ends(int(token)):
            return name
        text = (
            name.replace(SPACE, " ")
            if name.startswith(SPACE)
            else self._tokenizer.decode([int(token)])
        )
        return name if "\ufffd" in text or not text else text

    def save(self, folder: pathlib.Path, context: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, so that `AutoTokenizer` reads it.

        Args:
          folder: exists.
          context: of the model, in tokens.
        """
        written = self._tokenizer
        if self._adds_bos and not adds_bos(
            written, self.bos
        ):  # As of a GGUF file, whose metadata says so.
            written = tokenizers.Tokenizer.from_str(written.to_str())
            begin = written.id_to_token(self.bos)
            made = processors.TemplateProcessing(
                single=[begin, "$A"], special_tokens=[(begin, self.bos)]
            )
            others = written.post_processor
            written.post_processor = processors.Sequence([others, made]) if others else made
        write_whole(folder / FILE, written.to_str(pretty=True))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **self._names,
        }
        write_json(
            folder / SETTINGS,
            {**settings, **({"chat_template": self.template} if self.template else {})},
        )


def read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, or the older vocab.json and merges.txt of a GPT-2, of a model's folder.

    Truncation and padding of tokenizer.json, which serve training, are ignored.

    Raises:
      UserError: neither is there, or it cannot be read.
    """
    try:
        if (folder / FILE).exists():
            check_fetched(folder / FILE)
            read = tokenizers.Tokenizer.from_file(str(folder / FILE))
            _add_declared(read, folder)
            read.no_truncation()
            read.no_padding()
            return read
        if (kind := _json(folder / "config.json").get("model_type", "gpt2")) != "gpt2":
            raise FileNotFoundError(f"no {FILE}, which says how a {kind} pre-tokenizes")
        old = [str(folder / name) for name in OLD_FILES if (folder / name).exists()]
        if len(old) < len(OLD_FILES):
            raise FileNotFoundError(f"no {FILE}, and not both of {' and '.join(OLD_FILES)}")
        made = tokenizers.Tokenizer(models.BPE.from_file(*old))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        return made
    except UserError:
        raise
    except Exception as error:  # The library raises bare exceptions.
        raise UserError(
            f"{str(folder)!r} has no tokenizer to be read ({error}); save the model's own there"
        ) from error


def _add_declared(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
    """Adds the tokens that only the files beside tokenizer.json declare, as transformers does;
    raises ValueError if they do not fit."""
    declared: dict[int, dict[str, Any]] = {
        int(index): {"content": token} for token, index in _json(folder / ADDED).items()
    }
    declared |= {
        int(index): dict(token)
        for index, token in _json(folder / SETTINGS).get("added_tokens_decoder", {}).items()
    }
    there = tokenizer.get_added_tokens_decoder()
    for index, token in sorted(declared.items()):
        if index in there and there[index].content == token["content"]:
            continue
        flags = {
            name: token[name]
            for name in ("special", "lstrip", "rstrip", "normalized", "single_word")
            if name in token
        }
        tokenizer.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        if (found := tokenizer.token_to_id(token["content"])) != index:
            raise ValueError(
                f"token {token['content']!r} is {index} in the files beside {FILE} and would be "
                f"{found}"
            )


def read_template(folder: pathlib.Path) -> str | None:
    """Returns the chat template of a model's folder; None if it has none. The default one, where
    there are several."""
    if (folder / TEMPLATE).exists():
        try:
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{str(folder / TEMPLATE)!r} cannot be read ({error}); save or fetch it again"
            ) from error
    given = _json(folder / SETTINGS).get("chat_template")
    if isinstance(given, list):
        named = [
            each.get("template")
            for each in given
            if isinstance(each, dict) and each.get("name") == "default"
        ]
        given = named[-1] if named else None
    return given if isinstance(given, str) else None


def read_names(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns what tokenizer_config.json calls `bos_token` and `eos_token`, as chat templates see
    them: only those that it names, with None for those that it says there are not."""
    settings = _json(folder / SETTINGS)
    given = {name: settings[name] for name in ("bos_token", "eos_token") if name in settings}
    given = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in given.items()
    }
    return {name: value for name, value in given.items() if value is None or isinstance(value, str)}


def controls(
    folder: pathlib.Path, config: Mapping[str, Any], vocab_size: int, first: int | None = None
) -> tuple[int, int | tuple[int, ...]]:
    """BOS and EOS of a model's folder: from generation_config.json, where it has one, or from its
    config.

    If neither has a BOS, it is what the tokenizer puts `first`, or EOS.

    Raises:
      UserError: one is missing, or no token of its vocabulary.
    """
    own = {
        name: value
        for name, value in _json(folder / "generation_config.json").items()
        if value is not None
    }
    given: dict[str, Any] = {
        name: own.get(name, config.get(name)) for name in ("eos_token_id", "bos_token_id")
    }
    ends = (
        given["eos_token_id"]
        if isinstance(given["eos_token_id"], list)
        else [given["eos_token_id"]]
    )
    bos = given["bos_token_id"]
    if bos is None and ends:  # Qwen's have none.
        bos = ends[0] if first is None else first
    for name, tokens in (("bos", [bos]), ("eos", ends)):
        if not tokens or not all(
            type(token) is int and 0 <= token < vocab_size for token in tokens
        ):
            raise UserError(
                f"{str(folder)!r} has {name}_token_id={given[f'{name}_token_id']}, no token of its "
                "vocabulary; fix its "
                "config.json"
            )
    return bos, ends[0] if len(ends) == 1 else tuple(ends)


def _json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one if there is no file. Raises `UserError` if it
    cannot be read."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); save or fetch it again"
        ) from error
    if not isinstance(given, dict):
        raise UserError(f"{str(path)!r} holds no JSON object; save or fetch it again")
    return given


def first_added(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns the token that the tokenizer puts before a text, if any."""
    return next(iter(tokenizer.encode("", add_special_tokens=True).ids), None)


def adds_bos(tokenizer: tokenizers.Tokenizer, bos: int) -> bool:
    """Returns whether the tokenizer puts BOS before a text."""
    return first_added(tokenizer) == bos


def puts_bos(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, bos: int) -> bool:
    """Returns whether the model's own program puts BOS before a text: Llama's classes follow a
    setting next to the tokenizer."""
    settings = _json(folder / SETTINGS)
    if settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return bool(settings.get("add_bos_token", True))
    return adds_bos(tokenizer, bos)


def save_tokenizer(folder: pathlib.Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, so that `AutoTokenizer` reads our
    SentencePiece model.

    BOS is not added to a text; it has id 1, and `<s>` in a text stands for it.

    Args:
      folder: exists.
      tokenizer: what to write.
      context: of the model, in tokens.
    """
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto)  # type: ignore[attr-defined]
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    made = tokenizers.Tokenizer(models.Unigram(pieces, UNK, byte_fallback=True))
    rules = proto.normalizer_spec.precompiled_charsmap
    spaces = [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Precompiled(rules)] if rules else []), *spaces]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(
        [tokenizers.AddedToken(pieces[token][0], special=True) for token in (PAD, BOS, EOS, UNK)]
    )
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    write_whole(folder / FILE, made.to_str(pretty=True))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **{name: pieces[token][0] for name, token in names.items()},
        },
    )
