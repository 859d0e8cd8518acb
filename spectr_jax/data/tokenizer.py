"""The protocol of tokenizers, and ours: SentencePiece unigrams, which encode every text because rare
characters fall back to bytes. `hugging_face.py` has the tokenizers of other models."""

import abc
import functools
import io
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike

from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, write_whole

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPACE = "▁"
"""SentencePiece's symbol for a space inside a piece."""
NO_PIECE = "<none>"
"""The text of token -1, which marks a place where the target had no distribution."""


class AnyTokenizer(Protocol):
    """A tokenizer as decoding needs it. Inherit from it to get the methods that have a body.

    Attributes:
      vocab_size: number of tokens.
      vocabulary: digest of the tokens in order, equal for models that share a vocabulary.
      bos: the token that begins a sequence.
      eos: the token, or tokens, that end a sequence.
      template: the Jinja chat template of an instructed model.
    """

    vocab_size: int
    vocabulary: str
    bos: int
    eos: int | tuple[int, ...]
    template: str | None = None

    @property
    def tokens(self) -> list[str] | None:
        """The tokens by id, or None if unknown."""
        return None

    @property
    def pieces(self) -> list[bytes]:
        """The bytes that each token spells, by id; empty for a control token.

        Raises:
          UserError: they are unknown.
        """
        raise UserError(
            "the tokenizer does not say what its tokens spell; give stop sequences as tokens"
        )

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the tokens of `text`, without BOS and EOS."""
        ...

    @abc.abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`, without BOS, EOS and -1."""
        ...

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """Returns one token as text, with its leading space, or the name of a control token or
        partial character."""
        ...

    def prompt(self, text: str) -> list[int]:
        """Returns BOS and the tokens of `text`."""
        return [self.bos, *self.encode(text)]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the tokens of `chat_text`."""
        return self.encode(self.chat_text(messages))

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the text of a conversation, up to where the model's answer begins.

        Args:
          messages: such as `[{"role": "user", "content": "Why is the sky blue?"}]`.

        Raises:
          UserError: the model has no chat template, or the template rejects the messages.
        """
        raise UserError("the model has no chat template; give an instructed one, or leave chat out")

    def ends(self, token: int) -> bool:
        """Returns whether `token` ends a sequence."""
        return token in (self.eos if isinstance(self.eos, tuple) else (self.eos,))

    def prompts(self, texts: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompts in the form of `generate`: tokens [B, T] and lengths [B], both int32.

        Each prompt is encoded by `prompt`; shorter ones are padded with BOS, which is ignored.

        Raises:
          UserError: there are no prompts, or one is not a string.
        """
        several = [checked_text(text) for text in ([texts] if isinstance(texts, str) else texts)]
        encoded = [self.prompt(text) for text in several]
        if not encoded:
            raise UserError("no prompts; give at least one string, which may be empty")
        lengths = np.array([len(tokens) for tokens in encoded], np.int32)
        padded = [[*tokens, *[self.bos] * (lengths.max() - len(tokens))] for tokens in encoded]
        return np.array(padded, np.int32), lengths

    def texts(self, tokens: ArrayLike, lengths: ArrayLike) -> list[str]:
        """Returns the strings of decoded sequences, including their prompts, from tokens [B, T] and
        lengths [B].

        Raises:
          UserError: the shapes differ, or a token is outside the vocabulary.
        """
        rows, ends = _integers(tokens), _integers(lengths)
        if rows is None or ends is None or rows.ndim != 2 or ends.shape != rows.shape[:1]:
            raise UserError(
                "tokens and lengths must be integers of shapes [B, T] and [B]; see Generation"
            )
        if np.any((ends < 0) | (ends > rows.shape[1])):
            raise UserError(
                f"lengths {ends} are not within 0..{rows.shape[1]}; give those of a Generation"
            )
        return [
            self.decode(row[:length])
            for row, length in zip(rows.tolist(), ends.tolist(), strict=True)
        ]


def _integers(values: ArrayLike) -> np.ndarray | None:
    """Returns `values` as an array of integers, or None if it is something else."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "iu" else None


def checked_text(text: str) -> str:
    """Returns `text`. Raises `UserError` unless it is a string of valid Unicode."""
    if not isinstance(text, str):
        raise UserError(
            f"text={text!r:.40}: must be a string; give one, or tokens to `generate` itself"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text={text!r:.40}: is not valid Unicode ({error.reason}); remove its surrogates"
        ) from error
    return text


UNKNOWN = ""
"""The `vocabulary` of a draft of which only the number of tokens is known."""


class VocabularyOf(AnyTokenizer):
    """The vocabulary of a draft that was trained for a target, without a tokenizer."""

    bos = eos = vocab_size = 0
    vocabulary = UNKNOWN

    def __init__(self, name: str, vocabulary: str, vocab_size: int):
        self._name, self.vocabulary, self.vocab_size = name, vocabulary, vocab_size

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            f"{self._name!r} is a draft and has no tokenizer of its own; use its target's"
        )

    encode = decode = piece = _refuse


