"""Times methods for one sequence and for many on a GPU; scripts/dev/gpu.sh runs its parts.

    python scripts/dev/gpu.py --part=speed [--workdir=runs/gpu] [--seconds=150] [--toy]

`flags` times six methods under the XLA flags of this process, named by `--label`. `speed` times
methods and trees for 1, 8, 32 and 250 sequences of the 97M with the 6M draft. `large` times methods
on the shapes of an 8B target with drafts of 1B and of two layers. Its weights are random, so logits
are set to agree. Rows of the same models and number of sequences take turns. The same command
resumes, and --seconds stops it. --toy rehearses on a CPU.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jax.sharding import Mesh

from spectr_jax import load
from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.bench import compiled_in_parallel
from spectr_jax.models import parallel
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils import cli, sharding

_PART = flags.DEFINE_enum("part", "speed", ["flags", "speed", "large"], "What is timed.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/gpu", "Where rows and tables go.")
_LABEL = flags.DEFINE_string("label", "default", "Name of the XLA flags in the table.")
_SECONDS = flags.DEFINE_integer("seconds", 150, "Start no row after this time.", lower_bound=1)
_MODEL_PARALLEL = flags.DEFINE_integer("model_parallel", 1, "Devices that share the weights.")
_TOY = flags.DEFINE_bool("toy", False, "Small models and few tokens, to rehearse on a CPU.")

TREES = ("8x4", "8x8", "4x4", "2x4", "4,2,1,1")
PLAIN = (("baseline", {}), ("speculative", {"draft_length": 4}), ("block", {"draft_length": 4}))
BRANCHING = [(name, {"tree": t}) for t in TREES for name in ("spectr", "otm_block", "otm_layer")]
LARGE = (*PLAIN, ("otm_block", {"tree": "4,2,1,1"}), ("otm_layer", {"tree": "8x4"}))
BATCHED = (*PLAIN, ("otm_block", {"tree": "2x4"}), ("otm_layer", {"tree": "2x4"}))
FLAGS = (*PLAIN[:2], ("spectr", {"tree": "8x4"}), ("otm_layer", {"tree": "8x4"}))
LARGE_PAIRS = [f"8B, {draft}, {share}" for draft in ("1B", "2 layers") for share in (0.7, 0.8)]
PARTS = {
    "flags": [("97m", 1, FLAGS), ("97m", 250, (PLAIN[0], PLAIN[2]))],
    "speed": [("97m", 1, (*PLAIN, *BRANCHING)), *(("97m", n, BATCHED) for n in (8, 32, 250))],
    "large": [(pair, 1, LARGE) for pair in LARGE_PAIRS],
}
"""Groups of rows that take turns: a pair of models, the number of sequences, and the methods."""
TURNS = {1: 64, 8: 8, 32: 3, 250: 3}
"""Timed generations of a row, by number of sequences."""
PROMPT_TOKENS = 9


class Agreeing(Llama):
    """A Llama whose logits depend on the last token only, so that random weights agree.

    A call takes as long as that of the Llama. `agreement` is the probability that the target
    accepts a draft token; it is 1 for the target itself.
    """

    def __init__(self, config: LlamaConfig, agreement: float, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.table = nnx.Param(jnp.asarray(table(config.vocab_size, agreement)))

    def extend(self, tokens_BxN, *arguments, **options):
        """See `Model.extend`."""
        logits, cache = super().extend(tokens_BxN, *arguments, **options)
        # The share vanishes in rounding, but the compiler cannot know that.
        return self.table[...][tokens_BxN % len(self.table)] + 1e-30 * logits, cache


def table(vocab_size: int, agreement: float, rows: int = 16) -> np.ndarray:
    """Returns log-probabilities [rows, V] of a model whose min(p, q) with the target sums to
    `agreement`."""
    target = np.random.default_rng(0).gumbel(size=(rows, vocab_size)) * 3
    q = np.exp(target - target.max(axis=1, keepdims=True))
    q /= q.sum(axis=1, keepdims=True)
    other = np.roll(q, vocab_size // 2, axis=1)
    low, high = 0.0, 1.0
    for _ in range(30):  # The overlap rises with the share of the target's distribution.
        share = (low + high) / 2
        enough = np.minimum(q, share * q + (1 - share) * other).sum(axis=1).mean() >= agreement
        low, high = (low, share) if enough else (share, high)
    return np.log(high * q + (1 - high) * other).astype(np.float32)


def shape(name: str) -> LlamaConfig:
    """Returns the shape of Llama 3.1 8B, of two of its layers, or of Llama 3.2 1B."""
    sizes = {"layers": 32, "width": 4096, "mlp": 14336, "heads": 32, "kv_heads": 8}
    sizes |= {"head_width": 128, "vocab_size": 128_256, "context": 4096}
    if _TOY.value:
        sizes |= {"layers": 4, "width": 64, "mlp": 128, "heads": 4, "kv_heads": 2}
        sizes |= {"head_width": 16, "vocab_size": 512}
    big = LlamaConfig(**sizes, dtype="bfloat16")
    half = {"layers": big.layers // 2, "width": big.width // 2, "mlp": 8192, "head_width": 64}
    small = dataclasses.replace(big, **half, tied=True)
    return {"8B": big, "1B": small, "2 layers": dataclasses.replace(big, layers=2, tied=True)}[name]


@functools.lru_cache(maxsize=1)
def pair(name: str) -> tuple[Frozen, Frozen]:
    """Returns a target and its draft."""
    if name == "97m":
        target, draft = ("6m", "2m") if _TOY.value else ("97m", "6m")
        return freeze(load(target, dtype="bfloat16")), freeze(load(draft, dtype="bfloat16"))
    target, draft, agreement = name.split(", ")
    models = large(target, 1.0), large(draft, float(agreement))
    if (mesh := group_of_devices()) is None:
        return models
    return parallel.pair_on_mesh(mesh, *models)


def group_of_devices() -> Mesh | None:
    """Returns a mesh of --model_parallel devices that share the weights; None for one device."""
    count = _MODEL_PARALLEL.value
    return None if count == 1 else sharding.make_mesh(model=count, devices=jax.devices()[:count])


def large(name: str, agreement: float) -> Frozen:
    """Returns a model with random weights in bfloat16, made on the device leaf by leaf."""
    frozen = freeze(nnx.eval_shape(lambda: Agreeing(shape(name), agreement, rngs=nnx.Rngs(0))))
    logits = table(frozen.vocab_size, agreement)

    def weights(key, leaf):
        if leaf.shape == logits.shape:
            return jnp.asarray(logits)
        dtype = jnp.bfloat16 if leaf.ndim > 1 else leaf.dtype
        return 0.02 * jax.random.normal(key, leaf.shape, dtype)

    keys = jax.random.split(jax.random.key(0), len(frozen.leaves))
    return dataclasses.replace(frozen, leaves=list(map(weights, keys, frozen.leaves)))


def inputs(name: str, sequences: int, method: Method, seed: int) -> tuple:
    """Returns the arguments of `generate`."""
    prompts = np.random.default_rng(seed).integers(3, 400, (sequences, PROMPT_TOKENS))
    lengths, new_tokens = np.full(sequences, PROMPT_TOKENS), 8 if _TOY.value else 64
    return jax.random.key(seed), method, *pair(name), prompts, lengths, new_tokens


def timed(arguments: tuple) -> tuple[float, int, int]:
    """Returns the seconds, tokens and target calls of one generation."""
    arguments = jax.block_until_ready(arguments)
    started = time.perf_counter()
    out = jax.block_until_ready(generate(*arguments, mesh=group_of_devices()))
    seconds = time.perf_counter() - started
    return seconds, int(jnp.sum(out.lengths - PROMPT_TOKENS)), int(jnp.sum(out.target_calls))


def measure(name: str, sequences: int, options: Sequence) -> list[dict[str, Any]]:
    """Returns the rows of methods that take turns, after a round that warms up."""
    methods = [get_method(method, **more) for method, more in options]
    of = functools.partial(inputs, name, sequences)
    list(
        compiled_in_parallel(
            [
                lambda method=method: lower(*of(method, 0), mesh=group_of_devices()).compile()
                for method in methods
            ]
        )
    )
    turns = 2 if _TOY.value else TURNS[sequences]
    rounds = [[timed(of(method, turn)) for method in methods] for turn in range(1 + turns)]
    measured, rows = np.transpose(rounds[1:], (1, 2, 0)), []
    for (method, more), (seconds, tokens, calls) in zip(options, measured, strict=True):
        row = {"label": _LABEL.value, "pair": name, "sequences": sequences, "method": method}
        figures = {
            "options": list(more.items()),
            "tokens_per_second": float(tokens.sum() / seconds.sum()),
            "tokens_per_call": float(tokens.sum() / calls.sum()),
            "ms_per_call": float(np.median(seconds * sequences / calls) * 1e3),
        }
        rows.append({**row, **figures})
    return rows


def markdown(rows: list[dict[str, Any]], made: dict[str, Any]) -> str:
    """Returns the table of all rows so far. Speedups are relative to the baseline of the same pair,
    flags and sequences."""
    base = {_group(row): row["tokens_per_second"] for row in rows if row["method"] == "baseline"}
    lines = []
    for row in rows:
        line = [row["label"], row["pair"], str(row["sequences"]), row["method"]]
        line.append(", ".join(str(value) for _, value in row["options"]))
        line += [f"{row[name]:.2f}" for name in ("tokens_per_call", "ms_per_call")]
        line.append(f"{row['tokens_per_second']:,.0f}")
        lines.append([*line, f"{row['tokens_per_second'] / base[_group(row)]:.2f}"])
    header = ["Flags", "Models", "Sequences", "Method", "Tree", "Tokens/call", "ms/call"]
    cells = report.markdown_table([*header, "Tokens/s", "Speedup"], lines)
    return report.page(_PART.value, cells, [report.provenance_line(made)])


def _group(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["label"], row["pair"], row["sequences"]


def main() -> None:
    started, workdir = time.monotonic(), pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    journal = workdir / f"{_PART.value}.jsonl"
    journal.touch()
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    there = set(map(_group, rows))
    for name, sequences, options in PARTS[_PART.value]:
        if (_LABEL.value, name, sequences) in there or time.monotonic() - started > _SECONDS.value:
            continue
        new = measure(name, sequences, options)
        rows += new
        with journal.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    made = report.provenance()
    report.write(workdir, _PART.value, {"rows": rows, **made}, markdown(rows, made))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
