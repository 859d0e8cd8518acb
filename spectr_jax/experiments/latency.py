"""Call times: SpecTr's Tables 1 and 3, and the phases of a call of a method.

The paper's premise is that a target call on L tokens of each of B sequences takes little longer
than a call on one token of one sequence.
"""

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
import numpy as np
import tqdm

from spectr_jax.decoding import Method
from spectr_jax.decoding.tree import chain, iid_chains
from spectr_jax.experiments import paper
from spectr_jax.experiments.config import latency_config
from spectr_jax.experiments.measure import profile, report
from spectr_jax.experiments.measure.bench import compiled_in_parallel
from spectr_jax.experiments.measure.call_times import PHASES, call_runs, phase_timers, timed
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.planning.on_tree import on_tree
from spectr_jax.loading.by_name import RANDOM_PREFIX, Trained, check_dtype, load, shape_name
from spectr_jax.loading.pairs import fitted, load_alone, load_callable
from spectr_jax.models.frozen import check_context
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_figure

NAME = "latency"


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Times every cell and every phase, and writes the tables, a heat map and a profile to
    `workdir`.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models or workdir are invalid, before any measurement.
    """
    check_latency_config(config)
    check_table(config, workdir, NAME)
    target, *others = config.models
    models = [load_alone(target, config.dtype)]
    models += [load_callable(spec, config.dtype) for spec in others]
    names = [trained.name for trained in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"models={name!r}: is the name of {names.count(name)} models, which the table "
                "cannot tell apart; rename one"
            )
    draft = fitted(load(config.draft, config.dtype), models[0])
    for trained in (*models, draft):
        new = max(config.lengths) + 1
        asked = f"context={config.context} and a call of {new} tokens"
        check_context(asked, config.context + new, trained, "lower context")
    journal = Journal(workdir, NAME, config, report.weights(*models, draft), again)
    profiled = _method(config, config.methods[0], config.lengths[-1])
    arguments = profiled, models[0].model, draft.model, config.context
    measure_profile = functools.partial(profile.generation_profile, *arguments)
    result = {
        "title": f"Latency of a call relative to {config.models[0]}, length {config.lengths[0]}, "
        "one sequence",
        "cells": measure_cells(config, models, journal),
        "phases": measure_phases(config, models[0], draft, journal),
        "profile": journal.get_or_measure("profile", measure_profile),
    }
    return journal.finish(result, markdown, plot)


def check_latency_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, latency_config())
    check_positive(
        config, "context", "lengths", "batch_sizes", "runs", "phase_batch_sizes", "num_drafts"
    )
    check_dtype(config.dtype)
    for name, length in itertools.product(config.methods, config.lengths):
        if not _method(config, name, length).needs_draft:
            raise UserError(f"methods={name!r}: has no draft model to time; leave it out")


def _method(config: ml_collections.ConfigDict, name: str, length: int) -> Method:
    """Returns a method on its chains, or on one chain if it drafts only one."""
    method = on_tree(name, iid_chains(config.num_drafts, length)) or on_tree(name, chain(length))
    if method is None or not method.tree.size:
        raise UserError(f"methods={name!r}: drafts no chains of {length} tokens; leave it out")
    return method


def measure_cells(
    config: ml_collections.ConfigDict, models: list[Trained], journal: Journal
) -> list[dict[str, Any]]:
    """Times calls from Python of every model on every length and batch, in turns, relative to the
    first cell.

    A journal entry is one turn of all cells, so that a restart affects all cells alike.
    """
    shapes = list(itertools.product(models, config.lengths, config.batch_sizes))
    turns = [f"turn {number} of all cells" for number in range(config.runs)]
    finished = all(turn in journal for turn in turns)
    tasks = [
        functools.partial(call_runs, trained.model, batch, length, config.context)
        for trained, length, batch in ([] if finished else shapes)
    ]
    compiled = compiled_in_parallel(tasks)
    runs = list(tqdm.tqdm(compiled, "calls, compiling", len(tasks), dynamic_ncols=True))
    rows = [
        journal.get_or_measure(turn, lambda: [run() for run in runs])
        for turn in tqdm.tqdm(turns, unit="run", dynamic_ncols=True)
    ]
    seconds = np.array(rows)
    unit = seconds[:, 0].mean()
    return [
        {
            "model": trained.name,
            "length": length,
            "batch": batch,
            "mean": float(of_cell.mean() / unit),
            "std": float(of_cell.std() / unit),
            "median_ms": float(np.median(of_cell) * 1e3),
            "paper": paper.LATENCY.get((shape_name(trained), length, batch)),
        }
        for (trained, length, batch), of_cell in zip(shapes, seconds.T, strict=True)
    ]


def measure_phases(
    config: ml_collections.ConfigDict, target: Trained, draft: Trained, journal: Journal
) -> list[dict[str, Any]]:
    """Returns a row for each method, draft length and number of sequences: the milliseconds of each
    phase of a call and of the whole call, and each phase's share of the sum of the phases."""
    models, rows = (target.model, draft.model), []
    tasks = {
        (name, length, batch): functools.partial(
            phase_timers, _method(config, name, length), *models, batch, config.context
        )
        for name, length, batch in itertools.product(
            config.methods, config.lengths, config.phase_batch_sizes
        )
    }
    for (name, length, batch), seconds in timed(journal, "phases", tasks).items():
        whole = sum(seconds[phase] for phase in PHASES)
        rows.append(
            {
                "method": name,
                "num_drafts": len(_method(config, name, length).tree.levels[1]),
                "draft_length": length,
                "batch": batch,
                "ms": {phase: value * 1e3 for phase, value in seconds.items()},
                "share": {phase: seconds[phase] / whole for phase in PHASES},
            }
        )
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Returns the tables with their provenance, as Markdown."""
    config, cells, tables = result["config"], result["cells"], []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        tables += [
            f"`{model}`, mean ± standard deviation over {config['runs']} runs (the paper's in "
            "italics):",
            _cell_table(config, [cell for cell in cells if cell["model"] == model]),
        ]
    untrained = ""
    if any(spec.startswith(RANDOM_PREFIX) for spec in (*config["models"], config["draft"])):
        untrained = (
            " **The weights of `random:` models are random.** Times depend only on the shapes of "
            "the weights; a random target accepts about 0.7 of a random draft's tokens."
        )
    chains = "".join(f", K = {row['num_drafts']}" for row in result["phases"][:1])
    notes = [
        f"1.00 is {cells[0]['median_ms']:.2f} ms (median). {config['dtype']}; calls from Python on "
        f"random tokens after {config['context']} committed tokens in the cache; the cells take "
        f"turns. The paper: SpecTr, Table 1 (97M) and Table 3 (6M), on a GPU.{untrained}",
        "## Where the time of a call goes",
        _phase_table(result["phases"]),
        f"Target `{config['models'][0]}`, draft `{config['draft']}`. Each phase is measured alone, "
        "in a loop on the device (median); the shares are of their sum. The whole call is measured "
        "by itself. The paper: drafting adds 10 to 15 %.",
        "## What the profiler sees",
        _profile_table(result["profile"]),
        f"`{config['methods'][0]}`{chains}, L = {config['lengths'][-1]}, one sequence: time inside "
        "operations by phase (`jax.named_scope`), on all threads, with the profiler on. `other` is "
        "the call on the prompt, the loop itself and operations without a scope. Rows below 0.5 % "
        f"are left out.{'' if result['profile'] else ' This machine does not allow profiling.'}",
        report.provenance_line(result),
    ]
    return report.page(result["title"], "\n\n".join(tables), notes)


def _cell_table(config: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    texts = {}
    for cell in cells:
        text = f"{cell['mean']:.2f} ± {cell['std']:.2f}"
        if cell["paper"]:
            text += " *({:.2f} ± {:.2f})*".format(*cell["paper"])
        texts[cell["length"], cell["batch"]] = text
    batches = config["batch_sizes"]
    rows = [[n, *(texts[n, batch] for batch in batches)] for n in config["lengths"]]
    return report.markdown_table(["Length", *(f"Batch {batch}" for batch in batches)], rows)


def _phase_table(rows: list[dict[str, Any]]) -> str:
    def part(name: str, phase: str, form: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: format(row[name][phase], form)

    columns: report.Columns = {
        "Method": lambda row: f"`{row['method']}`",
        "K": lambda row: row["num_drafts"],
        "L": lambda row: row["draft_length"],
        "Sequences": lambda row: row["batch"],
        **{f"{phase}, ms": part("ms", phase, ".2f") for phase in PHASES},
        "Sum, ms": lambda row: f"{sum(row['ms'][phase] for phase in PHASES):.2f}",
        "Whole call, ms": part("ms", "call", ".2f"),
        **{f"{phase}, share": part("share", phase, ".1%") for phase in PHASES},
    }
    return report.table(columns, rows)


def _profile_table(rows: list[dict[str, Any]]) -> str:
    columns: report.Columns = {
        "Phase": lambda row: row["phase"],
        "Kind": lambda row: row["kind"],
        "Operations/call": lambda row: f"{row['operations']:.0f}",
        "ms/call": lambda row: f"{row['ms']:.3f}",
        "Share": lambda row: f"{row['share']:.1%}",
    }
    return report.table(columns, [row for row in rows if row["share"] >= 0.005])


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Plots a heat map of relative latency for each model, and bars of the phases."""
    from matplotlib.figure import Figure

    config, cells = result["config"], result["cells"]
    names = list(dict.fromkeys(cell["model"] for cell in cells))
    figure = Figure(figsize=(3.4 * (len(names) + 1), 3.6), layout="constrained")
    axes = figure.subplots(1, len(names) + 1)
    shape = (len(config["lengths"]), len(config["batch_sizes"]))
    lowest, highest = (limit(cell["mean"] for cell in cells) for limit in (min, max))
    for name, axis in zip(names, axes[:-1], strict=True):
        means = np.array([cell["mean"] for cell in cells if cell["model"] == name]).reshape(shape)
        image = axis.imshow(means, cmap="viridis", norm="log", vmin=lowest, vmax=highest)
        for (row, column), mean in np.ndenumerate(means):
            color = "black" if image.norm(mean) > 0.6 else "white"
            axis.text(column, row, f"{mean:.2f}", ha="center", va="center", color=color, fontsize=9)
        axis.set_xticks(range(shape[1]), config["batch_sizes"])
        axis.set_yticks(range(shape[0]), config["lengths"])
        axis.set(title=name, xlabel="batch", ylabel="length")
    rows, bottom = result["phases"], np.zeros(len(result["phases"]))
    labels = [f"{row['method']}\nL={row['draft_length']}, B={row['batch']}" for row in rows]
    for phase in PHASES:
        share = np.array([row["share"][phase] for row in rows])
        axes[-1].barh(labels, share, left=bottom, label=phase)
        bottom += share
    axes[-1].invert_yaxis()
    axes[-1].tick_params(axis="y", labelsize=7)
    axes[-1].legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    axes[-1].set(xlabel="share of a call", title="phases")
    write_figure(path, figure)
