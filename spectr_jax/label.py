"""Labels text with a teacher's likeliest next tokens, for students to learn from.

    python -m spectr_jax.label --text='corpus/train-*.txt.xz' --count=20000 --out=labels/text
    python -m spectr_jax.label --text='corpus/train-*' --write=continuations --out=labels/own
    python -m spectr_jax.label --write=chats --temperature=0.7 --count=4096 --out=labels/chats

The number of tokens sets the time. On two CPU cores with bfloat16 products SmolLM2 reads 1,330
tokens per second: 8 minutes for the first command. It writes and labels 470 of sentences and 390 of
chats: 40 minutes for the second command, 20 minutes for the third.

Then train with configs/distil.py. You can stop it at any time: the same command resumes, and a
larger --count adds to the labels that are there.
"""

from typing import Any

from absl import flags

from spectr_jax.utils import cli

_TEACHER = flags.DEFINE_string(
    "teacher", "smollm2", "Any model by its name, as for --target of spectr_jax.sample."
)
_TEXT = flags.DEFINE_string(
    "text", "", "A corpus, as in data.train of a training config; not for chats."
)
_WRITE = flags.DEFINE_enum(
    "write",
    "nothing",
    ["nothing", "continuations", "chats"],
    "What the teacher writes itself: nothing, the rest of sentences, or both sides of a chat.",
)
_OUT = flags.DEFINE_string("out", None, "The folder of the labels.", required=True)
_COUNT = flags.DEFINE_integer(
    "count",
    10_000,
    "Number of sentences to label, or of sequences to write, rounded up to whole shards, which the "
    "first command of a folder chooses. A corpus must have this number before rounding.",
    lower_bound=1,
)
_FIRST = flags.DEFINE_integer("first", 0, "First sentence of the corpus to take.", lower_bound=0)
_LENGTH = flags.DEFINE_integer(
    "length", 128, "Tokens per row; longer sequences are cut.", lower_bound=8
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 1.0, "Temperature of written sequences; labels always use 1.", lower_bound=0.0
)
_FEATURES = flags.DEFINE_bool(
    "features", False, "Also store the teacher's last hidden state at each token."
)
_LABELS = flags.DEFINE_bool(
    "labels", True, "Store labels. Without them, configs/distil.py:online labels during training."
)
_DTYPE = flags.DEFINE_string(
    "dtype", "bfloat16", "Precision of the teacher: float32, bfloat16 or int8."
)
_WRITE_DTYPE = flags.DEFINE_string(
    "write_dtype", None, "Precision in which the teacher writes; --dtype by default."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of written sequences.", lower_bound=0)
_TFDS = flags.DEFINE_string("tfds_dir", None, "Folder of TFDS, if not its default one.")


def main():
    from spectr_jax.distillation import labels
    from spectr_jax.distillation import teacher as teaching
    from spectr_jax.loading.by_name import check_dtype
    from spectr_jax.loading.pairs import load_alone
    from spectr_jax.models.base import features_shown
    from spectr_jax.models.frozen import check_context
    from spectr_jax.utils.errors import UserError
    from spectr_jax.utils.files import expanded
    from spectr_jax.utils.memory import keep_freed_memory

    keep_freed_memory()
    out = expanded(_OUT.value)
    if "," in str(out):
        raise UserError(f"--out={_OUT.value}: a comma separates folders; choose another name")
    check_dtype(_write_dtype())
    if _FEATURES.value and not _LABELS.value:
        raise UserError("--features --labels=false: features need labels; leave one out")
    sentences = _sentences()
    teacher = load_alone(_TEACHER.value, _DTYPE.value)
    vocab_size, length = teacher.model.vocab_size, _LENGTH.value
    check_context(f"--length={length}", length, teacher, "lower it")
    features = features_shown(teacher.model) if _FEATURES.value else 0
    if _FEATURES.value and not features:
        raise UserError(
            f"--features: {_TEACHER.value!r} does not show its last hidden state; leave it out"
        )
    texts = teaching.starting_at(_texts(teacher, sentences, length), _FIRST.value)
    shard = labels.claim_folder(out, _about(teacher, sentences, features))["shard"]
    if 4 * shard < teaching.shard_size(_COUNT.value, _WRITE.value != "nothing"):
        print(f"{out} has shards of only {shard} sequences, which is slow; a new --out is faster")
    if labels.shard_path(out, 0).exists():
        labels.open_labels(str(out))  # Reports a damaged shard now.
    fill = teaching.labeller(teacher) if _LABELS.value else lambda rows: None
    row_type = labels.row_type(vocab_size, length, features, labelled=_LABELS.value)
    tokens = teaching.write_labels(out, texts, _COUNT.value, fill, row_type, shard)
    rows = labels.open_labels(str(out))
    print(f"{tokens:,} tokens written now; {len(rows):,} rows of {length} in {out}")


def _about(teacher, sentences, features: int) -> dict[str, Any]:
    """Returns what identifies these labels, for the index of their folder."""
    from spectr_jax.data.corpus import content_digest, corpus_digest
    from spectr_jax.distillation.teacher import shard_size
    from spectr_jax.models.frozen import digest

    writes = _WRITE.value != "nothing"
    return {
        "teacher": _TEACHER.value,
        "dtype": _DTYPE.value,
        "weights": digest(teacher.model),
        "vocabulary": teacher.tokenizer.vocabulary,
        "vocab_size": teacher.model.vocab_size,
        "context": teacher.model.context,
        "length": _LENGTH.value,
        "features": features,
        "labelled": _LABELS.value,
        "text": _TEXT.value,
        "sentences": 0 if sentences is None else len(sentences),
        "corpus": "" if sentences is None else corpus_digest(sentences),
        "content": "" if sentences is None else content_digest(sentences),
        "shard": shard_size(_COUNT.value, writes),
        "first": _FIRST.value,
        "write": _WRITE.value,
        **({"temperature": _TEMPERATURE.value, "seed": _SEED.value} if writes else {}),
        **({"write_dtype": _write_dtype()} if _write_dtype() != _DTYPE.value else {}),
    }


def _sentences():
    """Returns the corpus, or None for chats.

    Raises:
      UserError: the flags contradict each other, or the corpus is too short.
    """
    from spectr_jax.data.corpus import open_sentences
    from spectr_jax.utils.errors import UserError

    chats, reads = _WRITE.value == "chats", _WRITE.value == "nothing"
    if chats and _TEXT.value:
        raise UserError(f"--text={_TEXT.value}: --write=chats takes no text; leave one out")
    if not chats and not _TEXT.value:
        raise UserError("--text is missing; give a corpus, or --write=chats")
    for flag in (_WRITE_DTYPE, _TEMPERATURE, _SEED):
        if reads and flag.present:
            raise UserError(
                f"--{flag.name}={flag.value}: applies only to what the teacher writes; leave it "
                "out, or give --write"
            )
    if chats:
        if not _TEMPERATURE.value:
            raise UserError("--temperature=0: writes the same chat each time; give 1, for example")
        return None
    sentences = open_sentences(_TEXT.value, _TFDS.value)
    wanted = _FIRST.value + (_COUNT.value if reads else 1)
    if wanted > len(sentences):
        asked = f"--first={_FIRST.value}" + f" --count={_COUNT.value}" * reads
        raise UserError(
            f"{asked}: {_TEXT.value!r} has only {len(sentences):,} sentences; lower these"
        )
    return sentences


def _texts(teacher, sentences, length: int):
    """Returns the sequences to label: read from the corpus, or written by the teacher.

    Raises:
      UserError: the corpus has only sentences of one token.
    """
    from spectr_jax.decoding import Policy
    from spectr_jax.distillation import teacher as teaching
    from spectr_jax.loading.by_name import load
    from spectr_jax.utils.errors import UserError

    if _WRITE.value == "nothing":
        taken = range(_FIRST.value, _FIRST.value + _COUNT.value)
        if all(len(teacher.tokenizer.prompt(sentences[index])) < 2 for index in taken):
            raise UserError(
                f"--text={_TEXT.value}: each of the {_COUNT.value} sentences has one token, and "
                "nothing can be learnt from one; give longer ones"
            )
        return teaching.read_texts(sentences, teacher.tokenizer)
    writer = teacher if _write_dtype() == _DTYPE.value else load(_TEACHER.value, _write_dtype())
    policy = Policy(temperature=_TEMPERATURE.value, eos=teacher.tokenizer.eos)
    if sentences is None:
        return teaching.conversations(writer, length, policy, _SEED.value)
    return teaching.continued_texts(writer, sentences, length, policy, _SEED.value)


def _write_dtype() -> str:
    return _WRITE_DTYPE.value or _DTYPE.value


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main, output=_OUT)
