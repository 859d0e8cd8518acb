"""Tokenizes and packs a corpus once, for training runs that would otherwise wait for data.

    python -m spectr_jax.pack --data='corpus/train-*.txt.xz' --out=packed

Then train with --config.data.train=packed:packed. After a stop the same command resumes.
"""

import sys

from absl import flags

from spectr_jax.utils import cli

_DATA = flags.DEFINE_string(
    "data", None, "A corpus: tfds:DATASET:SPLIT, a text file, a folder or a glob.", required=True
)
_OUT = flags.DEFINE_string(
    "out", None, "The folder that gets shards, index and tokenizer.model.", required=True
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "A SentencePiece model; trained on the corpus if it does not exist."
)
_VOCABULARY = flags.DEFINE_integer(
    "vocab_size", 8_192, "Size of the vocabulary, if a tokenizer is trained.", lower_bound=1
)
_SENTENCES = flags.DEFINE_integer(
    "tokenizer_sentences", 250_000, "Sentences to train the tokenizer on.", lower_bound=1
)
_LENGTH = flags.DEFINE_integer(
    "length", 128, "Tokens per row: the context of the models.", lower_bound=2
)
_COMPRESS = flags.DEFINE_bool(
    "compress", False, "Compress the shards with xz, to copy them to another machine."
)
_WORKERS = flags.DEFINE_integer(
    "workers", 0, "The number of processes that pack; 0 for one per core.", lower_bound=0
)
_TFDS = flags.DEFINE_string(
    "tfds_dir", None, "Where TFDS keeps its data sets, if not in its default folder."
)


def main():
    from spectr_jax.data import packing
    from spectr_jax.data.corpus import open_sentences, sample_sentences
    from spectr_jax.data.tokenizer import Tokenizer, train_tokenizer
    from spectr_jax.utils.errors import UserError
    from spectr_jax.utils.files import exclusive, expanded

    out = expanded(_OUT.value)
    tokenizer_path = expanded(_TOKENIZER.value) if _TOKENIZER.value else out / "tokenizer.model"
    finished = (out / packing.INDEX).exists()
    sentences = open_sentences(_DATA.value, _TFDS.value or None)
    if tokenizer_path.exists():
        tokenizer = Tokenizer(tokenizer_path)
        if _VOCABULARY.present and tokenizer.vocab_size != _VOCABULARY.value:
            raise UserError(
                f"--vocab_size={_VOCABULARY.value}: {str(tokenizer_path)!r} has "
                f"{tokenizer.vocab_size} pieces; leave it out, or choose another --out"
            )
    elif finished:
        raise UserError(
            f"{str(out)!r} holds a packed corpus already, and {str(tokenizer_path)!r} does not "
            "exist; choose another --out"
        )
    else:
        with exclusive(tokenizer_path):  # Commands that share it may start together.
            if not tokenizer_path.exists():
                wanted = _VOCABULARY.value
                print(f"training a tokenizer of {wanted} pieces: {tokenizer_path}", flush=True)
                sample = sample_sentences(sentences, _SENTENCES.value, seed=0)
                train_tokenizer(sample, tokenizer_path, wanted)
        tokenizer = Tokenizer(tokenizer_path)
    index = packing.pack(sentences, tokenizer, out, _LENGTH.value, _COMPRESS.value, _WORKERS.value)
    rows = sum(index["rows"].values())
    filled = index["tokens"] / (rows * index["length"])
    if index["tokens"] < index["length"]:
        problem = f"all {index['tokens']:,} tokens fit in one row; give a smaller length"
        print(f"--length={index['length']}: {problem}", file=sys.stderr)
    already = "is packed already: " if finished else ""
    print(f"{already}{index['tokens']:,} tokens in {rows:,} rows, {filled:.0%} filled: {out}")


if __name__ == "__main__":
    cli.run(main, output=_OUT)