def train_tokenizer(sentences: Iterable[str], path: pathlib.Path, vocab_size: int) -> "Tokenizer":
    """Trains a SentencePiece unigram model on `sentences` and writes it to `path`.

    Raises:
      UserError: the text is too short for `vocab_size` pieces.
    """
    import sentencepiece

    model, refused = io.BytesIO(), list[UserError]()

    def read() -> Iterator[str]:
        try:
            yield from sentences
        except UserError as error:  # SentencePiece would raise another error.
            refused.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=read(),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            max_sentence_length=16384,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if refused:
            raise refused[0] from error
        reason = str(error).strip().splitlines()[-1]
        small = "smaller than required_chars" in reason or vocab_size <= UNK + 256
        remedy = "a larger vocabulary" if small else "more text or a smaller vocabulary"
        raise UserError(
            f"no vocabulary of {vocab_size} pieces can be trained ({reason}); give {remedy} "
            "(--config.model.vocab_size, or --vocab_size of pack)"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, model.getvalue())
    return Tokenizer(path)


class Tokenizer(AnyTokenizer):
    """A trained SentencePiece model read from `path`."""

    bos, eos = BOS, EOS

    def __init__(self, path: str | os.PathLike):
        import sentencepiece  # Imported late, because other models and tokenizers do not need it.

        try:
            self.proto = pathlib.Path(path).read_bytes()
            if not self.proto:
                raise OSError("empty")  # SentencePiece reads an empty file without an error.
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{str(path)!r} is not a SentencePiece model; train one, or fix the path"
            ) from error
        specials = (self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id())
        if specials != (PAD, BOS, EOS):
            raise UserError(
                f"{str(path)!r} has pad, bos, eos = {specials}, not {(PAD, BOS, EOS)}; retrain it"
            )
        self.vocab_size = self._processor.vocab_size()

    @functools.cached_property
    def vocabulary(self) -> str:  # type: ignore[override]
        return vocabulary_digest(self.tokens)

    @property
    def tokens(self) -> list[str]:
        return [self._processor.id_to_piece(token) for token in range(self.vocab_size)]

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        return [self._spelled(token) for token in range(self.vocab_size)]

    def _spelled(self, token: int) -> bytes:
        name = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(name[3:-1], 16)])
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return self._processor.decode([token]).encode()
        return name.replace(SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(checked_text(text))

    def decode(self, tokens: Iterable[int]) -> str:
        kept = [int(token) for token in tokens if token >= 0]
        if kept and max(kept) >= self.vocab_size:
            raise UserError(
                f"token {max(kept)} is outside 0..{self.vocab_size - 1}; give those of a Generation"
            )
        return self._processor.decode(kept)

    def piece(self, token: int) -> str:
        if token < 0:
            return NO_PIECE
        name = self._processor.id_to_piece(int(token))
        if self._processor.is_byte(int(token)) and (byte := int(name[3:-1], 16)) < 0x80:
            return chr(byte)
        return name.replace(SPACE, " ")


def vocabulary_digest(tokens: Sequence[str]) -> str:
    """Returns the digest of a vocabulary, its tokens in order."""
    return digest("\0".join(tokens).encode())
