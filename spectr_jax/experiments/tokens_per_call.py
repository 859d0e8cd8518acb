"""SpecTr Tables 2 and 4: tokens per serial target call, by draft model, method, K and L."""

import itertools
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.methods import cannot_branch, on_tree
from spectr_jax.decoding.tree import chain, iid_chains
from spectr_jax.experiments import paper
from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import observe_accepted, observe_optimum
from spectr_jax.experiments.measure.bench import Bench, progress
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Measurement, Program
from spectr_jax.loading.by_name import Trained, shape_name
from spectr_jax.utils import hosts
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "tokens_per_call"

_ABOUT_BEST = (
    "alpha*: the mean of the most that any plan can reach at the same nodes with as many drafts "
    "(optimal transport, SpecTr "
    "section 5), on seed {seed}; for i.i.d. drafts. Methods that decide on whole paths can be "
    "above alpha*; others by "
    "chance: alpha is drawn, alpha* expected."
)


class Row(NamedTuple):
    """One row of the table, before it is measured."""

    draft: Trained | None
    algorithm: str
    num_drafts: int
    draft_length: int
    method: Method


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures every row of the table, prints it, and writes it to `workdir` as Markdown, JSON and
    PNG.

    A journal there keeps the measurements, so that after a stop the same command resumes.

    Raises:
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_eval_config(config)
    target, drafts, prompts = measurement.open_table(config, workdir, NAME, tuple(config.drafts))
    rows = table_rows(config, drafts)
    journal = Journal(workdir, NAME, config, report.weights(target, *drafts))
    summaries: list[dict[str, Any]] = []
    # Rows compared with the preceding baseline run close in time: all of one draft
    # and L.
    groups = [
        [rows[0], *group]
        for _, group in itertools.groupby(rows[1:], lambda row: (row.draft, row.draft_length))
    ]
    steps = sum(_steps(config, row, len(prompts.tokens)) for group in groups for row in group)
    with progress(steps, "step") as bar:
        bench = Bench(config, target, drafts, prompts, journal, bar)
        for number, group in enumerate(groups):
            found = _measure_group(bench, number, group)
            summaries += found[1 if summaries else 0 :]
            jax.clear_caches()  # The number of programs a process can hold is limited.
    result = {
        "title": f"Tokens per serial call of the target {_titled(target)}",
        "rows": summaries,
        "prompts": prompts.real,
        **journal.about(),
    }
    if hosts.is_first():
        report.write(workdir, NAME, result, markdown(result))
        plot(result, workdir / f"{NAME}.png")
    journal.remove()
    return result


def _titled(target: Trained) -> str:
    shape = shape_name(target)
    return target.name if shape == target.name else f"{target.name} ({shape})"


def check_eval_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, eval_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths")
    for name in config.methods:
        if get_method(name).tree.size and not get_method(name).needs_draft:
            raise UserError(f"methods has {name!r}, which uses none of the drafts; leave it out")
        for length in config.draft_lengths:
            if cannot_branch(name) and on_tree(name, chain(length)) is None:
                raise UserError(
                    f"methods has {name!r}, which does not draft chains of {length} tokens; leave "
                    "it out"
                )
        if cannot_branch(name) and 1 not in config.num_drafts:
            raise UserError(
                f"methods has {name!r}, which drafts one chain only; add 1 to num_drafts, or leave "
                "it out"
            )


