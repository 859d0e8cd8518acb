"""Tokens per call of all verifiers on many trees of the same number of nodes, on the same calls and drafts.

    python scripts/dev/compare_trees.py [--workdir=results/layer]

Writes results/layer/trees.md, .json and .png. One run for each drafting rule drafts a tree that has all the others as parts,
and every walk is run on its part of each call (`measure.replay`). A method's figure is the mean over the calls, and its
standard error the bootstrap's over prompts. Each method is kept as soon as it is done: the same command resumes.
"""

import pathlib
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax import cli
from spectr_jax.config import eval_config
from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import Tree, parse
from spectr_jax.errors import UserError
from spectr_jax.figures.base import Figure, Series, plot
from spectr_jax.files import write_json, write_whole
from spectr_jax.measure import measurement, report
from spectr_jax.measure.replay import covering, observe_replays
from spectr_jax.pairs import load_pair

TREES = (
    *("1x8", "2x4", "4x2", "8", "2,2"),
    *("1x16", "2x8", "4x4", "2,2,1,1"),
    *("4x8", "8x4", "2,2,1,1,1,1,1,1", "4,2,1,1"),
    *("8x8", "4x16", "16x4", "4,2,1,1,1,1,1,1", "2,2,2,1,1,1,1,1"),
)

