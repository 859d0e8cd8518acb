"""The teacher: the sequences that it reads or writes, and their labels.

Sequences are sentences of a corpus, continuations of their first tokens that the teacher samples,
or whole conversations that it writes from its chat template alone, the user's message included
(Magpie: Xu et al., 2024, arXiv 2406.08464).
"""

import functools
import io
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tqdm

from spectr_jax.data.corpus import Sentences
from spectr_jax.data.packing import first_fit
from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.distillation import labels
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_whole

SHARD = 512
"""The largest number of sequences per shard. A stopped command loses at most one shard; shards are
always complete."""
WRITTEN = 64
"""Sequences that the teacher writes at once on a CPU, and the largest number of written ones per
shard there, which takes minutes. An accelerator writes `SHARD`."""
ROWS = 4
"""Rows that the teacher labels at once."""
LONGEST_BEGINNING = 12
"""Largest number of first tokens of a sentence that the teacher continues; the smallest is 1."""


class Text(NamedTuple):
    """A sequence to label.

    Attributes:
      tokens: the whole sequence.
      prompt: number of tokens before those that the teacher wrote, at least 1. It is 1 for a
        sequence that the teacher only read, where any token may be drafted.
      ended: whether the last token ends the sequence.
    """

    tokens: list[int]
    prompt: int = 1
    ended: bool = False

    @property
    def drafted(self) -> np.ndarray:
        """bool [N]: the tokens after which a draft is requested when the teacher decodes this
        sequence."""
        places = np.arange(len(self.tokens))
        return (places >= self.prompt - 1) & (places < len(self.tokens) - self.ended)


Texts = Callable[[int, int], list[Text]]
"""Returns sequences `first` to `end`, or fewer at the end of the corpus. Written ones are reproducible
for the same two numbers on the same kind of device."""


def read_texts(sentences: Sentences, tokenizer: AnyTokenizer) -> Texts:
    """Returns the sentences of a corpus, encoded as prompts."""

    def texts(first: int, end: int) -> list[Text]:
        indices = range(first, min(end, len(sentences)))
        return [Text(tokenizer.prompt(sentences[index])) for index in indices]

    return texts


def starting_at(texts: Texts, first: int) -> Texts:
    """Returns the same sequences, starting from number `first`."""
    return lambda begin, end: texts(first + begin, first + end)


def continued_texts(
    teacher: Trained, sentences: Sentences, length: int, policy: Policy, seed: int
) -> Texts:
    """Returns continuations by the teacher, up to `length` tokens, of the first 1 to
    `LONGEST_BEGINNING` tokens of sentences. After the last sentence the first is used again.

    Raises:
      UserError: the teacher's context is too short.
    """
    _check_length(length, teacher, teacher.model.context + 1 - LONGEST_BEGINNING)
    write = _writer(teacher, policy)

    def texts(first: int, end: int) -> list[Text]:
        rng = np.random.default_rng((seed, first))
        chosen = [sentences[index % len(sentences)] for index in range(first, end)]
        whole = [teacher.tokenizer.prompt(sentence) for sentence in chosen]
        cut = [tokens[: rng.integers(1, LONGEST_BEGINNING + 1)] for tokens in whole]
        begun = [tokens or [teacher.tokenizer.bos] for tokens in cut]
        return write(rng, begun, 1, LONGEST_BEGINNING, length)

    return texts


