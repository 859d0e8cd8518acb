"""SpecTr Tables 2 and 4: tokens decoded per serial call of the target, by draft model, method, K and L."""

import functools
import itertools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax import hosts
from spectr_jax.config import check_fields, check_positive, eval_config
from spectr_jax.decoding import Method, get_method
from spectr_jax.experiments import paper
from spectr_jax.loading import Trained, shape_name
from spectr_jax.measure import measurement, report
from spectr_jax.measure.acceptance import observe_choices
from spectr_jax.measure.journal import Journal
from spectr_jax.measure.measurement import Measurement, Program

NAME = "tokens_per_call"


class Row(NamedTuple):
    """One row of the table, before it is measured."""

    draft: Trained | None
    algorithm: str
    num_drafts: int
    draft_length: int
    method: Method


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures every row of the table, prints it, and writes it to `workdir` as Markdown, JSON and PNG.

    What it has measured is in a journal there until it is done: the same command goes on after a stop.

    Raises:
      UserError: anything wrong with the config, the models, the prompts or the workdir, before any measurement.
    """
    check_eval_config(config)
    target, drafts, prompts = measurement.open_run(config, workdir, NAME, tuple(config.drafts))
    rows = table_rows(config, drafts)
    journal = Journal(workdir, NAME, config)

    def measured(program: Program, seed: int, **kwargs) -> Measurement:
        method, draft, observe = program
        return measurement.measure(method, target, draft, prompts, config, seed, observe=observe, **kwargs)

    def compile_ahead(programs: list[Program]) -> None:
        measurement.compile_ahead(programs, target, prompts, config)

    started = time.monotonic() - journal.seconds
    summaries: list[dict[str, Any]] = []
    baseline, groups = rows[0], itertools.groupby(rows[1:], lambda row: (row.draft, row.draft_length))
    with tqdm.tqdm(total=len(rows) - 1, unit="row", dynamic_ncols=True, disable=not hosts.is_first()) as bar:
        for number, (_, group) in enumerate(groups):
            compared = [baseline, *group]
            found = _measure_group(config, number, compared, journal, compile_ahead, measured, bar)
            summaries += found[1 if summaries else 0 :]
            jax.clear_caches()  # A process may hold so many programs only.
            bar.update(len(compared) - 1)
    result = {
        "title": f"Tokens per serial call of the target {target.name} ({shape_name(target.model.config)})",
        "rows": summaries,
        "prompts": prompts.real,
        **report.about(config, started),
    }
    if hosts.is_first():
        report.write(workdir, NAME, result, markdown(result))
        plot(result, workdir / f"{NAME}.png")
    journal.remove()
    return result


def check_eval_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that cannot be evaluated."""
    check_fields(config, eval_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths")
    for name in config.methods:
        get_method(name, num_drafts=1, draft_length=1)


def table_rows(config: ml_collections.ConfigDict, drafts: list[Trained]) -> list[Row]:
    """The baseline, and for each draft and L: speculative decoding at K = 1, the config's methods above."""
    rows = [Row(None, "baseline", 0, 0, get_method("baseline"))]
    for draft in drafts:
        for length in config.draft_lengths:
            for k in config.num_drafts:
                if k == 1:
                    rows.append(Row(draft, "speculative", 1, length, get_method("speculative", draft_length=length)))
                    continue
                for name in config.methods:
                    rows.append(Row(draft, name, k, length, get_method(name, num_drafts=k, draft_length=length)))
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The table with its provenance, as Markdown."""
    header = ["Draft", "Algorithm", "K", "L", "Tokens per call", "Paper*", "alpha", "alpha*", "Tokens/s", "x baseline"]
    rows = [
        [
            row["draft"] or "-",
            row["algorithm"],
            str(row["num_drafts"] or "-"),
            str(row["draft_length"] or "-"),
            report.mean_and_std(row["tokens_per_call_by_seed"]),
            f"{row['paper']:.2f}" if row["paper"] else "-",
            f"{row['acceptance']:.3f}" if row["draft"] else "-",
            f"{row['optimal_acceptance']:.3f}" if row["draft"] else "-",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}",
        ]
        for row in result["rows"]
    ]
    config = result["config"]
    notes = [
        f"{result['prompts']} prompts of up to {config['prompt_tokens']} tokens, up to {config['max_new_tokens']} new ones "
        f"each, batch {config['batch_size']}, temperature {config['temperature']}; {report.over_seeds(config['seeds'])}; "
        "tokens/s over the batch, x baseline in the same run.",
        "*Paper: SpecTr (Sun et al., 2023), Table 4, same draft size with its 97M target on LM1B; a figure to look at, not "
        "to match, where models or data differ; at temperature 1 only.",
        "alpha: share of the nodes at which the token was a draft; alpha*: the mean of the most that any plan can reach at "
        f"the same nodes with as many drafts (optimal transport, SpecTr section 5); both on seed {config['seeds'][0]}. "
        "otm_block decides on whole paths and can be above alpha*; others by chance: alpha is drawn, alpha* expected.",
        f"Target `{config['target']}`, drafts {', '.join(f'`{draft}`' for draft in config['drafts'])}, prompts "
        f"`{config['prompts']}`.",
        report.made_by(result),
    ]
    return f"# {result['title']}\n\n{report.markdown_table(header, rows)}\n\n" + "\n\n".join(notes) + "\n"


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Bars of tokens per call with error bars, and the paper's figures as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.62 * len(rows) + 2), 4.4), layout="constrained")
    places = np.arange(len(rows))
    lengths = sorted({row["draft_length"] for row in rows})
    axes.bar(
        places,
        [row["tokens_per_call"] for row in rows],
        yerr=[row["tokens_per_call_std"] for row in rows],
        color=[f"C{lengths.index(row['draft_length'])}" for row in rows],
        capsize=3,
    )
    cited = [(place, row["paper"]) for place, row in zip(places, rows, strict=True) if row["paper"]]
    if cited:
        axes.plot(*zip(*cited, strict=True), "k_", markersize=16, label="paper (97M target, LM1B)")
        axes.legend()
    axes.set_xticks(places, [_tick(row) for row in rows], fontsize=7)
    axes.set(ylabel="tokens per serial call", title=result["title"])
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _summary(
    row: Row, results: list[Measurement], nodes: Measurement, baseline: list[Measurement], temperature: float
) -> dict[str, Any]:
    per_call = [result.tokens / result.calls for result in results]
    speeds = np.array([result.tokens / result.seconds for result in results])
    baseline_speeds = np.array([result.tokens / result.seconds for result in baseline])
    draft = shape_name(row.draft.model.config) if row.draft else None
    cited = paper.TOKENS_PER_CALL.get(draft or "", {}) if temperature == 1 else {}  # The paper's temperature.
    return {
        "draft": draft,
        "algorithm": row.algorithm,
        "num_drafts": row.num_drafts,
        "draft_length": row.draft_length,
        "tokens_per_call": float(np.mean(per_call)),
        "tokens_per_call_std": float(np.std(per_call, ddof=1)) if len(per_call) > 1 else 0.0,
        "tokens_per_call_by_seed": per_call,
        "acceptance": float(nodes.observed["accepted"] / nodes.observed["nodes"]) if row.draft else None,
        "optimal_acceptance": float(nodes.observed["optimum"] / nodes.observed["nodes"]) if row.draft else None,
        "nodes": int(nodes.observed["nodes"]),
        "paper": cited.get(row[1:4]) if row.draft else 1.0,
        "tokens_per_second": float(np.median(speeds)),
        "speedup": float(np.median(speeds / baseline_speeds)),
    }


def _measure_group(
    config: ml_collections.ConfigDict,
    number: int,
    rows: list[Row],
    journal: Journal,
    compile_ahead,
    measured,
    bar: tqdm.tqdm,
) -> list[dict[str, Any]]:
    """The rows that are compared with the baseline in front of them, close together in time: of one draft and L."""

    def name(row: Row, run: int | str) -> str:
        return f"group {number}, {_label(row)}, {run}"  # Two drafts may have one name.

    programs = [(row, Program(row.method, row.draft), Program(row.method, row.draft, observe_choices)) for row in rows]
    missing = [plain for row, plain, _ in programs if not all(name(row, seed) in journal for seed in config.seeds)]
    unobserved = [observed for row, _, observed in programs if name(row, "acceptance") not in journal]
    compile_ahead(missing + unobserved)
    for plain in missing:
        measured(plain, 0, batches=1)  # The first run is not timed.
    runs: list[list[Measurement]] = [[] for _ in rows]
    for seed in config.seeds:
        for (row, plain, _), results in zip(programs, runs, strict=True):
            bar.set_description(f"seed {seed}, {_label(row)}")
            results.append(journal.measurement(name(row, seed), functools.partial(measured, plain, seed)))
    summaries = []
    # The first seed again: what is observed would count in the time.
    for (row, _, observed), results in zip(programs, runs, strict=True):
        bar.set_description(f"acceptance of {_label(row)}")
        take = functools.partial(measured, observed, config.seeds[0])
        accepted = journal.measurement(name(row, "acceptance"), take)
        summaries.append(_summary(row, results, accepted, runs[0], config.temperature))
    return summaries


def _label(row: Row) -> str:
    return f"{row.algorithm} K={row.num_drafts} L={row.draft_length}" if row.draft else row.algorithm


def _tick(row: dict[str, Any]) -> str:
    if not row["draft"]:
        return "baseline"
    return f"{row['draft']}\n{row['algorithm']}\nK={row['num_drafts']}\nL={row['draft_length']}"