_WORKDIR = flags.DEFINE_string("workdir", "results/layer", "Where the table goes: Markdown, JSON and PNG.")
_METHODS = flags.DEFINE_list(
    "methods",
    ["spectr", "otm", "otm_block", "gbv", "gbv_conditional", "otm_layer", "gsd", "traversal"],
    "Of i.i.d. drafts, or of ones without replacement.",
)
_TREES = flags.DEFINE_multi_string("tree", list(TREES), "As in `tree.parse`: 8x4, 4,2,1, chain:8.")
_TARGET = flags.DEFINE_string("target", "embedded:20m", "The target model.")
_DRAFT = flags.DEFINE_string("draft", "embedded:2m", "The draft model.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Precision of both.")
_PROMPTS = flags.DEFINE_integer("num_prompts", 128, "The first of the embedded prompts.", lower_bound=2)
_NEW = flags.DEFINE_integer("max_new_tokens", 32, "The most tokens to add to a prompt.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 16, "Sequences at once.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and drafts.")
_DRAFT_TEMPERATURE = flags.DEFINE_float("draft_temperature", None, "Of the drafts, if not the same.")


def measured(name: str, trees: dict[str, Tree], target, draft, prompts, config) -> dict[str, Any]:
    """Tokens [prompts] by tree, and calls [prompts], of a method's walks along the calls of one method of its rule."""
    methods = {spec: on_tree(name, tree) for spec, tree in trees.items()}
    replayed = {spec: method for spec, method in methods.items() if method is not None}
    along = "gsd" if get_method(name).verifier.rule == "without_replacement" else "otm_block"
    method = get_method(along, tree=covering(trees.values()))
    policy, own = measurement.policies_of(config, target.tokenizer.eos)
    observe = observe_replays(tuple(replayed.values()))
    tokens, calls = [], []
    for batch, (rows, lengths) in enumerate(zip(prompts.tokens, prompts.lengths, strict=True)):
        key, models = jax.random.fold_in(jax.random.key(0), batch), (target, draft)
        made = generate(key, method, *models, rows, lengths, config.max_new_tokens, policy, observe, draft_policy=own)
        tokens.append(np.asarray(made.observed["emitted"]))
        calls.append(np.asarray(made.observed["calls"]))
    emitted, number = np.concatenate(tokens)[: prompts.real], np.concatenate(calls)[: prompts.real]
    by_tree = {spec: emitted[:, index].tolist() for index, spec in enumerate(replayed)}
    return {"method": name, "tokens": by_tree, "calls": number.tolist()}


def per_call(tokens: list[int], calls: list[int]) -> tuple[float, float]:
    """Tokens per call and the standard error."""
    parts = np.array([tokens, calls])
    weights = np.random.default_rng(0).multinomial(len(calls), np.full(len(calls), 1 / len(calls)), 2_000)
    sums = parts @ weights.T
    return float(parts[0].sum() / parts[1].sum()), float(np.std(sums[0] / sums[1], ddof=1))


def markdown(result: dict[str, Any]) -> str:
    """The table and its provenance."""
    settings, rows = result["settings"], {row["method"]: row for row in result["rows"]}
    cells = []
    for spec in sorted(settings["trees"], key=lambda spec: parse(spec).size):
        found = {name: per_call(row["tokens"][spec], row["calls"]) for name, row in rows.items() if spec in row["tokens"]}
        shown = (f"{found[name][0]:.2f} ± {found[name][1]:.2f}" if name in found else "-" for name in rows)
        cells.append([str(parse(spec).size), f"({spec})", *shown])
    return (
        f"# Tokens per call by tree: {settings['draft']} drafts for {settings['target']}\n\n"
        f"{report.markdown_table(['nodes', 'tree', *(f'`{name}`' for name in rows)], cells)}\n\n"
        f"{settings['num_prompts']} prompts, up to {settings['max_new_tokens']} new tokens, "
        f"{report.temperatures(settings)}, {settings['dtype']}; ± the standard error (bootstrap over prompts). KxL: K "
        "chains of L drafts; a dash: the method cannot draft that tree. i.i.d. verifiers saw the same calls and drafts, so "
        "their differences are more certain than their standard errors say; `gsd` and `traversal` saw others.\n\n"
        f"{report.made_by(result)}\n"
    )


def figure(result: dict[str, Any]) -> Figure:
    """For each size the best tree of at most that many nodes."""
    series, sizes = [], sorted({parse(spec).size for spec in result["settings"]["trees"]})
    for row in result["rows"]:
        points = {spec: per_call(tokens, row["calls"]) for spec, tokens in row["tokens"].items()}
        best = [max((points[spec] for spec in points if parse(spec).size <= size), default=None) for size in sizes]
        known = [(size, point) for size, point in zip(sizes, best, strict=True) if point is not None]
        series.append(Series(row["method"], [size for size, _ in known], [point[0] for _, point in known]))
    caption = f"The best tree of at most N nodes; {result['settings']['draft']} drafts for {result['settings']['target']}"
    return Figure("Tokens per call", caption, "drafted tokens N", ("tokens per call",), series, ("log", "linear"))


def main():
    workdir, config = pathlib.Path(_WORKDIR.value), eval_config()
    config.dtype, config.num_prompts, config.batch_size = _DTYPE.value, _PROMPTS.value, _BATCH.value
    config.max_new_tokens, config.temperature = _NEW.value, _TEMPERATURE.value
    config.draft_temperature = _DRAFT_TEMPERATURE.value
    measurement.check_decoding(config)
    trees = {spec: parse(spec) for spec in _TREES.value}
    for name in _METHODS.value:
        if all(on_tree(name, tree) is None for tree in trees.values()):
            raise UserError(f"--methods has {name!r}, which can draft none of the trees; leave it out")
        observe_replays((get_method(name),))
    target, (draft,) = load_pair(_TARGET.value, (_DRAFT.value,), _DTYPE.value)
    prompts = measurement.read_prompts(config, target.tokenizer)
    measurement.check_contexts(config, prompts, [target, draft])

    names = ("target", "draft", "dtype", "num_prompts", "max_new_tokens", "temperature", "draft_temperature")
    settings = {name: flags.FLAGS[name].value for name in names}
    settings |= {"trees": _TREES.value, "weights": report.weights(target, draft)}
    path = workdir / "trees.json"
    rows, spent = report.begun(path, settings)
    started = time.monotonic() - spent
    workdir.mkdir(parents=True, exist_ok=True)
    for name in _METHODS.value:
        if any(row["method"] == name for row in rows):
            continue
        rows.append(measured(name, trees, target, draft, prompts, config))
        print(f"{name} done after {time.monotonic() - started:,.0f} s", flush=True)
        result = {"settings": settings, "rows": rows, "seconds": time.monotonic() - started, **report.provenance()}
        write_json(path, result)
        write_whole(workdir / "trees.md", markdown(result))
        plot(figure(result), workdir / "trees.png")
    print((workdir / "trees.md").read_text())


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
