"""Times the training step of each size of the ladder, and the input pipeline on its own; writes results/training.

    python scripts/dev/bench_train.py [--data='corpus/train-*.txt.xz'] [--dtype=bfloat16] [--workdir=results/training]

The sizes take turns in each round, after one that compiles; figures are medians over the rounds. The pipeline (read, encode,
pack, batch, in one process) runs while nothing else does. Batches are packed from --data, by default prompts of ours.
"""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags

from spectr_jax import cli, sharding
from spectr_jax.config import train_config
from spectr_jax.data.batches import training_batches
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.errors import UserError
from spectr_jax.files import write_json, write_whole
from spectr_jax.loading import EMBEDDED
from spectr_jax.measure import report
from spectr_jax.measure.compilation import side_by_side
from spectr_jax.memory import keep_freed_memory
from spectr_jax.models.transformer import LADDER, TransformerConfig
from spectr_jax.training import throughput
from spectr_jax.training.preparation import check_train_config
from spectr_jax.training.programs import make_programs

_WORKDIR = flags.DEFINE_string("workdir", "results/training", "Where the table goes: Markdown and JSON.")
_DATA = flags.DEFINE_string("data", str(EMBEDDED / "prompts.txt"), "A corpus, as in data.train of a training config.")
_BATCHES = flags.DEFINE_list("batch_sizes", ["32", "32", "16", "8"], "Rows of a step, for each size of the ladder.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Of the factors of products: float32 or bfloat16.")
_OPTIMIZER = flags.DEFINE_string("optimizer", "adamw", "adamw or muon.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", str(EMBEDDED / "tokenizer.model"), "A SentencePiece model of the ladder's size."
)
_REMAT = flags.DEFINE_bool("remat", False, "Compute activations anew in the backward pass.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 4.0, "About as long a size is timed in a round; at least two steps.", lower_bound=0.0
)
_FSDP = flags.DEFINE_integer("fsdp", 1, "Devices that share one copy of the parameters.")


def main():
    keep_freed_memory()
    if len(_BATCHES.value) != len(LADDER) or not all(size.isdigit() and int(size) for size in _BATCHES.value):
        raise UserError(f"--batch_sizes={','.join(_BATCHES.value)} is not one number for each of {', '.join(LADDER)}")
    for config in configs():
        check_train_config(config)
    mesh = sharding.make_mesh(_FSDP.value)
    sentences, tokenizer = open_sentences(_DATA.value), Tokenizer(_TOKENIZER.value)
    pipeline = pipeline_tokens_per_second(sentences, tokenizer)
    rows = step_rows(sentences, tokenizer, mesh)
    for row in rows:
        row["pipeline_to_need"] = pipeline / row["tokens_per_second"]
    made = report.provenance()
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    result = {"rows": rows, "pipeline_tokens_per_second": pipeline, "peak_flops": throughput.peak_flops(), **made}
    write_json(workdir / "training.json", result)
    write_whole(workdir / "training.md", markdown(result))
    print(markdown(result))


def pipeline_tokens_per_second(sentences, tokenizer: Tokenizer, batch: int = 256) -> float:
    """Real tokens per second of the pipeline of one process, after its first packed rows."""
    iterator = iter(training_batches(sentences, tokenizer, batch=batch, length=128, seed=0, streams=8))
    for _ in range(8):
        next(iterator)
    started, tokens = time.perf_counter(), 0
    while time.perf_counter() - started < 2 * _SECONDS.value:
        tokens += int((next(iterator)["segments"] > 0).sum())
    seconds = time.perf_counter() - started
    iterator.close()
    return tokens / seconds


def configs() -> list[ml_collections.ConfigDict]:
    """Of the sizes of the ladder."""
    found = []
    for name, size in zip(LADDER, map(int, _BATCHES.value), strict=True):
        config = train_config(name)
        config.update({"batch_size": size, "remat": _REMAT.value, "mesh": {"fsdp": _FSDP.value}})
        config.model.dtype = _DTYPE.value
        config.optimizer.name = _OPTIMIZER.value
        found.append(config)
    return found


def step_rows(sentences, tokenizer: Tokenizer, mesh: jax.sharding.Mesh) -> list[dict[str, Any]]:
    def compiled(config: ml_collections.ConfigDict) -> tuple[Callable[[int], float], int]:
        iterator = iter(training_batches(sentences, tokenizer, batch=config.batch_size, length=config.model.context, seed=0))
        batch = next(iterator)
        iterator.close()
        steps_in = timed_steps(make_programs(config, mesh), sharding.put_rows(mesh, batch))
        steps_in(1)
        return steps_in, int((batch["segments"] > 0).sum())

    runs: dict[str, tuple[Callable[[int], float], int, int]] = {}
    ready = list(side_by_side([functools.partial(compiled, config) for config in configs()]))
    for name, (steps_in, tokens) in zip(LADDER, ready, strict=True):
        count = max(2, round(_SECONDS.value / steps_in(1)))
        runs[name] = steps_in, count, tokens
        print(f"{name}: {count} steps a round", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS.value):
        for name, (run, count, _) in runs.items():
            seconds[name].append(run(count) / count)
    rows = []
    for (name, (_, _, tokens)), size in zip(runs.items(), map(int, _BATCHES.value), strict=True):
        median = float(np.median(seconds[name]))
        flops = throughput.flops_per_token(TransformerConfig(**train_config(name).model)) * tokens / median
        rows.append(
            {
                "model": name,
                "batch_size": size,
                "step_seconds": median,
                "step_seconds_by_round": seconds[name],
                "tokens": tokens,
                "tokens_per_second": tokens / median,
                "mfu": flops / throughput.peak_flops(),
            }
        )
    return rows


def timed_steps(programs, batch) -> Callable[[int], float]:
    """A function that takes so many steps and returns the seconds."""
    state = programs.init(jax.random.key(0))

    def run(count: int) -> float:
        nonlocal state
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(count):
            state, _ = programs.step(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - started

    return run


def markdown(result: dict[str, Any]) -> str:
    header = ["Model", "Rows", "Tokens a step", "Step, s", "Tokens/s", "MFU", "Pipeline / need"]
    cells = [
        [
            row["model"],
            str(row["batch_size"]),
            f"{row['tokens']:,}",
            f"{row['step_seconds']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu']:.0%}",
            f"{row['pipeline_to_need']:,.0f}",
        ]
        for row in result["rows"]
    ]
    setting = f"{_DTYPE.value} factors, float32 parameters, dropout 0.1, {_OPTIMIZER.value}" + ", remat" * _REMAT.value
    return (
        "# Training step and input pipeline\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        f"Rows of 128 tokens, packed; {setting}; medians of {_ROUNDS.value} rounds in which the sizes took turns. "
        f"MFU: model FLOPs (PaLM, appendix B) over {result['peak_flops'] / 1e12:.2f} TFLOP/s, the published peak or, on a "
        "CPU, what one product of 1,536 x 1,536 matrices reached. The input pipeline of one process gives "
        f"{result['pipeline_tokens_per_second']:,.0f} tokens/s.\n\n"
        f"{report.made_by(result)}\n"
    )


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
