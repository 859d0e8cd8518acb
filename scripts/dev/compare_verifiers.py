"""Tokens per call of verifiers on the same drafts' trees, prompts and seeds, with standard errors of the differences.

    python scripts/dev/compare_verifiers.py [--methods=spectr,otm_block,otm_layer] [--tree=8x8 ...] [--workdir=results/layer]

Writes results/layer/verifiers.md and .json. Each measured method is kept as soon as it is done: the same command resumes.
The gain of a method over another is the ratio of their tokens per call; its standard error is the bootstrap's over prompts,
in which the seeds of a prompt and both methods stay together.
"""

import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax import cli
from spectr_jax.config import eval_config
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import parse
from spectr_jax.files import write_json, write_whole
from spectr_jax.measure import measurement, report
from spectr_jax.pairs import load_pair

_WORKDIR = flags.DEFINE_string("workdir", "results/layer", "Where the table goes: Markdown and JSON.")
_METHODS = flags.DEFINE_list(
    "methods", ["spectr", "otm_block", "otm_layer"], "To compare; the last is set against the others."
)
_TREES = flags.DEFINE_multi_string(
    "tree",
    ["2x4", "2x8", "4x4", "4x8", "8x4", "8x8"],
    "As in `tree.parse`: 8x4, 4,2,1, chain:8.",
)
_TARGET = flags.DEFINE_string("target", "embedded:20m", "The target model.")
_DRAFTS = flags.DEFINE_list("drafts", ["embedded:2m"], "The draft models.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Precision of all models.")
_PROMPTS = flags.DEFINE_integer("num_prompts", 256, "The first of the embedded prompts.", lower_bound=2)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Each prompt is continued with so many.", lower_bound=1)
_NEW = flags.DEFINE_integer("max_new_tokens", 32, "The most tokens to add to a prompt.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Sequences at once.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and drafts.")
_DRAFT_TEMPERATURE = flags.DEFINE_float("draft_temperature", None, "Of the drafts, if not the same.")


def counts(method, target, draft, prompts, config, seeds: int) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens and calls of each prompt on each seed, [prompts][seeds]."""
    policy, own = measurement.policies_of(config, target.tokenizer.eos)
    tokens, calls = np.zeros((2, prompts.real, seeds), int)
    for seed in range(seeds):
        for batch, (rows, lengths) in enumerate(zip(prompts.tokens, prompts.lengths, strict=True)):
            key = jax.random.fold_in(jax.random.key(seed), batch)
            models = target, draft
            made = generate(key, method, *models, rows, lengths, config.max_new_tokens, policy, draft_policy=own)
            at = slice(batch * len(rows), min((batch + 1) * len(rows), prompts.real))
            tokens[at, seed] = np.asarray(made.lengths - lengths)[: at.stop - at.start]
            calls[at, seed] = np.asarray(made.target_calls)[: at.stop - at.start]
    return tokens.tolist(), calls.tolist()


def gain(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """How many percent more tokens per call, and its standard error."""
    parts = np.array([[np.sum(row[part], axis=1) for part in ("tokens", "calls")] for row in (ours, theirs)])
    weights = np.random.default_rng(0).multinomial(parts.shape[-1], np.full(parts.shape[-1], 1 / parts.shape[-1]), 2_000)

    def ratio(sums):
        return 100 * (sums[0, 0] / sums[0, 1] / (sums[1, 0] / sums[1, 1]) - 1)

    return float(ratio(parts.sum(axis=-1))), float(np.std(ratio(parts @ weights.T), ddof=1))


def markdown(result: dict[str, Any]) -> str:
    """The table and its provenance."""
    names, rows = result["settings"]["methods"], result["rows"]
    cells = []
    for draft, shape in itertools.product(result["settings"]["drafts"], result["settings"]["trees"]):
        found = {row["method"]: row for row in rows if (row["draft"], row["shape"]) == (draft, shape)}
        if not found:
            continue
        per_call = {name: f"{np.sum(row['tokens']) / np.sum(row['calls']):.3f}" for name, row in found.items()}
        ours = found.get(names[-1])
        gains = {name: gain(ours, row) for name, row in found.items()} if ours else {}
        over = [f"{gains[name][0]:+.1f} % ± {gains[name][1]:.1f}" if name in gains else "-" for name in names[:-1]]
        cells.append([draft, shape, *(per_call.get(name, "-") for name in names), *over])
    header = ["Draft", "tree", *names, *(f"over {name}" for name in names[:-1])]
    settings = result["settings"]
    return (  # A dash: the method cannot draft that tree.
        f"# Tokens per call of the target {settings['target']}\n\n{report.markdown_table(header, cells)}\n\n"
        f"{settings['num_prompts']} prompts x {settings['seeds']} seeds, the same for all; up to "
        f"{settings['max_new_tokens']} new tokens, {report.temperatures(settings)}, {settings['dtype']}. `over`: "
        f"`{names[-1]}` against it, ± the standard error of the paired difference (bootstrap over prompts).\n\n"
        f"{report.made_by(result)}\n"
    )


def main():
    workdir = pathlib.Path(_WORKDIR.value)
    config = eval_config()
    config.dtype, config.num_prompts, config.batch_size = _DTYPE.value, _PROMPTS.value, _BATCH.value
    config.max_new_tokens, config.temperature = _NEW.value, _TEMPERATURE.value
    config.draft_temperature = _DRAFT_TEMPERATURE.value
    measurement.check_decoding(config)
    methods = {(name, shape): on_tree(name, parse(shape)) for shape in _TREES.value for name in _METHODS.value}
    target, drafts = load_pair(_TARGET.value, tuple(_DRAFTS.value), _DTYPE.value)
    prompts = measurement.read_prompts(config, target.tokenizer)
    measurement.check_contexts(config, prompts, [target, *drafts])

    names = "target", "drafts", "dtype", "num_prompts", "seeds", "max_new_tokens", "temperature", "draft_temperature"
    settings = {name: flags.FLAGS[name].value for name in names} | {"weights": report.weights(target, *drafts)}
    path = workdir / "verifiers.json"
    rows, spent = report.begun(path, settings)
    workdir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic() - spent
    for name, draft in zip(_DRAFTS.value, drafts, strict=True):
        for (method, shape), made in methods.items():
            if made is None or any((row["draft"], row["method"], row["shape"]) == (name, method, shape) for row in rows):
                continue
            tokens, calls = counts(made, target, draft, prompts, config, _SEEDS.value)
            rows.append({"draft": name, "method": method, "shape": shape, "tokens": tokens, "calls": calls})
            print(f"{name} {method} {shape}: {np.sum(tokens) / np.sum(calls):.3f}", flush=True)
            told = {**settings, "methods": _METHODS.value, "trees": _TREES.value}
            result = {"settings": told, "rows": rows, "seconds": time.monotonic() - started, **report.provenance()}
            write_json(path, result)
            write_whole(workdir / "verifiers.md", markdown(result))
    print((workdir / "verifiers.md").read_text())


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
