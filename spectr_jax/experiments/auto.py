"""Times the baseline and a grid of methods for a pair of models, and names the fastest here."""

import functools
import json
import pathlib
from typing import Any

import ml_collections
import numpy as np

from spectr_jax.decoding import Method, get_method
from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.call_times import call_timer, timed
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Contender
from spectr_jax.experiments.planning.on_tree import method_of, options_for
from spectr_jax.utils.config import check_fields
from spectr_jax.utils.errors import UserError

NAME, BASELINE = "auto", "baseline"


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Measures the baseline and all candidates, and writes the table and the recommendation to
    `workdir`.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_auto_config(config)
    methods = candidates(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))
    journal = Journal(workdir, NAME, config, report.weights(target, draft), again, prompts.digest())
    bench = Bench(config, target, [draft], prompts, journal)
    rows = measure(bench, methods)
    result = {
        "title": f"The fastest method for {config.target} with drafts of {config.draft}, batch "
        f"{config.batch_size}",
        "rows": rows,
        "target_ms": call_times(bench, methods),
        "prompts": prompts.real,
        "answer": answer(rows),
    }
    return journal.finish(result, markdown)


def check_auto_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, auto_config())
    measurement.check_decoding(config)
    candidates(config)


def candidates(config: ml_collections.ConfigDict) -> dict[str, Method]:
    """Returns the baseline and the candidates of a config by their specs.

    Raises:
      UserError: a spec names no method that drafts, or the method of another spec.
    """
    specs: dict[Method, str] = {get_method(BASELINE): BASELINE}
    for spec in config.candidates:
        method = method_of(spec, "candidates")
        if method in specs:
            raise UserError(
                f"candidates={spec!r}: is the same method as {specs[method]!r}; leave one out"
            )
        specs[method] = spec
    return {spec: method for method, spec in specs.items()}


def measure(bench: Bench, methods: dict[str, Method]) -> list[dict[str, Any]]:
    """Returns a row for each of the `candidates`, the fastest first.

    The methods take turns on each seed. A speedup is the median over seeds of the ratio of two
    speeds. After a stop, the two speeds may come from two processes.
    """
    (draft,) = bench.drafts
    contenders = {
        spec: Contender(method, draft if method.needs_draft else None)
        for spec, method in methods.items()
    }
    runs = bench.measure_all(contenders, bench.config.seeds, warm_up=True)
    speeds = {spec: np.array([run.per_second for run in runs[spec]]) for spec in runs}
    rows = []
    for spec, method in methods.items():
        speedups = speeds[spec] / speeds[BASELINE]
        rows.append(
            {
                "method": method.name,
                "shape": spec.partition(" ")[2] or "-",
                "nodes": method.tree.size,
                "code": _code(spec, method),
                "measured_per_call": float(np.mean([run.per_call for run in runs[spec]])),
                "measured_per_second": float(np.median(speeds[spec])),
                "speedup": float(np.median(speedups)),
                "speedup_by_seed": speedups.tolist(),
            }
        )
    return sorted(rows, key=lambda row: -row["speedup"])


def call_times(bench: Bench, methods: dict[str, Method]) -> dict[str, float]:
    """Returns the milliseconds of a target call alone, by its number of new tokens per sequence:
    the nodes of a method's tree and the root."""
    config = bench.config
    context = config.prompt_tokens + config.max_new_tokens // 2
    timers = {
        count: functools.partial(call_timer, bench.target.model, config.batch_size, count, context)
        for count in sorted({method.tree.size + 1 for method in methods.values()})
    }
    seconds = timed(bench.journal, "calls of the target", timers)
    return {str(count): value * 1e3 for count, value in seconds.items()}


def answer(rows: list[dict[str, Any]]) -> str:
    """Returns the recommendation as a sentence. The first row is the fastest."""
    best = rows[0]
    if not best["nodes"]:
        return "Use the baseline: no other method that was run is faster here."
    return (
        f"Use `{best['code']}`: {best['measured_per_second']:,.1f} tokens/s, "
        f"{best['speedup']:.2f} x the baseline."
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the answer, the table and its provenance, as Markdown."""
    columns: report.Columns = {
        "Method": lambda row: f"`{row['method']}`",
        "Tree": lambda row: row["shape"],
        "Nodes": lambda row: row["nodes"],
        "Tokens/call": lambda row: f"{row['measured_per_call']:.2f}",
        "Tokens/s": lambda row: f"{row['measured_per_second']:,.1f}",
        "Speedup": lambda row: f"{row['speedup']:.2f}",
    }
    config = result["config"]
    calls = ", ".join(f"{ms:.1f} ms on {count}" for count, ms in result["target_ms"].items())
    apart = max(float(np.ptp(row["speedup_by_seed"])) for row in result["rows"])
    notes = [
        f"The methods took turns on {len(config['seeds'])} seed(s). Tokens/s and speedups are medians "
        f"over the seeds, between which the speedups of a method differ by at most {apart:.2f}.",
        f"{result['prompts']} prompts, up to {config['max_new_tokens']} new tokens, batch "
        f"{config['batch_size']}, {config['dtype']}, {report.temperatures(config)}. Tokens/s are "
        "over the batch and include the call on the prompt.",
        f"A target call takes {calls} new tokens per sequence.",
        report.provenance_line(result),
    ]
    table = report.table(columns, result["rows"])
    return report.page(result["title"], f"{result['answer']}\n\n{table}", notes)


def _code(spec: str, method: Method) -> str:
    """Returns the call of `get_method` that makes the method of a spec."""
    name, _, shape = spec.partition(" ")
    options = (options_for(name, method.tree) or {}) if shape else {}
    arguments = [
        f"{option}={json.dumps(shape if option == 'tree' else value)}"
        for option, value in options.items()
    ]
    return f"get_method({', '.join([json.dumps(name), *arguments])})"