def conversations(teacher: Trained, length: int, policy: Policy, seed: int) -> Texts:
    """Returns conversations of up to `length` tokens: a user's message and its answer, both written
    by the teacher.

    Raises:
      UserError: the teacher has no chat template, or its context is too short.
    """
    opening, closing = chat_frame(teacher.tokenizer)
    half, frame = length // 2, len(opening) + len(closing)
    if frame >= half:
        raise UserError(
            f"--length={length}: the chat template alone takes {frame} tokens; raise it"
        )
    _check_length(length, teacher, 2 * (teacher.model.context + len(opening)) // 3)
    write = _writer(teacher, policy)

    def texts(first: int, end: int) -> list[Text]:
        rng = np.random.default_rng((seed, first))
        prompts = [opening] * (end - first)
        asked = write(rng, prompts, len(opening), len(opening), half)
        framed = [[*text.tokens[: len(text.tokens) - text.ended], *closing] for text in asked]
        return write(rng, framed, frame, half + len(closing), length)

    return texts


def _check_length(length: int, teacher: Trained, longest: int) -> None:
    if length > longest:
        raise UserError(
            f"--length={length}: must be at most {longest}, so that the teacher can write in its "
            f"context of {teacher.model.context}"
        )


def chat_frame(tokenizer: AnyTokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens that the chat template puts before a user's message, and between it and
    the answer."""
    one, two = (tokenizer.chat([{"role": "user", "content": word}]) for word in ("Apple", "Sum"))
    same = [a == b for a, b in zip(one, two, strict=False)]
    before = same.index(False)
    after = [a == b for a, b in zip(reversed(one), reversed(two), strict=False)].index(False)
    return one[:before], one[len(one) - after :]


def _writer(teacher: Trained, policy: Policy) -> Callable[..., list[Text]]:
    """Returns a function that continues prompts to an end token or to `length` tokens.

    The prompts have `shortest` to `longest` tokens. Shapes depend only on these numbers, so nothing
    is recompiled.
    """
    model, method, tokenizer = freeze(teacher), get_method("baseline"), teacher.tokenizer

    def write(
        rng: np.random.Generator, prompts: list[list[int]], shortest: int, longest: int, length: int
    ) -> list[Text]:
        key = jax.random.key(rng.integers(2**31))
        written: list[Text] = []
        at_once = _at_once()
        for offset in range(0, len(prompts), at_once):
            part = prompts[offset : offset + at_once]
            lengths = np.array([len(tokens) for tokens in part], np.int32)
            padding = [tokenizer.bos] * longest
            padded = np.array([[*tokens, *padding][:longest] for tokens in part], np.int32)
            part_key = jax.random.fold_in(key, offset)
            generation = generate(
                part_key, method, model, None, padded, lengths, length - shortest, policy
            )
            ends = np.minimum(generation.lengths, length)
            for prompt, row, end in zip(part, np.asarray(generation.tokens), ends, strict=True):
                tokens = row[:end].tolist()
                written.append(Text(tokens, len(prompt), tokenizer.ends(tokens[-1])))
        return written

    return write


def pack_rows(texts: Sequence[Text], row_type: np.dtype) -> np.ndarray:
    """Returns rows [R] of a `labels.row_type` with sequences packed first-fit and cut to its length.
    Labels are left empty, and sequences of one token are dropped."""
    length = row_type["tokens"].shape[0]
    kept = [(text.tokens[:length], text.drafted[:length]) for text in texts if len(text.tokens) > 1]
    places, count = first_fit([len(tokens) for tokens, _ in kept], length)
    rows = np.zeros(count, row_type)
    for (row, start), (tokens, drafted) in zip(places, kept, strict=True):
        own = slice(start, start + len(tokens))
        rows["segments"][row, own] = 1 + rows["segments"][row, :start].max(initial=0)
        rows["tokens"][row, own], rows["drafted"][row, own] = tokens, drafted
    return rows


def read_rows(sentences: Iterable[str], tokenizer: AnyTokenizer, row_type: np.dtype) -> np.ndarray:
    """Returns `pack_rows` of sentences, encoded as prompts."""
    return pack_rows([Text(tokenizer.prompt(sentence)) for sentence in sentences], row_type)


def labeller(teacher: Trained) -> Callable[[np.ndarray], None]:
    """Returns a function that fills the labels, and any features, of at most `ROWS` packed rows in
    place. It compiles once."""
    model = freeze(teacher)

    # Not `jax.jit(with_labels)`, whose programs all labellers would share, whatever `labels.TOP` is.
    @functools.partial(jax.jit, static_argnums=2)
    def label(model, batch, layers):
        return with_labels(model, batch, layers)

    def fill(rows: np.ndarray) -> None:
        padded = np.zeros(ROWS, rows.dtype)
        padded[: len(rows)] = rows
        batch = labels.batch_of(padded)
        call = {name: batch[name] for name in ("inputs", "segments", "positions")}
        labelled = label(model, call, () if "features" in batch else None)
        if "features" in batch:
            rows["features"] = np.asarray(labelled["features"])[: len(rows)]
        # A toy vocabulary has fewer tokens; the remaining labels have probability 0.
        count = labelled["top"].shape[-1]
        rows["log_probabilities"] = -np.inf
        for name in ("top", "log_probabilities"):
            rows[name][..., :count] = np.asarray(labelled[name])[: len(rows)]

    return fill


def with_labels(
    teacher: Frozen,
    batch: dict[str, jax.Array],
    layers: tuple[int, ...] | None,
    tokens: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns `batch` with a teacher's labels in float32.

    Args:
      teacher: its model.
      batch: `inputs`, `segments` and `positions`, [B, N].
      layers: static. None adds no `features`. Otherwise they are the last hidden states and the
        outputs of these layers, [B, N, F].
      tokens: the tokens to label, int32 [W]; `log_probabilities` is then [B, N, W]. None labels
        the `TOP` likeliest tokens of each place, and adds `top` (see `labels.batch_of`).
    """
    merged, call = teacher.merge(), (batch["inputs"], batch["positions"], causal(batch["segments"]))
    label = functools.partial(_labels_of, tokens=tokens)
    if not teacher.features_shown:
        return {**batch, **label(merged.extend(*call)[0])}
    hidden, _ = merged.hidden(*call, **({"also": layers} if layers else {}))
    # Row by row: a CPU takes longer to allocate the logits of a whole batch than to compute them.
    last = hidden[..., : teacher.features_shown]
    labelled = {**batch, **jax.lax.map(lambda row: label(merged.logits_of(row)), last)}
    return labelled if layers is None else {**labelled, "features": hidden}


def _labels_of(logits: jax.Array, tokens: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the log-probabilities of `tokens`, or `top` and those of the likeliest tokens."""
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if tokens is not None:
        return {"log_probabilities": logits[..., tokens] - normaliser}
    values, top = jax.lax.top_k(logits, min(labels.TOP, logits.shape[-1]))
    return {"top": top, "log_probabilities": values - normaliser}


def _at_once() -> int:
    """Returns the largest number of sequences that the teacher writes at a time."""
    return WRITTEN if backend.on_cpu() else SHARD


def shard_size(count: int, writes: bool) -> int:
    """Returns the number of sequences per shard of a new folder of `count` sequences, which the
    teacher reads or `writes`. Shards are equal, so that few sequences are added to `count`."""
    largest = _at_once() if writes else SHARD
    return -(-count // -(-count // largest))


def fill_rows(fill: Callable[[np.ndarray], None], rows: np.ndarray, bar: tqdm.tqdm) -> None:
    """Calls `fill` on `ROWS` rows at a time, and shows their sequences on the bar."""
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        fill(part)
        bar.update(int(part["segments"].max(axis=1).sum()))


def write_labels(
    folder: pathlib.Path,
    texts: Texts,
    count: int,
    fill: Callable[[np.ndarray], None],
    row_type: np.dtype,
    shard: int | None = None,
) -> int:
    """Labels at least `count` sequences in whole shards of `shard` (default `SHARD`), skipping
    shards that exist. Returns the number of tokens labelled."""
    shard = shard or SHARD
    tokens, total = 0, -(-count // shard) * shard
    try:
        with tqdm.tqdm(total=total, unit="sequence", dynamic_ncols=True) as bar:
            for number, first in enumerate(range(0, count, shard)):
                path = labels.shard_path(folder, number)
                if not path.exists():
                    rows = pack_rows(texts(first, first + shard), row_type)
                    fill_rows(fill, rows, bar)
                    file = io.BytesIO()
                    np.save(file, rows)
                    write_whole(path, file.getvalue())
                    tokens += int((rows["segments"] > 0).sum())
                    bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
                bar.update(first + shard - bar.n)  # Some sequences were skipped or dropped.
    except KeyboardInterrupt:
        stored = shard * sum(1 for _ in folder.glob("labels-*.npy"))
        print(f"{stored:,} of {total:,} sequences are stored; those of the current shard are lost")
        raise
    return tokens
