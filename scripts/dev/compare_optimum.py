"""What each verifier of i.i.d. drafts reaches of the optimum over all lossless verifiers, on tiny trees.

    python scripts/dev/compare_optimum.py [--workdir=results/layer]

Writes results/layer/optimum.md and .json: expected tokens of one call on random pairs of table models, by a linear program
for the optimum (`planning.optimum`) and by simulation for the verifiers.
"""

import pathlib
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax import cli
from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import parse
from spectr_jax.files import write_json, write_whole
from spectr_jax.measure import report
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.planning.optimum import most_tokens

METHODS = ("otm_layer", "otm_block", "gbv_conditional", "gbv", "otm", "spectr", "recursive")
PROMPT = (1, 2)

_WORKDIR = flags.DEFINE_string("workdir", "results/layer", "Where the table goes: Markdown and JSON.")
_TREES = flags.DEFINE_multi_string("tree", ["2,1", "3,1", "2,2", "2,1,1"], "As in `tree.parse`.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 3, "Tokens.", lower_bound=2)
_PAIRS = flags.DEFINE_integer("pairs", 30, "Random pairs of target and draft.", lower_bound=2)
_CALLS = flags.DEFINE_integer("calls", 50_000, "Simulated for each pair and verifier.", lower_bound=1)


def emitted(call):
    return {"emitted": call.chosen.emitted}


def simulated(method, target, draft, pair: int, calls: int) -> float:
    """Mean tokens of one call after the prompt."""
    models = TableModel(target), TableModel(draft)
    prompts, lengths = np.tile(PROMPT, (calls, 1)), np.full(calls, len(PROMPT))
    made = generate(jax.random.key(pair), method, *models, prompts, lengths, 1, observe=emitted)
    return float(np.mean(made.observed["emitted"]))


def row_of(spec: str, pairs, calls: int) -> dict[str, Any]:
    """Tokens of each pair, by verifier."""
    tree = parse(spec)
    found: dict[str, list[float]] = {"optimum": []}
    for target, draft in pairs:
        pmfs = [lambda sequence, table=table: table[(*PROMPT, *sequence)[-2:]] for table in (draft, target)]
        found["optimum"].append(most_tokens(*pmfs, tree))
    for name in METHODS:
        method = on_tree(name, tree)
        if method is not None:
            found[name] = [simulated(method, *pair, number, calls) for number, pair in enumerate(pairs)]
        print(f"{spec} {name}", flush=True)
    return {"tree": spec, "nodes": tree.size, "tokens": found}


def markdown(result: dict[str, Any]) -> str:
    """The table and its provenance."""
    cells = []
    for row in result["rows"]:
        best = np.array(row["tokens"]["optimum"])
        shares = {
            name: 100 * np.mean(np.array(tokens) / best) for name, tokens in row["tokens"].items() if name != "optimum"
        }
        mean = f"{best.mean():.3f}"
        cells.append([f"({row['tree']})", mean, *(f"{shares[name]:.2f} %" if name in shares else "-" for name in METHODS)])
    header = ["tree", "optimum, tokens per call", *(f"`{name}`" for name in METHODS)]
    return (
        f"# Share of the optimum over all lossless verifiers\n\n{report.markdown_table(header, cells)}\n\n"
        f"Mean over {result['pairs']} random pairs of table models with {result['vocabulary']} tokens; {result['calls']:,} "
        "simulated calls for each pair and verifier (standard error of an entry below 0.1 %), the optimum by linear "
        "program. A dash: the method cannot draft that tree.\n\n"
        f"{report.made_by(result)}\n"
    )


def main():
    workdir, started = pathlib.Path(_WORKDIR.value), time.monotonic()
    for name in METHODS:
        get_method(name)
    tables = [random_table(seed, _VOCABULARY.value) for seed in range(_PAIRS.value)]
    pairs = [(table, perturbed(table, 1_000 + seed, 0.8)) for seed, table in enumerate(tables)]
    rows = [row_of(spec, pairs, _CALLS.value) for spec in _TREES.value]
    told = {"pairs": _PAIRS.value, "vocabulary": _VOCABULARY.value, "calls": _CALLS.value, "rows": rows}
    result = {**told, "seconds": time.monotonic() - started, **report.provenance()}
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "optimum.json", result)
    write_whole(workdir / "optimum.md", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