def table_rows(config: ml_collections.ConfigDict, drafts: list[Trained]) -> list[Row]:
    """Returns the baseline, and for each draft and L speculative decoding and the config's
    one-chain methods at K = 1, and the others above."""
    rows = [Row(None, "baseline", 0, 0, get_method("baseline"))]
    several = [name for name in config.methods if not cannot_branch(name)]
    one = dict.fromkeys(["speculative", *(name for name in config.methods if cannot_branch(name))])
    for draft, length, k in itertools.product(drafts, config.draft_lengths, config.num_drafts):
        for name in one if k == 1 else several:
            method = on_tree(name, iid_chains(k, length))
            if method is not None:
                rows.append(Row(draft, name, k, length, method))
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with its provenance, as Markdown."""
    config = result["config"]
    best = ["alpha*"] if config["optimal_acceptance"] else []
    header = ["Draft", "Algorithm", "K", "L", "Tokens/call", "Paper*", "alpha", *best]
    header += ["Tokens/s", "Speedup"]
    rows = []
    for row in result["rows"]:
        optimum = row["optimal_acceptance"]
        rows.append(
            [
                *(row["draft"] or "-", row["algorithm"]),
                *(str(row["num_drafts"] or "-"), str(row["draft_length"] or "-")),
                report.mean_and_std(row["tokens_per_call_by_seed"]),
                f"{row['paper']:.2f}" if row["paper"] else "-",
                f"{row['acceptance']:.3f}" if row["draft"] else "-",
                *("-" if optimum is None else f"{optimum:.3f}" for _ in best),
                *(f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.2f}"),
            ]
        )
    drafts = ", ".join(f"`{draft}`" for draft in config["drafts"])
    notes = [
        f"{report.decoded(result)} Tokens/s are over the batch; the speedup is over the baseline of "
        "the same run.",
        "*Paper: SpecTr (Sun et al., 2023), Table 4, for a draft of the same size and the paper's 97M "
        "target on LM1B, at temperature 1 only. It is not meant to match other models or data.",
        "alpha is the share of nodes at which the emitted token was a draft, over all seeds.",
        *(_ABOUT_BEST.format(seed=config["seeds"][0]) for _ in best),
        f"Target `{config['target']}`, drafts {drafts}, prompts `{config['prompts']}`.",
        report.made_by(result),
    ]
    return report.page(result["title"], report.markdown_table(header, rows), notes)


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Plots tokens per call as bars with error bars, and the paper's figures as ticks."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(max(6.0, 0.62 * len(rows) + 2), 4.4), layout="constrained")
    axes = figure.subplots()
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


def _summary(
    row: Row,
    results: list[Measurement],
    best: Measurement | None,
    baseline: list[Measurement],
    temperature: float,
) -> dict[str, Any]:
    per_call = [result.tokens / result.calls for result in results]
    speeds = np.array([result.tokens / result.seconds for result in results])
    baseline_speeds = np.array([result.tokens / result.seconds for result in baseline])
    draft = shape_name(row.draft) if row.draft else None
    cited = (
        paper.TOKENS_PER_CALL.get(draft or "", {}) if temperature == 1 else {}
    )  # The paper's temperature.
    nodes, accepted = (
        sum(result.observed[name] for result in results) for name in ("nodes", "accepted")
    )
    return {
        "draft": draft,
        "algorithm": row.algorithm,
        "num_drafts": row.num_drafts,
        "draft_length": row.draft_length,
        "tokens_per_call": float(np.mean(per_call)),
        "tokens_per_call_std": float(np.std(per_call, ddof=1)) if len(per_call) > 1 else 0.0,
        "tokens_per_call_by_seed": per_call,
        "acceptance": float(accepted / nodes) if row.draft else None,
        "optimal_acceptance": float(best.observed["optimum"] / best.observed["nodes"])
        if best
        else None,
        "nodes": int(nodes),
        "paper": cited.get(row[1:4]) if row.draft else 1.0,
        "tokens_per_second": float(np.median(speeds)),
        "speedup": float(np.median(speeds / baseline_speeds)),
    }


def _programs(config: ml_collections.ConfigDict, row: Row) -> tuple[Program, Program | None]:
    """Returns the timed program, which also counts alpha, and a separate one for alpha*, which
    takes time."""
    asked = (
        row.draft and config.optimal_acceptance and row.method.verifier.rule == "iid"
    )  # The optimum for such drafts.
    optimum = Program(row.method, row.draft, observe_optimum) if asked else None
    return Program(row.method, row.draft, observe_accepted), optimum


def _steps(config: ml_collections.ConfigDict, row: Row, batches: int) -> int:
    """Returns the number of programs to compile for a row plus the number of batches to run."""
    _, optimum = _programs(config, row)
    return 1 + 1 + batches * len(config.seeds) + (1 + batches if optimum else 0)


def _measure_group(bench: Bench, number: int, rows: list[Row]) -> list[dict[str, Any]]:
    """Returns the measured rows, which take turns on each seed. The first one is the baseline."""
    config, journal = bench.config, bench.journal

    def name(row: Row, run: int | str) -> str:
        return f"group {number}, {_label(row)}, {run}"  # Two drafts may share a name.

    programs = [(row, *_programs(config, row)) for row in rows]
    unfinished = [
        each
        for each in programs
        if not all(name(each[0], f"seed {seed}") in journal for seed in config.seeds)
    ]
    missing = {_label(row): timed for row, timed, _ in unfinished}
    unknown = {
        f"alpha* of {_label(row)}": best
        for row, _, best in programs
        if best and name(row, "alpha*") not in journal
    }
    bench.compile(missing | unknown)
    for timed in missing.values():
        bench.run(timed, 0, batches=1)  # The first run is not timed.
    if bench.bar is not None:  # For rows that an earlier start measured.
        bench.bar.update(
            2 * (len(rows) - len(missing))
            + sum(best is not None for *_, best in programs)
            - len(unknown)
        )
    runs: list[list[Measurement]] = [[] for _ in rows]
    for seed in config.seeds:
        for (row, timed, _), results in zip(programs, runs, strict=True):
            results.append(bench.measured(name(row, f"seed {seed}"), timed, seed))
    summaries = []
    for (row, _, best), results in zip(programs, runs, strict=True):
        optimum = bench.measured(name(row, "alpha*"), best, config.seeds[0]) if best else None
        summaries.append(_summary(row, results, optimum, runs[0], config.temperature))
    return summaries


def _label(row: Row) -> str:
    return (
        f"{row.algorithm} K={row.num_drafts} L={row.draft_length}" if row.draft else row.algorithm
    )


def _tick(row: dict[str, Any]) -> str:
    if not row["draft"]:
        return "baseline"
    return f"{row['draft']}\n{row['algorithm']}\nK={row['num_drafts']}\nL={row['draft_length']}"
