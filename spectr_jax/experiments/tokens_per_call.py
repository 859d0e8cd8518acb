"""SpecTr Tables 2 and 4: tokens per serial target call, by draft model, method, K and L."""

import itertools
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np

from spectr_jax.decoding import get_method
from spectr_jax.decoding.tree import chain, iid_chains
from spectr_jax.experiments import paper
from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import observe_accepted, observe_optimum
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Contender, Measurement
from spectr_jax.experiments.planning.on_tree import cannot_branch, on_tree
from spectr_jax.loading.by_name import Trained, shape_name
from spectr_jax.transport import rules
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_figure
from spectr_jax.utils.progress import progress

NAME = "tokens_per_call"
SEVERAL_HOSTS = True


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Measures every row of the table, prints it, and writes it to `workdir` as Markdown, JSON and
    PNG.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_eval_config(config)
    target, drafts, prompts = measurement.open_table(config, workdir, NAME, tuple(config.drafts))
    baseline, *rows = table_rows(config, drafts)
    journal = Journal(
        workdir, NAME, config, report.weights(target, *drafts), again, prompts.digest()
    )
    summaries: list[dict[str, Any]] = []
    # Each draft and L has its own baseline runs, which are close in time to those of its rows.
    groups = [
        [baseline, *group]
        for _, group in itertools.groupby(rows, lambda row: (row.draft, row.method.tree.height))
    ]
    batches, every_row = len(prompts.tokens), [row for group in groups for row in group]
    steps = len(every_row) * (2 + batches * len(config.seeds))  # 2: compilation and a warm-up.
    steps += sum(_has_optimum(config, row) for row in every_row) * (1 + batches)
    with progress(steps, "step") as bar:
        bench = Bench(config, target, drafts, prompts, journal, bar)
        for number, group in enumerate(groups):
            summaries += _measure_group(bench, number, group)[1 if summaries else 0 :]
            jax.clear_caches()  # The number of programs a process can hold is limited.
    shape = shape_name(target)
    title = target.name if shape == target.name else f"{target.name} ({shape})"
    result = {
        "title": f"Tokens per serial call of the target {title}",
        "rows": summaries,
        "prompts": prompts.real,
    }
    return journal.finish(result, markdown, plot)


def check_eval_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, eval_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths")
    for name in config.methods:
        method, one_chain = get_method(name), cannot_branch(name)
        if method.tree.size and not method.needs_draft:
            raise UserError(f"methods={name!r}: uses no draft model; leave it out")
        for length in config.draft_lengths:
            if one_chain and on_tree(name, chain(length)) is None:
                raise UserError(
                    f"methods={name!r}: does not draft chains of {length} tokens; leave it out"
                )
        if one_chain and 1 not in config.num_drafts:
            raise UserError(
                f"methods={name!r}: drafts only one chain; add 1 to num_drafts, or leave it out"
            )


