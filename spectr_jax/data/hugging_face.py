"""Tokenizers in Hugging Face's files: reads and writes them."""

import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers, processors

from spectr_jax.data.tokenizer import NO_PIECE, SPACE, AnyTokenizer, checked_text, vocabulary_digest
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched, read_json, read_text, write_json, write_whole

FILE, OLD_FILES = "tokenizer.json", ("vocab.json", "merges.txt")
SETTINGS, ADDED, TEMPLATE = "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"
ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>"),
    *("<eos>", "<turn|>", "<|tool_response>"),
)
"""Tokens that end a sequence in every vocabulary, whatever their type, as in llama.cpp."""
LIKE_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""A decoder of these parts spells a token as SentencePiece does."""


_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_ORDER = sorted(range(256), key=lambda byte: (chr(byte) not in _LETTERS, byte))
BYTES = dict(zip(_LETTERS, _ORDER, strict=True))
"""The byte that each letter of a byte-level vocabulary stands for. Printable bytes are their own
letters; letters above U+00FF stand for the other bytes in order."""


def _spelled(name: str, of_bytes: bool) -> bytes:
    """Returns the bytes that the token called `name` spells."""
    if of_bytes:
        known = all(letter in BYTES for letter in name)
        return bytes(BYTES[letter] for letter in name) if known else name.encode()
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
        return bytes([int(name[3:-1], 16)])
    return name.replace(SPACE, " ").encode()


class HuggingFaceTokenizer(AnyTokenizer):
    """A tokenizer of Hugging Face's library with its model's BOS, EOS and chat template."""

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
        """Wraps `tokenizer` for a model with these BOS and EOS and a chat template in Jinja.

        With `adds_bos` a prompt begins with BOS; without it, only an empty prompt does. `names` are
        what the template sees as `bos_token` and `eos_token` (None: undefined), by default the
        tokens `bos` and the first of `eos`.
        """
        self.bos, self.eos = bos, eos
        self.template = template
        self._tokenizer, self._adds_bos = tokenizer, adds_bos
        ids = {"bos_token": bos, "eos_token": eos if isinstance(eos, int) else eos[0]}
        known = {name: tokenizer.id_to_token(token) for name, token in ids.items()}
        known |= names or {}
        self._names = {name: token for name, token in known.items() if token is not None}

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self._tokenizer.get_vocab_size()

    @functools.cached_property
    def vocabulary(self) -> str:  # type: ignore[override]
        return vocabulary_digest(self.tokens)

    @property
    def tokens(self) -> list[str]:
        """The tokens by id; "" for an id without a token."""
        names = {index: name for name, index in self._tokenizer.get_vocab().items()}
        return [names.get(index, "") for index in range(max(names, default=-1) + 1)]

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """See `AnyTokenizer.pieces`. Only known for decoders of bytes and those like
        SentencePiece's."""
        decoder = self._tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder else {"type": None}
        kinds = {each["type"] for each in state.get("decoders", [state])}
        of_bytes = kinds == {"ByteLevel"}
        if not (of_bytes or kinds <= LIKE_SENTENCEPIECE):
            return super().pieces
        added = self._tokenizer.get_added_tokens_decoder()
        silent = {token for token, given in added.items() if given.special} | {self.bos}
        return [
            b"" if token in silent or self.ends(token) else _spelled(name, of_bytes)
            for token, name in enumerate(self.tokens)
        ]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(checked_text(text), add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Returns the tokens of `text`, after BOS if the model adds it or there are none."""
        tokens = self.encode(text)
        return [self.bos, *tokens] if self._adds_bos or not tokens else tokens

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        if self.template is None:
            return super().chat_text(messages)
        from spectr_jax.data.templates import render  # Imported late: only chats need Jinja.

        return render(self.template, messages, self._names)

    def decode(self, tokens: Iterable[int]) -> str:
        kept = [int(token) for token in tokens if token >= 0]
        kept = [token for token in kept if token != self.bos and not self.ends(token)]
        # A model's vocabulary may be padded: ids without a token decode to nothing.
        if kept and max(kept) >= 2**32:
            raise UserError(
                f"token {max(kept)} must be in the vocabulary; give those of a Generation"
            )
        return self._tokenizer.decode(kept)

    def piece(self, token: int) -> str:
        if token < 0:
            return NO_PIECE
        token = int(token)
        name = self._tokenizer.id_to_token(token) or f"<{token}>"
        if token == self.bos or self.ends(token):
            return name
        if name.startswith(SPACE):
            return name.replace(SPACE, " ")
        text = self._tokenizer.decode([token])
        return name if "\ufffd" in text or not text else text

    def save(self, folder: pathlib.Path, context: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json to an existing folder, so that
        `AutoTokenizer` reads it. `context` is the model's, in tokens."""
        written = self._tokenizer
        # A GGUF file says in its metadata that BOS is added; its tokenizer does not.
        if self._adds_bos and first_added(written) != self.bos:
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
            **({"chat_template": self.template} if self.template else {}),
        }
        write_json(folder / SETTINGS, settings)


