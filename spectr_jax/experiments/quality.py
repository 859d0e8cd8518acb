"""Bits per character of models on held-out sentences, in each decoding precision.

All models score the same sentences, those that fit every model's context, by one definition
(`scored`).
"""

import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from spectr_jax.data.corpus import Sentences, open_sentences
from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.experiments.config import quality_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.compilation import side_by_side
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.loading.by_name import check_dtype, load
from spectr_jax.loading.pairs import load_alone
from spectr_jax.models.layers.attention import causal
from spectr_jax.training.heldout import Heldout, evaluate
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "quality"
SEPARATOR = "<|endoftext|>"
"""Separator of texts in the training of models that add no BOS, such as GPT-2, SmolLM and Qwen."""
WIDTH = 32


class Contender(NamedTuple):
    """A model of the table: its name, and what is checked before any model is scored."""

    spec: str
    name: str
    parameters: int
    context: int
    tokenizer: AnyTokenizer
    weights: str


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Scores each model in each precision, and writes the table to `workdir` as Markdown and JSON.

    A journal there keeps the scores, so that after a stop the same command resumes.

    Raises:
      UserError: the config, models, sentences or workdir are invalid, before any long work.
    """
    check_fields(config, quality_config())
    check_positive(config, "sentences", "batch_size")
    for dtype in config.dtypes:
        check_dtype(dtype)
    if config.batch_size % jax.device_count():
        raise UserError(
            f"batch_size={config.batch_size} does not divide over {jax.device_count()} devices; "
            "give a multiple"
        )
    measurement.check_table(config, workdir, NAME)
    sentences = open_sentences(config.heldout, config.tfds_dir or None)
    contenders = [_contender(spec) for spec in config.models]
    kept = fitting(sentences, contenders, config.sentences, config.heldout)
    journal = Journal(workdir, NAME, config, [each.weights for each in contenders])

    def entry(contender: Contender, dtype: str) -> str:
        return f"{contender.spec} in {dtype}"

    rows = []
    wanted = dict.fromkeys(
        itertools.product({each.spec: each for each in contenders}.values(), config.dtypes)
    )
    missing = [each for each in wanted if entry(*each) not in journal]
    found = side_by_side(
        [functools.partial(_scores, kept, config.batch_size, *each) for each in missing]
    )
    for each in contenders:
        scores = {
            dtype: journal.value(entry(each, dtype), functools.partial(next, found))
            for dtype in config.dtypes
        }
        rows.append({"model": each.name, "parameters": each.parameters, "scores": scores})
        print(_cells(rows[-1], config.dtypes), flush=True)
    result = {"rows": rows, "sentences": len(kept), **journal.about()}
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def _contender(spec: str) -> Contender:
    trained = load_alone(spec)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(trained.model, nnx.Param)))
    return Contender(
        spec,
        trained.name,
        parameters,
        trained.model.context,
        trained.tokenizer,
        *report.weights(trained),
    )


def scored(tokenizer: AnyTokenizer, sentence: str) -> list[int]:
    """Returns the tokens of a sentence as a line. The first token is context; all others are
    scored.

    The first is BOS if the model's own program adds one, or else the training separator if the
    vocabulary has it. The last is the line end: a newline, or EOS if the tokenizer drops
    newlines.
    """
    text = tokenizer.encode(f"{sentence}\n")
    if not tokenizer.decode(text).endswith("\n"):
        text = [
            *tokenizer.encode(sentence),
            tokenizer.eos if isinstance(tokenizer.eos, int) else tokenizer.eos[0],
        ]
    separator = tokenizer.encode(SEPARATOR)
    adds_bos = tokenizer.prompt(sentence) != tokenizer.encode(sentence)
    return [tokenizer.bos if adds_bos or len(separator) != 1 else separator[0], *text]


def fitting(
    sentences: Sentences, contenders: Sequence[Contender], first: int, name: str = "the corpus"
) -> list[str]:
    """Returns those of the first sentences that fit the context of every model.

    Raises:
      UserError: none does.
    """
    tried = [sentences[index] for index in range(min(first, len(sentences)))]
    kept = [
        text
        for text in tried
        if all(len(scored(each.tokenizer, text)) <= each.context + 1 for each in contenders)
    ]
    if not kept:
        least = min(contenders, key=lambda each: each.context)
        raise UserError(
            f"no held-out sentence of {name!r} fits all models; leave out that of the shortest "
            f"context, {least.spec!r}"
        )
    return kept


def _scores(
    sentences: list[str], batch_size: int, contender: Contender, dtype: str
) -> dict[str, float]:
    model = load(contender.spec, dtype).model
    tokens = [scored(contender.tokenizer, sentence) for sentence in sentences]
    heldout = Heldout(
        batches(tokens, batch_size, contender.context),
        sum(len(sentence) + 1 for sentence in sentences),
    )
    mesh = sharding.make_mesh()
    graphdef, state = nnx.split(model)
    return evaluate(
        jax.jit(functools.partial(_nats, graphdef)), sharding.replicate(mesh, state), heldout, mesh
    )


def batches(texts: Sequence[Sequence[int]], rows: int, context: int) -> list[dict[str, np.ndarray]]:
    """Returns this process's rows of batches of sequences, short ones first. `real` marks scored
    tokens.

    A batch is as long as its longest sequence, rounded up to a multiple of `WIDTH` and at most
    `context`.
    """
    mine, ordered, made = hosts.own_share(rows), sorted(texts, key=len), []
    for start in range(0, len(ordered), rows):
        chosen = ordered[start : start + rows]
        width = min(-(-(len(chosen[-1]) - 1) // WIDTH) * WIDTH, context)
        batch = {name: np.zeros((rows, width), np.int32) for name in ("inputs", "targets", "real")}
        for row, text in enumerate(chosen):
            for name, values in (("inputs", text[:-1]), ("targets", text[1:]), ("real", 1)):
                batch[name][row, : len(text) - 1] = values
        made.append({name: array[mine] for name, array in batch.items()})
    return made


def _nats(graphdef, state, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the summed nats of a batch, 0 for an early exit, and the number of tokens."""
    inputs = batch["inputs"]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    logits, _ = nnx.merge(graphdef, state).extend(inputs, positions, causal(jnp.zeros_like(inputs)))
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(batch["real"] > 0, nats, 0)), jnp.zeros(()), jnp.sum(batch["real"])


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with its provenance, as Markdown."""
    config = result["config"]
    header = [
        "Model",
        "Parameters",
        "Nats per token",
        *(f"Bits per character, {dtype}" for dtype in config["dtypes"]),
    ]
    table = report.markdown_table(header, [_cells(row, config["dtypes"]) for row in result["rows"]])
    notes = [
        f"Of the first {config['sentences']:,} sentences of `{config['heldout']}`, the "
        f"{result['sentences']:,} that fit every model's context, each on its own. BOS, or "
        f"`{SEPARATOR}` for a model that adds no BOS, precedes a sentence and is not scored. The line "
        "end, a newline or EOS, follows it, is scored, and counts as one character. Tokenizers "
        "differ, so bits per character can be compared and nats per token (in "
        f"{config['dtypes'][0]}) cannot.",
        f"Models {', '.join(f'`{spec}`' for spec in config['models'])}.",
        report.made_by(result),
    ]
    return report.page("Held-out sentences", table, notes)


def _cells(row: dict[str, Any], dtypes) -> list[str]:
    bits = [f"{row['scores'][dtype]['eval_bits_per_character']:.4f}" for dtype in dtypes]
    nats = f"{row['scores'][dtypes[0]]['eval_nats_per_token']:.4f}"
    return [row["model"], f"{row['parameters']:,}", nats, *bits]