def table_rows(config: ml_collections.ConfigDict, drafts: list[Trained]) -> list[Contender]:
    """Returns the baseline, and for each draft and L the methods with K drafts.

    At K = 1 these are speculative decoding and the config's methods on one chain; at larger K its
    other methods.
    """
    rows = [Contender(get_method("baseline"), None)]
    several = [name for name in config.methods if not cannot_branch(name)]
    one = dict.fromkeys(["speculative", *(name for name in config.methods if cannot_branch(name))])
    for draft, length, k in itertools.product(drafts, config.draft_lengths, config.num_drafts):
        for name in one if k == 1 else several:
            method = on_tree(name, iid_chains(k, length))
            if method is not None:
                rows.append(Contender(method, draft))
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with its provenance, as Markdown."""
    config = result["config"]
    columns: report.Columns = {
        "Draft": lambda row: row["draft"] or "-",
        "Algorithm": lambda row: row["algorithm"],
        "K": lambda row: row["num_drafts"] or "-",
        "L": lambda row: row["draft_length"] or "-",
        "Tokens/call": lambda row: report.mean_and_std(row["tokens_per_call_by_seed"]),
        "Paper*": lambda row: report.number(row["paper"], ".2f"),
        "alpha": lambda row: report.number(row["acceptance"], ".3f"),
        "alpha*": lambda row: report.number(row["optimal_acceptance"], ".3f"),
        "Tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "Speedup": lambda row: f"{row['speedup']:.2f}",
    }
    if not config["optimal_acceptance"]:
        del columns["alpha*"]
    drafts = ", ".join(f"`{draft}`" for draft in config["drafts"])
    notes = [
        f"{report.decoded(result)} Tokens/s are over the batch. The speedup is relative to the "
        "baseline of the same run.",
        "*Paper: SpecTr (Sun et al., 2023), Table 4, for a draft of the same size and the paper's "
        "97M target on LM1B, at temperature 1 only. Other models and data give other numbers.",
        "alpha is the acceptance rate: of the nodes where a method chose among drafts, the share "
        "at which it accepted one, over all seeds.",
    ]
    if config["optimal_acceptance"]:
        notes += [
            "alpha* is the largest acceptance rate that a plan for one token can reach at the same "
            "nodes with as many i.i.d. drafts (optimal transport, SpecTr, section 5), on seed "
            f"{config['seeds'][0]}. Methods that decide on whole paths can exceed it. Others do so "
            "by chance only, because alpha is sampled and alpha* is an expectation."
        ]
    notes += [
        f"Target `{config['target']}`, drafts {drafts}, prompts `{config['prompts']}`.",
        report.provenance_line(result),
    ]
    return report.page(result["title"], report.table(columns, result["rows"]), notes)


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
    write_figure(path, figure)


def _summary(
    row: Contender,
    results: list[Measurement],
    best: Measurement | None,
    baseline: list[Measurement],
    temperature: float,
) -> dict[str, Any]:
    """Returns the measured row; `best` is the run that observed alpha*."""
    speeds = np.array([result.per_second for result in results])
    draft, (k, length) = shape_name(row.draft) if row.draft else None, _chains(row)
    key = draft or "", row.method.name, k, length
    cited = paper.TOKENS_PER_CALL.get(key) if temperature == 1 else None  # As in the paper.
    nodes, accepted = (
        sum(result.observed[name] for result in results) for name in ("nodes", "accepted")
    )
    return {
        "draft": draft,
        "algorithm": row.method.name,
        "num_drafts": k,
        "draft_length": length,
        **measurement.tokens_per_call(results),
        "acceptance": float(accepted / nodes) if row.draft else None,
        "optimal_acceptance": best and float(best.observed["optimum"] / best.observed["nodes"]),
        "nodes": int(nodes),
        "paper": cited if row.draft else 1.0,
        "tokens_per_second": float(np.median(speeds)),
        "speedup": float(np.median(speeds / [result.per_second for result in baseline])),
    }


def _chains(row: Contender) -> tuple[int, int]:
    """Returns K and L; both are 0 for the baseline."""
    tree = row.method.tree
    return len(tree.levels[1]) if tree.size else 0, tree.height


def _has_optimum(config: ml_collections.ConfigDict, row: Contender) -> bool:
    """Returns whether alpha*, the optimum for i.i.d. drafts, is measured for the row."""
    iid = row.draft is not None and row.method.verifier.rule == rules.IID
    return iid and config.optimal_acceptance


def _measure_group(bench: Bench, number: int, rows: list[Contender]) -> list[dict[str, Any]]:
    """Returns the measured rows, which take turns on each seed. The first one is the baseline."""
    config = bench.config
    # With the number of the group, because two drafts may share a name.
    named = {
        "group {}: {} K={} L={}".format(number, row.method.name, *_chains(row)): row for row in rows
    }
    timed = {label: row._replace(observe=observe_accepted) for label, row in named.items()}
    optima = {  # Separate programs, because the optimum takes time.
        f"{label}, alpha*": row._replace(observe=observe_optimum)
        for label, row in named.items()
        if _has_optimum(config, row)
    }
    runs = bench.measure_all(timed, config.seeds, warm_up=True)
    best = bench.measure_all(optima, config.seeds[:1])
    baseline, summaries = next(iter(runs.values())), []
    for label, row in named.items():
        (optimum,) = best.get(f"{label}, alpha*", [None])
        summaries.append(_summary(row, runs[label], optimum, baseline, config.temperature))
    return summaries


def _tick(row: dict[str, Any]) -> str:
    if not row["draft"]:
        return "baseline"
    return f"{row['draft']}\n{row['algorithm']}\nK={row['num_drafts']}\nL={row['draft_length']}"
