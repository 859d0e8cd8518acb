"""Call times: SpecTr's Tables 1 and 3, and the phases of a call of a method.

The paper's premise is that a target call on L tokens of each of B sequences takes hardly longer
than a call on one token of one sequence.
"""

import functools
import itertools
import pathlib
from typing import Any

import ml_collections
import numpy as np
import tqdm

from spectr_jax.decoding import Method
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import chain, iid_chains
from spectr_jax.experiments import paper
from spectr_jax.experiments.config import latency_config
from spectr_jax.experiments.measure import measurement, profile, report
from spectr_jax.experiments.measure.call_times import PHASES, call_runs, phase_timers, timed_once
from spectr_jax.experiments.measure.compilation import side_by_side
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.loading.by_name import RANDOM_PREFIX, Trained, check_dtype, load, shape_name
from spectr_jax.loading.pairs import fitted, load_alone, load_callable
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "latency"


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Times every cell and every phase, and writes the tables, a heat map and a profile to
    `workdir`.

    A journal there keeps the measurements, so that after a stop the same command resumes. A
    stop loses the compilation and the measurement in progress.

    Raises:
      UserError: the config, models or workdir are invalid, before any measurement.
    """
    check_latency_config(config)
    measurement.check_table(config, workdir, NAME)
    target, *others = config.models
    models = [
        load_alone(target, config.dtype),
        *(load_callable(spec, config.dtype) for spec in others),
    ]
    names = [trained.name for trained in models]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"models has {names.count(name)} named {name!r}, which the table cannot tell "
                "apart; rename one"
            )
    target, draft = models[0], fitted(load(config.draft, config.dtype), models[0])
    for trained in (*models, draft):
        if config.context + max(config.lengths) >= trained.model.context:
            raise UserError(
                f"context={config.context} and a call of {max(config.lengths) + 1} tokens exceed "
                "the context "
                f"{trained.model.context} of {trained.name!r}; lower it"
            )
    journal = Journal(workdir, NAME, config, report.weights(*models, draft))
    result = {
        "title": f"Latency of a call, relative to {config.models[0]} on length {config.lengths[0]}, one sequence",
        "cells": measure_cells(config, models, journal),
        "phases": measure_phases(config, target, draft, journal),
        "profile": journal.value("profile", lambda: profile_call(config, target, draft)),
        **journal.about(),
    }
    report.write(workdir, NAME, result, markdown(result))
    plot(result, workdir / f"{NAME}.png")
    journal.remove()
    return result


def check_latency_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, latency_config())
    check_positive(
        config, "context", "lengths", "batch_sizes", "runs", "phase_batch_sizes", "num_drafts"
    )
    check_dtype(config.dtype)
    for name, length in itertools.product(config.methods, config.lengths):
        if not _method(config, name, length).needs_draft:
            raise UserError(
                f"methods={tuple(config.methods)} has {name!r}, which has no draft model to time; "
                "leave it out"
            )


def _method(config: ml_collections.ConfigDict, name: str, length: int) -> Method:
    """Returns a method on its chains, or on one chain if it drafts only one."""
    method = on_tree(name, iid_chains(config.num_drafts, length)) or on_tree(name, chain(length))
    if method is None or not method.tree.size:
        raise UserError(
            f"methods={tuple(config.methods)} has {name!r}, which drafts no chains of {length}; "
            "leave it out"
        )
    return method


def measure_cells(
    config: ml_collections.ConfigDict, models: list[Trained], journal: Journal
) -> list[dict[str, Any]]:
    """Times calls from Python of every model on every length and batch, in turns. The first cell is
    the unit.

    A journal entry is one turn of all cells, so that a change of process affects all of them
    alike.
    """
    shapes = list(itertools.product(models, config.lengths, config.batch_sizes))
    turns = [f"turn {number} of all cells" for number in range(config.runs)]
    tasks = [
        functools.partial(call_runs, trained.model, batch, length, config.context)
        for trained, length, batch in shapes
    ]
    if all(turn in journal for turn in turns):
        tasks = []
    runs = list(tqdm.tqdm(side_by_side(tasks), "calls, compiling", len(tasks), dynamic_ncols=True))
    bar = tqdm.tqdm(turns, unit="run", dynamic_ncols=True)
    seconds = np.array([journal.value(turn, lambda: [one() for one in runs]) for turn in bar])
    unit = seconds[:, 0].mean()
    return [
        {
            "model": trained.name,
            "length": length,
            "batch": batch,
            "mean": float(own.mean() / unit),
            "std": float(own.std() / unit),
            "median_ms": float(np.median(own) * 1e3),
            "paper": paper.LATENCY.get((shape_name(trained), length, batch)),
        }
        for (trained, length, batch), own in zip(shapes, seconds.T, strict=True)
    ]


def measure_phases(
    config: ml_collections.ConfigDict, target: Trained, draft: Trained, journal: Journal
) -> list[dict[str, Any]]:
    """Returns the phases of one call of each method, in seconds and as shares of their sum."""
    tasks = {}
    for name, length, batch in itertools.product(
        config.methods, config.lengths, config.phase_batch_sizes
    ):
        method = _method(config, name, length)
        tasks[name, length, batch] = functools.partial(
            phase_timers, method, target.model, draft.model, batch, config.context
        )
    rows = []
    for (name, length, batch), seconds in timed_once(journal, "phases", tasks).items():
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


def profile_call(
    config: ml_collections.ConfigDict, target: Trained, draft: Trained
) -> list[dict[str, Any]]:
    """Returns a profile of one generation with the first method, for one sequence."""
    method = _method(config, config.methods[0], config.lengths[-1])
    return profile.generation_profile(method, target.model, draft.model, config.context)


def markdown(result: dict[str, Any]) -> str:
    """Returns the tables with their provenance, as Markdown."""
    config = result["config"]
    parts = [f"# {result['title']}"]
    for model in dict.fromkeys(cell["model"] for cell in result["cells"]):
        parts += [
            f"`{model}`, mean ± standard deviation over {config['runs']} runs (in italics the "
            "paper's):"
        ]
        parts += [_cell_table(config, [cell for cell in result["cells"] if cell["model"] == model])]
    unit = result["cells"][0]["median_ms"]
    unseen = "" if result["profile"] else " This machine shows it nothing."
    parts += [
        f"1.00 is {unit:.2f} ms (median). {config['dtype']}; calls from Python on random tokens "
        f"after {config['context']} "
        "committed ones in the cache, all cells in turns. The paper: SpecTr, Table 1 (97M) and "
        "Table 3 (6M), on a GPU. The "
        f"spread is the machine's.{_untrained(config)}",
        "## Where the time of a call goes",
        report.markdown_table(
            [
                "Method",
                "K",
                "L",
                "Sequences",
                *(f"{phase}, ms" for phase in PHASES),
                "sum",
                "whole call",
                *PHASES,
            ],
            [_phase_row(row) for row in result["phases"]],
        ),
        f"Target `{config['models'][0]}`, draft `{config['draft']}`. Each phase alone, in a loop "
        "on the device, median; the "
        "last columns are its shares of the sum. The whole call is measured by itself. The paper: "
        "drafting adds 10 to 15 %.",
        "## What the profiler sees",
        report.markdown_table(
            ["Phase", "Kind", "Operations a call", "ms a call", "Share"],
            [
                [
                    row["phase"],
                    row["kind"],
                    f"{row['operations']:.0f}",
                    f"{row['ms']:.3f}",
                    f"{row['share']:.1%}",
                ]
                for row in result["profile"]
                if row["share"] >= 0.005
            ],
        ),
        f"`{config['methods'][0]}`{_chains(result)}, L = {config['lengths'][-1]}, one "
        "sequence: time inside operations by phase (`jax.named_scope`), on all threads, with the "
        "profiler on. `other` is "
        "the call on the prompt, the loop itself and what has no scope; rows below 0.5 % are "
        f"left out.{unseen}",
        report.made_by(result),
    ]
    return "\n\n".join(parts) + "\n"


def _cell_table(config: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    found = {(cell["length"], cell["batch"]): cell for cell in cells}

    def text(cell) -> str:
        cited = cell["paper"]
        return f"{cell['mean']:.2f} ± {cell['std']:.2f}" + (
            f" *({cited[0]:.2f} ± {cited[1]:.2f})*" if cited else ""
        )

    return report.markdown_table(
        ["", *(f"batch = {batch}" for batch in config["batch_sizes"])],
        [
            [f"length = {length}", *(text(found[length, batch]) for batch in config["batch_sizes"])]
            for length in config["lengths"]
        ],
    )


def _phase_row(row: dict[str, Any]) -> list[str]:
    alone = [row["ms"][phase] for phase in PHASES]
    times = [*alone, sum(alone), row["ms"]["call"]]
    return [
        f"`{row['method']}`",
        *(str(row[name]) for name in ("num_drafts", "draft_length", "batch")),
        *(f"{value:.2f}" for value in times),
        *(f"{row['share'][phase]:.1%}" for phase in PHASES),
    ]


def _untrained(config: dict[str, Any]) -> str:
    if not any(spec.startswith(RANDOM_PREFIX) for spec in (*config["models"], config["draft"])):
        return ""
    return (
        " **The weights of `random:` models are random**: time is that of any weights of these "
        "shapes; two such models "
        "agree in about 0.7 of their drafts."
    )


def _chains(result: dict[str, Any]) -> str:
    """Returns K of the profiled method, the first one."""
    return "".join(f", K = {row['num_drafts']}" for row in result["phases"][:1])


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Plots a heat map of relative latency for each model, and bars of the phases."""
    from matplotlib.figure import Figure

    config, cells = result["config"], result["cells"]
    names = list(dict.fromkeys(cell["model"] for cell in cells))
    figure = Figure(figsize=(3.4 * (len(names) + 1), 3.6), layout="constrained")
    axes = figure.subplots(1, len(names) + 1)
    shape = (len(config["lengths"]), len(config["batch_sizes"]))
    for name, axis in zip(names, axes[:-1], strict=True):
        means = np.array([cell["mean"] for cell in cells if cell["model"] == name]).reshape(shape)
        image = axis.imshow(
            means,
            cmap="viridis",
            norm="log",
            vmin=min(c["mean"] for c in cells),
            vmax=max(c["mean"] for c in cells),
        )
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
    figure.savefig(path, dpi=120)
