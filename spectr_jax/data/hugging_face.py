"""Tokenizers in Hugging Face's files: those of GPT-2's family are read, our SentencePiece models are written."""

import functools
import pathlib
from collections.abc import Iterable

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spectr_jax.data.tokenizer import BOS, EOS, PAD, SPACE, UNK, AnyTokenizer, Tokenizer, vocabulary_digest
from spectr_jax.errors import UserError
from spectr_jax.files import write_json, write_whole

FILE, OLD_FILES = "tokenizer.json", ("vocab.json", "merges.txt")


class HuggingFaceTokenizer(AnyTokenizer):
    """The tokenizer of a model folder."""

    def __init__(self, folder: pathlib.Path, bos: int, eos: int):
        """Reads tokenizer.json, or the older vocab.json and merges.txt, of `folder`; `bos` and `eos` are the model's.

        Raises:
          UserError: neither is there, or it cannot be read.
        """
        self.bos, self.eos = bos, eos
        try:
            if (folder / FILE).exists():
                self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / FILE))
            else:
                old = [str(folder / name) for name in OLD_FILES if (folder / name).exists()]
                if len(old) < len(OLD_FILES):
                    raise FileNotFoundError(f"no {FILE}, and not both of {' and '.join(OLD_FILES)}")
                self._tokenizer = tokenizers.Tokenizer(models.BPE.from_file(*old))
                self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
                self._tokenizer.decoder = decoders.ByteLevel()
        except Exception as error:  # The library raises bare exceptions.
            raise UserError(
                f"{str(folder)!r} has no tokenizer that can be read ({error}); save the model's own there"
            ) from error

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @functools.cached_property
    def vocabulary(self) -> str:
        """See `AnyTokenizer.vocabulary`."""
        tokens = self._tokenizer.get_vocab()
        return vocabulary_digest(sorted(tokens, key=lambda token: tokens[token]))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without BOS and EOS."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, without BOS and EOS."""
        return self._tokenizer.decode([int(token) for token in tokens if token not in (self.bos, self.eos)])

    def piece(self, token: int) -> str:
        """See `AnyTokenizer.piece`."""
        name = self._tokenizer.id_to_token(int(token)) or f"<{int(token)}>"
        if token in (self.bos, self.eos):
            return name
        text = name.replace(SPACE, " ") if name.startswith(SPACE) else self._tokenizer.decode([int(token)])
        return name if "\ufffd" in text or not text else text


def save_tokenizer(folder: pathlib.Path, tokenizer: Tokenizer, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, so that `AutoTokenizer` reads our SentencePiece model.

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
    made.normalizer = normalizers.Sequence([*([normalizers.Precompiled(rules)] if rules else []), *spaces])
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([tokenizers.AddedToken(pieces[token][0], special=True) for token in (PAD, BOS, EOS, UNK)])
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
