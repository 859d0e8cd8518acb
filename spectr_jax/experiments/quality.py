"""Bits per character of models on held-out sentences, in each decoding precision.

All models score the tokens (`scored_tokens`) of the same sentences, those that fit every model's
context.
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

from spectr_jax.data.corpus import Sentences, content_digest, open_sentences
from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.decoding.scoring import scores_of
from spectr_jax.experiments.config import quality_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.bench import compiled_in_parallel
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.loading.by_name import check_dtype, load
from spectr_jax.loading.pairs import load_alone
from spectr_jax.models.vocabulary import Constant
from spectr_jax.training.heldout import Heldout, evaluate
from spectr_jax.utils import sharding
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "quality"
SEPARATOR = "<|endoftext|>"
"""Precedes each training document of models that add no BOS, such as GPT-2, SmolLM and Qwen."""
WIDTH = 32
"""Batches are padded to a multiple of this length, so that few programs compile."""


class ModelInfo(NamedTuple):
    """What is known of a model of the table before it is scored."""

    spec: str
    name: str
    parameters: int
    context: int
    tokenizer: AnyTokenizer
    weights: str


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Scores each model in each precision, and writes the table to `workdir` as Markdown and JSON.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, sentences or workdir are invalid, before any long work.
    """
    check_fields(config, quality_config())
    check_positive(config, "sentences", "batch_size")
    for dtype in config.dtypes:
        check_dtype(dtype)
    measurement.check_batch_size(config)
    check_table(config, workdir, NAME)
    sentences = open_sentences(config.heldout, config.tfds_dir or None)
    models = [_info(spec) for spec in config.models]
    kept = fitting(sentences, models, config.sentences, config.heldout)
    weights = [model.weights for model in models]
    journal = Journal(workdir, NAME, config, weights, again, content_digest(kept))

    tasks = {
        f"{model.spec} in {dtype}": functools.partial(
            _scores, kept, config.batch_size, model, dtype
        )
        for model, dtype in itertools.product(models, config.dtypes)
    }
    missing = compiled_in_parallel([tasks[name] for name in tasks if name not in journal])
    measure, rows = functools.partial(next, missing), []
    for model in models:
        scores = {
            dtype: journal.get_or_measure(f"{model.spec} in {dtype}", measure)
            for dtype in config.dtypes
        }
        rows.append({"model": model.name, "parameters": model.parameters, "scores": scores})
        print(_cells(rows[-1], config.dtypes), flush=True)
    return journal.finish({"rows": rows, "sentences": len(kept)}, markdown)


def _info(spec: str) -> ModelInfo:
    trained = load_alone(spec)
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(trained.model, nnx.Not(Constant)))
    )
    name, model, tokenizer = trained
    return ModelInfo(spec, name, parameters, model.context, tokenizer, *report.weights(trained))


def scored_tokens(tokenizer: AnyTokenizer, sentence: str) -> list[int]:
    """Returns the tokens of a sentence; a model is scored on all but the first.

    The first is BOS if the tokenizer adds one to prompts, or else `SEPARATOR` if it is in the
    vocabulary. The last is the line end: a newline, or EOS if the tokenizer drops newlines.
    """
    line = tokenizer.encode(f"{sentence}\n")
    if not tokenizer.decode(line).endswith("\n"):
        eos = tokenizer.eos if isinstance(tokenizer.eos, int) else tokenizer.eos[0]
        line = [*tokenizer.encode(sentence), eos]
    separator = tokenizer.encode(SEPARATOR)
    adds_bos = tokenizer.prompt(sentence) != tokenizer.encode(sentence)
    return [tokenizer.bos if adds_bos or len(separator) != 1 else separator[0], *line]


def fitting(sentences: Sentences, models: Sequence[ModelInfo], first: int, name: str) -> list[str]:
    """Returns those of the `first` sentences that fit the context of every model.

    Raises:
      UserError: no sentence of the corpus `name` fits.
    """
    tried = [sentences[index] for index in range(min(first, len(sentences)))]
    kept = [
        text
        for text in tried
        if all(len(scored_tokens(model.tokenizer, text)) <= model.context + 1 for model in models)
    ]
    if not kept:
        shortest = min(models, key=lambda model: model.context)
        raise UserError(
            f"heldout={name!r}: no sentence fits the context of all models; leave out the model of "
            f"the shortest context, {shortest.spec!r}"
        )
    return kept


def _scores(
    sentences: list[str], batch_size: int, model: ModelInfo, dtype: str
) -> dict[str, float]:
    tokens = [scored_tokens(model.tokenizer, sentence) for sentence in sentences]
    characters = sum(len(sentence) + 1 for sentence in sentences)
    heldout = Heldout(batches(tokens, batch_size, model.context), characters)
    mesh = sharding.make_mesh()
    graphdef, state = nnx.split(load(model.spec, dtype).model)
    nats = jax.jit(functools.partial(_nats, graphdef))
    return evaluate(nats, sharding.replicate(mesh, state), heldout, mesh)


def batches(texts: Sequence[Sequence[int]], rows: int, context: int) -> list[dict[str, np.ndarray]]:
    """Returns batches of sequences, the shortest sequences first.

    A batch has `tokens`, and `real`, 1 for all scored tokens, which are those after the first. It
    scores as many places as its longest sequence, rounded up to a multiple of `WIDTH` and at most
    `context`.
    """
    ordered, result = sorted(texts, key=len), []
    for start in range(0, len(ordered), rows):
        chosen = ordered[start : start + rows]
        width = min(-(-(len(chosen[-1]) - 1) // WIDTH) * WIDTH, context)
        tokens, real = np.zeros((rows, width + 1), np.int32), np.zeros((rows, width), np.int32)
        for row, text in enumerate(chosen):
            tokens[row, : len(text)] = text
            real[row, : len(text) - 1] = 1
        result.append({"tokens": tokens, "real": real})
    return result


def _nats(graphdef, state, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the summed nats of a batch, those of an early exit (0), and the number of tokens."""
    nats = -scores_of(nnx.merge(graphdef, state), batch["tokens"]).logprobs
    return jnp.sum(jnp.where(batch["real"] > 0, nats, 0)), jnp.zeros(()), jnp.sum(batch["real"])


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with its provenance, as Markdown."""
    config = result["config"]
    header = ["Model", "Parameters", "Nats/token"]
    header += [f"Bits/character, {dtype}" for dtype in config["dtypes"]]
    table = report.markdown_table(header, [_cells(row, config["dtypes"]) for row in result["rows"]])
    notes = [
        "Lower is better. Bits/character can be compared between tokenizers; nats/token (in "
        f"{config['dtypes'][0]}) cannot.",
        f"Of the first {config['sentences']:,} sentences of `{config['heldout']}`, all models "
        f"score the {result['sentences']:,} that fit every model's context, each on its own. BOS "
        f"precedes a sentence and is not scored (`{SEPARATOR}` for a model that adds no BOS). The "
        "line end, a newline or EOS, is scored and counts as one character.",
        f"Models {', '.join(f'`{spec}`' for spec in config['models'])}.",
        report.provenance_line(result),
    ]
    return report.page("Held-out sentences", table, notes)


def _cells(row: dict[str, Any], dtypes: Sequence[str]) -> list[str]:
    bits = [f"{row['scores'][dtype]['eval_bits_per_character']:.4f}" for dtype in dtypes]
    nats = f"{row['scores'][dtypes[0]]['eval_nats_per_token']:.4f}"
    return [row["model"], f"{row['parameters']:,}", nats, *bits]
