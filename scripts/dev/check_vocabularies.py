"""Checks and times choices with vocabularies of 49,152 and 262,144 tokens.

    python scripts/dev/check_vocabularies.py --workdir=results/vocabularies    # an hour on two cores

The check is that of tests/decoding/test_vocabularies.py, on more tokens than a test has time for: p-values
of the first two tokens of 10,000 calls. A choice is one call of a verifier for one sequence.
"""

import pathlib
import runpy
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spectr_jax.decoding.policy import Policy, shaping_of
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import parse
from spectr_jax.experiments.measure import report
from spectr_jax.utils import cli

_WORKDIR = flags.DEFINE_string("workdir", "results/vocabularies", "Where the table goes.")
_CALLS = flags.DEFINE_integer("calls", 10_000, "Calls of the check; 0 for none.", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "Methods; all if empty.")

TEST = runpy.run_path(
    str(pathlib.Path(__file__).parents[2] / "tests" / "decoding" / "test_vocabularies.py")
)
SIZES = (49_152, 262_144)
REPEATS = 51


def choice(name: str, V: int) -> dict[str, float]:
    """Returns the median milliseconds and the temporary megabytes of a choice."""
    verifier, tree = TEST["VERIFIERS"][name]
    p, q = (jnp.float32(part) for part in TEST["p_and_q"](V))
    draft_key, key = jax.random.split(jax.random.key(0))

    @jax.jit
    def scored_drafts(draft_key, key, p, q):
        scored = TEST["drafted"](verifier, parse(tree), draft_key, key, p, q)
        return scored.tokens, scored.p, scored.logits

    tokens, p, logits = scored_drafts(draft_key, key, p, q)

    def choose(key, tokens, p, logits):
        shaping = shaping_of(Policy())
        length = jnp.int32(0)
        return verifier(
            key,
            ScoredTree(
                tree=parse(tree), shaping=shaping, length=length, tokens=tokens, p=p, logits=logits
            ),
        )

    given = key, tokens, p, logits
    compiled = jax.jit(choose).lower(*given).compile()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(time.perf_counter() - start)
    memory = compiled.memory_analysis().temp_size_in_bytes
    return {"ms": 1e3 * float(np.median(times)), "mb": memory / 1e6}


def main() -> None:
    """Writes the table."""
    rows, workdir = [], pathlib.Path(_WORKDIR.value)
    for name in _ONLY.value or TEST["VERIFIERS"]:
        row: dict[str, Any] = {"method": name, "tree": TEST["VERIFIERS"][name][1]}
        for V in SIZES:
            row |= {f"{unit} {V}": value for unit, value in choice(name, V).items()}
        if _CALLS.value:
            row["p"] = [float(p) for p in TEST["p_values"](name, SIZES[-1], _CALLS.value)]
        rows.append(row)
        print(row, flush=True)
    header = ["Method", "Tree", *(f"{unit}, V = {V:,}" for unit in ("ms", "MB") for V in SIZES)]
    cells = [
        [row["method"], row["tree"]]
        + [f"{row[f'{unit} {V}']:.2f}" for unit in ("ms", "mb") for V in SIZES]
        + [", ".join(f"{p:.2g}" for p in row.get("p", []))]
        for row in rows
    ]
    text = report.markdown_table([*header, "p-values of the tokens"], cells)
    result = {**report.provenance(), "calls": _CALLS.value, "rows": rows}
    notes = [
        f"One choice for one sequence, median of {REPEATS}; MB are temporary memory.",
        f"p-values at V = {SIZES[-1]:,}, {_CALLS.value:,} calls: of the first token, and of the "
        "second after each of two contexts.",
        report.provenance_line(result),
    ]
    report.write(workdir, "choices", result, report.page("Choices by vocabulary", text, notes))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
