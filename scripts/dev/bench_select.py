"""Times `select` of every plan against K-SEQ and a plain categorical draw, and writes results/select.

    python scripts/dev/bench_select.py [--workdir=results/select]

Each vocabulary has two noisy Zipf distributions, one choice at a time and sixteen in a batch. Functions take turns. Ratios
are medians over the rounds, since machines are noisy.
"""

import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spectr_jax import cli, transport
from spectr_jax.files import write_json, write_whole
from spectr_jax.measure import report
from spectr_jax.transport.base import draw

_WORKDIR = flags.DEFINE_string("workdir", "results/select", "Where the table goes: Markdown and JSON.")
_ROUNDS = flags.DEFINE_integer("rounds", 25, "Timed rounds.", lower_bound=1)

VOCABULARIES, DRAFTS, BATCH = (1024, 8192, 32768, 262144), (2, 4, 8), 16
PLANS = ("maximal", "naive", "kseq", "kseq_gamma", "recursive", "spectr+", "spectr++", "otm")


def pmfs(V: int, seed: int = 0) -> np.ndarray:
    """Two noisy Zipf distributions [2, V]."""
    weights = np.exp(np.random.default_rng(seed).normal(size=(2, V))) / np.arange(1, V + 1)
    return np.float32(weights / weights.sum(axis=1, keepdims=True))


def calls(V: int, k: int, batch: int):
    """Functions without arguments by name; `batch` choices each."""
    pairs = jnp.stack([pmfs(V, seed) for seed in range(batch)])
    p, q = pairs[:, 0], pairs[:, 1]
    keys = jax.random.split(jax.random.key(0), batch)
    drafts = jax.vmap(lambda key, p: draw(key, p, (k,)))(jax.random.split(jax.random.key(1), batch), p)
    valid = jnp.ones((batch, k), bool)

    def jitted(function, *arguments):
        arguments = [argument[0] for argument in arguments] if batch == 1 else arguments
        compiled = jax.jit(function if batch == 1 else jax.vmap(function)).lower(*arguments).compile()
        return lambda: jax.block_until_ready(compiled(*arguments))

    functions = {"categorical draw": jitted(lambda key, q: jax.random.categorical(key, jnp.log(q)), keys, q)}
    for name in PLANS:
        functions[name] = jitted(transport.get(name).select, keys, p, q, drafts, valid)
    return functions


def measure(functions, rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 3):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if round_ >= 3:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main():
    rows, cells = [], []
    for V in VOCABULARIES:
        for batch in (1, BATCH) if V <= 32768 else (1,):
            for k in DRAFTS:
                seconds = {name: np.array(times) for name, times in measure(calls(V, k, batch), _ROUNDS.value).items()}
                row = {"V": V, "k": k, "batch": batch, "kseq_us": float(np.median(seconds["kseq"]) / batch * 1e6)}
                row["to_kseq"] = {name: float(np.median(times / seconds["kseq"])) for name, times in seconds.items()}
                row["kseq_to_categorical"] = float(np.median(seconds["kseq"] / seconds["categorical draw"]))
                rows.append(row)
                shares = [f"{row['to_kseq'][name]:.2f}" for name in PLANS if name != "kseq"]
                cells.append(
                    [f"{V:,}", str(k), str(batch), f"{row['kseq_us']:,.0f}", f"{row['kseq_to_categorical']:.2f}", *shares]
                )
                print(" ".join(cells[-1]), flush=True)
    header = ["V", "k", "batch", "K-SEQ, us", "K-SEQ / categorical", *(f"{n} / K-SEQ" for n in PLANS if n != "kseq")]
    made = report.provenance()
    text = (
        "# Time of one choice\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        "Microseconds of one K-SEQ choice (a batch divided by its size), and ratios within rounds: medians. categorical: "
        "`jax.random.categorical` of log q, one draw.\n\n"
        f"{report.made_by(made)}\n"
    )
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "select.json", {"rows": rows, **made})
    write_whole(workdir / "select.md", text)


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
