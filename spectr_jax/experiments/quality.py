"""Bits per character of models on held-out sentences, in each precision used for decoding."""

import functools
import itertools
import pathlib
import time
from typing import Any

import jax
import ml_collections
from flax import nnx

from spectr_jax import sharding
from spectr_jax.config import check_fields, check_positive, quality_config
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.errors import UserError
from spectr_jax.loading import check_dtype, load
from spectr_jax.measure import measurement, report
from spectr_jax.measure.compilation import side_by_side
from spectr_jax.measure.journal import Journal
from spectr_jax.models.transformer import parameter_count
from spectr_jax.training.heldout import evaluate, pack_heldout
from spectr_jax.training.step import eval_step

NAME = "quality"


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Scores each model in each precision, and writes the table to `workdir` as Markdown and JSON.

    Scores are kept in a journal there until the table is done: after a stop the same command resumes.

    Raises:
      UserError: anything wrong with the config, the models, the sentences or the workdir, before any long work.
    """
    check_fields(config, quality_config())
    check_positive(config, "sentences", "batch_size")
    for dtype in config.dtypes:
        check_dtype(dtype)
    if config.batch_size % jax.device_count():
        raise UserError(f"batch_size={config.batch_size} does not divide over {jax.device_count()} devices; give a multiple")
    measurement.claim_workdir(config, workdir, NAME)
    sentences = open_sentences(config.heldout, config.tfds_dir or None)
    for spec in config.models:
        if not isinstance(load(spec).tokenizer, Tokenizer):
            raise UserError(f"model {spec!r} has another program's tokenizer, which packs no sentences; leave it out")
    journal = Journal(workdir, NAME, config)
    started = time.monotonic() - journal.seconds

    def entry(spec: str, dtype: str) -> str:
        return f"{spec} in {dtype}"

    rows = []
    wanted = dict.fromkeys(itertools.product(config.models, config.dtypes))
    missing = [each for each in wanted if entry(*each) not in journal]
    found = side_by_side([functools.partial(_scores, config, sentences, *each) for each in missing])
    for spec in config.models:
        scores = {dtype: journal.value(entry(spec, dtype), functools.partial(next, found)) for dtype in config.dtypes}
        trained = load(spec)
        rows.append({"model": trained.name, "parameters": parameter_count(trained.model.config), "scores": scores})
        print(_cells(rows[-1], config.dtypes), flush=True)
    result = {"rows": rows, **report.about(config, started)}
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def _scores(config: ml_collections.ConfigDict, sentences, spec: str, dtype: str) -> dict[str, float]:
    trained = load(spec, dtype)
    assert isinstance(trained.tokenizer, Tokenizer)
    heldout = pack_heldout(
        sentences,
        trained.tokenizer,
        first=config.sentences,
        rows=config.batch_size,
        length=trained.model.context,
        name=config.heldout,
    )
    mesh = sharding.make_mesh()
    graphdef, state = nnx.split(trained.model)
    return evaluate(jax.jit(functools.partial(eval_step, graphdef)), sharding.replicate(mesh, state), heldout, mesh)


def markdown(result: dict[str, Any]) -> str:
    """The table with its provenance, as Markdown."""
    config = result["config"]
    header = ["Model", "Parameters", "Nats per token", *(f"Bits per character, {dtype}" for dtype in config["dtypes"])]
    table = report.markdown_table(header, [_cells(row, config["dtypes"]) for row in result["rows"]])
    notes = [
        f"The first {config['sentences']:,} sentences of `{config['heldout']}` that fit the context; a line end, which EOS "
        f"stands for, counts as one character. Nats per token in {config['dtypes'][0]}.",
        f"Models {', '.join(f'`{spec}`' for spec in config['models'])}.",
        report.made_by(result),
    ]
    return f"# Held-out sentences\n\n{table}\n\n" + "\n\n".join(notes) + "\n"


def _cells(row: dict[str, Any], dtypes) -> list[str]:
    bits = [f"{row['scores'][dtype]['eval_bits_per_character']:.4f}" for dtype in dtypes]
    nats = f"{row['scores'][dtypes[0]]['eval_nats_per_token']:.4f}"
    return [row["model"], f"{row['parameters']:,}", nats, *bits]