def read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer in a model's folder: tokenizer.json, or the older vocab.json and
    merges.txt of a GPT-2.

    Truncation and padding of tokenizer.json, which serve training, are ignored.

    Raises:
      UserError: neither exists, or it cannot be read.
    """
    try:
        if (folder / FILE).exists():
            check_fetched(folder / FILE)
            read = tokenizers.Tokenizer.from_file(str(folder / FILE))
            _add_declared(read, folder)
            read.no_truncation()
            read.no_padding()
            return read
        if (kind := _object(folder / "config.json").get("model_type", "gpt2")) != "gpt2":
            raise FileNotFoundError(f"no {FILE}, which says how a {kind} pre-tokenizes")
        old = [folder / name for name in OLD_FILES]
        if not all(path.exists() for path in old):
            raise FileNotFoundError(f"no {FILE}, and not both of {' and '.join(OLD_FILES)}")
        made = tokenizers.ByteLevelBPETokenizer.from_file(*map(str, old))
        return tokenizers.Tokenizer.from_str(made.to_str())
    except UserError:
        raise
    except Exception as error:  # The library raises bare exceptions.
        raise UserError(
            f"{str(folder)!r} has no tokenizer to be read ({error}); save the model's own there"
        ) from error


def _add_declared(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
    """Adds the tokens that only the files next to tokenizer.json declare, as transformers does.
    Raises ValueError if their ids do not fit."""
    added, settings = _object(folder / ADDED), _object(folder / SETTINGS)
    declared: dict[int, dict] = {int(index): {"content": name} for name, index in added.items()}
    for given, token in settings.get("added_tokens_decoder", {}).items():
        declared[int(given)] = dict(token)
    known = tokenizer.get_added_tokens_decoder()
    options = ("special", "lstrip", "rstrip", "normalized", "single_word")
    for index, token in sorted(declared.items()):
        content = token["content"]
        if index in known and known[index].content == content:
            continue
        given_options = {name: token[name] for name in options if name in token}
        tokenizer.add_tokens([tokenizers.AddedToken(content, **given_options)])
        if (found := tokenizer.token_to_id(content)) != index:
            raise ValueError(
                f"token {content!r} is {index} in the files next to {FILE} and would be {found}"
            )


def without_tokens_from(tokenizer: tokenizers.Tokenizer, size: int) -> tokenizers.Tokenizer:
    """Returns a tokenizer without the added tokens from id `size` on.

    Tokenizers of a family have tokens for images that its text models lack, such as Gemma 3's.
    """
    if max(tokenizer.get_added_tokens_decoder(), default=0) < size:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def read_template(folder: pathlib.Path) -> str | None:
    """Returns the chat template of a model's folder (the default one of several), or None."""
    path = folder / TEMPLATE
    if path.exists():
        try:
            return read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{str(path)!r} cannot be read ({error}); fetch it again") from error
    given = _object(folder / SETTINGS).get("chat_template")
    if isinstance(given, list):
        several = [each for each in given if isinstance(each, dict)]
        given = {each.get("name"): each.get("template") for each in several}.get("default")
    return given if isinstance(given, str) else None


def read_names(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns `bos_token` and `eos_token` of tokenizer_config.json, for chat templates.

    A name that the file lacks is left out; a name that it sets to null is None.
    """
    names: dict[str, str | None] = {}
    for name, value in _object(folder / SETTINGS).items():
        content = value.get("content") if isinstance(value, dict) else value
        if name in ("bos_token", "eos_token") and isinstance(content, str | None):
            names[name] = content
    return names


def controls(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    vocab_size: int,
    first: int | None = None,
    more: Sequence[int] = (),
) -> tuple[int, int | tuple[int, ...]]:
    """Returns BOS and EOS of a model's folder, from generation_config.json or else from `config`.

    If neither has a BOS, it is `first`, the token that the tokenizer puts first, or else EOS. The
    tokens `more` are EOS too.

    Raises:
      UserError: EOS is missing, or one of them is not a token of the vocabulary.
    """
    own = _object(folder / "generation_config.json")
    own = {name: value for name, value in own.items() if value is not None}
    given: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, **config, **own}
    bos, eos = given["bos_token_id"], given["eos_token_id"]
    ends = eos if isinstance(eos, list) else [eos]
    if bos is None and ends:  # Qwen's models have none.
        bos = ends[0] if first is None else first
    for name, tokens in (("bos_token_id", [bos]), ("eos_token_id", ends)):
        known = [type(token) is int and 0 <= token < vocab_size for token in tokens]
        if not known or not all(known):
            raise UserError(
                f"{str(folder)!r} has {name}={given[name]}: must be a token of its vocabulary; fix "
                "its config.json"
            )
    ends = list(dict.fromkeys([*ends, *more]))
    return bos, ends[0] if len(ends) == 1 else tuple(ends)


def turn_ends(
    tokenizer: tokenizers.Tokenizer, template: str | None, names: Mapping[str, str | None]
) -> list[int]:
    """Returns the tokens that end a turn in a chat template: those of `ENDS` that it names, and
    the `eos_token` of `names` if it uses that. Some models lack them in their EOS."""
    template = template or ""
    ends = [end for end in ENDS if end in template]
    if re.search(r"\beos_token\b", template):
        ends.append(names.get("eos_token") or "")
    found = (tokenizer.token_to_id(end) for end in ends)
    return [token for token in found if token is not None]


def _object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if there is no file."""
    return read_json(path) if path.exists() else {}


def first_added(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Returns the token with which the tokenizer begins a sequence, if any."""
    return next(iter(tokenizer.encode("", add_special_tokens=True).ids), None)


def puts_bos(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, bos: int) -> bool:
    """Returns whether the model's own tokenizer class begins a sequence with BOS.

    Llama's classes follow `add_bos_token` of tokenizer_config.json, others the tokenizer itself.
    """
    settings = _object(folder / SETTINGS)
    if settings.get("tokenizer_class") in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return bool(settings.get("add_bos_token", True))
    return first_added(tokenizer) == bos
