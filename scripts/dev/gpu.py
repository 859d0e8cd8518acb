"""Times methods of one sequence and of many on a GPU; parts of scripts/dev/gpu.sh.

    python scripts/dev/gpu.py --part=speed [--workdir=runs/gpu] [--seconds=150] [--toy]

`flags` times six methods under the XLA flags of this process, with its `--label`. `speed` times
methods and trees for 1, 8, 32 and 250 sequences of the 97M with the 6M draft. `large` does on the
shapes of an 8B target with drafts of 1B and of two layers; their logits are made to agree, since
random weights do not. Rows of the same models and number of sequences take turns, and are kept: the
same command continues where it was stopped, and --seconds stops it. --toy rehearses on a CPU.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from spectr_jax import load
from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.compilation import side_by_side
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils import cli
from spectr_jax.utils.files import write_json, write_whole

_PART = flags.DEFINE_enum("part", "speed", ["flags", "speed", "large"], "What is timed.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/gpu", "Where rows and tables go.")
_LABEL = flags.DEFINE_string(
    "label", "default", "Names the XLA flags of this process in the table."
)
_SECONDS = flags.DEFINE_integer(
    "seconds", 150, "Begin no further row after this time.", lower_bound=1
)
_TOY = flags.DEFINE_bool("toy", False, "Small models and few tokens, to rehearse on a CPU.")

TREES = ("8x4", "8x8", "4x4", "2x4", "4,2,1,1")
PLAIN = (("baseline", {}), ("speculative", {"draft_length": 4}), ("block", {"draft_length": 4}))
LARGE = (*PLAIN, ("otm_block", {"tree": "4,2,1,1"}), ("otm_layer", {"tree": "8x4"}))
SEQUENCES = (1, 8, 32, 250)
TOKENS = 64
TARGETS = ("97m", "6m")


class Row(NamedTuple):
    """One cell of a table: a method on a number of sequences, for a pair of models."""

    pair: str
    method: str
    options: tuple[tuple[str, Any], ...]
    sequences: int

    def made(self) -> Method:
        return get_method(self.method, **dict(self.options))


def rows_of(part: str) -> list[Row]:
    """Returns the rows of a part, the baseline of each pair and number of sequences first."""
    trees = [
        (name, {"tree": tree}) for tree in TREES for name in ("spectr", "otm_block", "otm_layer")
    ]
    if part == "flags":
        one, many = (
            (*PLAIN[:2], ("spectr", {"tree": "8x4"}), ("otm_layer", {"tree": "8x4"})),
            (PLAIN[0], PLAIN[2]),
        )
        return [Row("97m", name, tuple(options.items()), 1) for name, options in one] + [
            Row("97m", name, tuple(options.items()), 250) for name, options in many
        ]
    if part == "large":
        pairs = [
            f"8B, {draft}, {agreement}" for draft in ("1B", "2 layers") for agreement in (0.7, 0.8)
        ]
        return [
            Row(pair, name, tuple(options.items()), 1) for pair in pairs for name, options in LARGE
        ]
    batched = (*PLAIN, ("otm_block", {"tree": "2x4"}), ("otm_layer", {"tree": "2x4"}))
    return [
        Row("97m", name, tuple(options.items()), sequences)
        for sequences in SEQUENCES
        for name, options in ((*PLAIN, *trees) if sequences == 1 else batched)
    ]


class Agreeing(nnx.Module):
    """A model whose call takes as long as that of another one, with logits that depend on the last
    token alone.

    Random weights of a target and of a draft do not agree. The logits of a draft are made so that
    one token of it is accepted with a given probability.
    """

    def __init__(self, model: Llama, agreement: float):
        self.model = model
        self.table = nnx.Param(jnp.asarray(table(model.vocab_size, agreement)))

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def layers(self) -> int:
        return self.model.layers

    def init_cache(self, batch: int, capacity: int) -> Any:
        """See `Model.init_cache`."""
        return self.model.init_cache(batch, capacity)

    def extend(self, tokens_BxN, *arguments, **options):
        """See `Model.extend`."""
        logits, cache = self.model.extend(tokens_BxN, *arguments, **options)
        # So small a share vanishes in rounding, and the compiler may not know it.
        return self.table[...][tokens_BxN % len(self.table)] + 1e-30 * logits, cache


def table(vocab_size: int, agreement: float, rows: int = 16) -> np.ndarray:
    """Returns log-probabilities [rows, V] of a target, mixed so that min(p, q) sums to `agreement`;
    1 for the target."""
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
    """Returns the shape of a large model: those of Llama 3.1 8B and Llama 3.2 1B, and two layers of
    the first."""
    big = LlamaConfig(
        layers=32,
        width=4096,
        mlp=14336,
        heads=32,
        kv_heads=8,
        head_width=128,
        vocab_size=128_256,
        context=4096,
        dtype="bfloat16",
    )
    if _TOY.value:
        big = dataclasses.replace(
            big, layers=4, width=64, mlp=128, heads=4, kv_heads=2, head_width=16, vocab_size=512
        )
    small = dataclasses.replace(
        big,
        layers=max(big.layers // 2, 1),
        width=big.width // 2,
        mlp=8192,
        head_width=64,
        tied=True,
    )
    return {"8B": big, "1B": small, "2 layers": dataclasses.replace(big, layers=2, tied=True)}[name]


@functools.lru_cache(maxsize=1)
def pair(name: str) -> tuple[Frozen, Frozen]:
    """Returns target and draft of a row."""
    if name == "97m":
        target, draft = TARGETS if not _TOY.value else ("6m", "2m")
        return freeze(load(target, dtype="bfloat16")), freeze(load(draft, dtype="bfloat16"))
    target, draft, agreement = name.split(", ")
    return large(target, 1.0), large(draft, float(agreement))


def large(name: str, agreement: float) -> Frozen:
    """Returns a model with random weights in bfloat16, made on the device leaf by leaf."""
    frozen = freeze(
        nnx.eval_shape(lambda: Agreeing(Llama(shape(name), rngs=nnx.Rngs(0)), agreement))
    )
    keys = jax.random.split(jax.random.key(0), len(frozen.leaves))
    logits = table(frozen.vocab_size, agreement)
    leaves = [
        jnp.asarray(logits)
        if leaf.shape == logits.shape
        else 0.02
        * jax.random.normal(key, leaf.shape, jnp.bfloat16 if leaf.ndim > 1 else leaf.dtype)
        for key, leaf in zip(keys, frozen.leaves, strict=True)
    ]
    return dataclasses.replace(frozen, leaves=leaves)


def timed(row: Row, turn: int) -> tuple[float, int, int]:
    """Returns the seconds of one generation, its tokens and its calls."""
    target, draft = pair(row.pair)
    prompts = np.random.default_rng(turn).integers(3, 400, (row.sequences, 9))
    arguments = row.made(), target, draft, prompts, np.full(row.sequences, 9)
    key = jax.block_until_ready(jax.random.key(turn))
    started = time.perf_counter()
    out = jax.block_until_ready(generate(key, *arguments, 8 if _TOY.value else TOKENS))
    seconds = time.perf_counter() - started
    return seconds, int(jnp.sum(out.lengths - 9)), int(jnp.sum(out.target_calls))


def compiled(row: Row) -> None:
    """Compiles the program of a row; JAX keeps it."""
    target, draft = pair(row.pair)
    prompts = np.full((row.sequences, 9), 3)
    new = 8 if _TOY.value else TOKENS
    lower(
        jax.random.key(0), row.made(), target, draft, prompts, np.full(row.sequences, 9), new
    ).compile()


def measure(rows: list[Row]) -> list[dict[str, Any]]:
    """Returns what rows of one pair took, in turns; the first turn warms up."""
    list(side_by_side([functools.partial(compiled, row) for row in rows]))
    turns = {1: 64, 8: 8, 32: 3, 250: 3}
    found: dict[Row, list[tuple[float, int, int]]] = {row: [] for row in rows}
    for turn in range(1 + (2 if _TOY.value else max(turns[row.sequences] for row in rows))):
        for row in rows:
            if turn <= turns[row.sequences]:
                found[row].append(timed(row, turn))
    result = []
    for row, samples in found.items():
        seconds, tokens, calls = np.array(samples[1:]).T
        figures = {
            "label": _LABEL.value,
            "tokens_per_second": float(tokens.sum() / seconds.sum()),
            "tokens_per_call": float(tokens.sum() / calls.sum()),
            "ms_per_call": float(np.median(seconds * row.sequences / calls) * 1e3),
        }
        result.append({**row._asdict(), **figures})
    return result


def markdown(rows: list[dict[str, Any]], made: dict[str, Any]) -> str:
    """Returns the table of all rows so far; a speedup is over the baseline of the same pair, flags
    and sequences."""
    base = {_group(row): row["tokens_per_second"] for row in rows if row["method"] == "baseline"}
    lines = [
        [
            *(row["label"], row["pair"], str(row["sequences"]), row["method"]),
            ", ".join(str(value) for _, value in row["options"]),
            *(
                f"{row['tokens_per_call']:.2f}",
                f"{row['ms_per_call']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
            ),
            f"{row['tokens_per_second'] / base[_group(row)]:.2f}",
        ]
        for row in rows
    ]
    header = [
        "Flags",
        "Models",
        "Sequences",
        "Method",
        "Tree",
        "Tokens/call",
        "ms/call",
        "Tokens/s",
        "Speedup",
    ]
    return f"# {_PART.value}\n\n{report.markdown_table(header, lines)}\n\n{report.made_by(made)}\n"


def _group(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["label"], row["pair"], row["sequences"]


def main() -> None:
    started, workdir = time.monotonic(), pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    journal = workdir / f"{_PART.value}.jsonl"
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        rows = [json.loads(line) for line in journal.read_text().splitlines()]
    there = set(map(_group, rows))
    for (name, sequences), group in itertools.groupby(
        rows_of(_PART.value), lambda row: (row.pair, row.sequences)
    ):
        if (_LABEL.value, name, sequences) in there or time.monotonic() - started > _SECONDS.value:
            continue
        new = measure(list(group))
        rows += new
        with journal.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
    made = report.provenance()
    write_json(workdir / f"{_PART.value}.json", {"rows": rows, **made})
    write_whole(workdir / f"{_PART.value}.md", markdown(rows, made))
    print(markdown(rows, made))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
