"""Methods compared on the same i.i.d. drafts: paths that branch at the root or later.

In each call K paths of L tokens are drafted. They share their first tokens, the stem, and branch
once after it, as in delayed tree expansion (Thomas et al., 2026, arXiv 2602.16994). All methods
choose from the same drafts, and from those of the first K' < K paths. The choice of the first
method continues the sequence, and the tokens of all choices are counted.

On trees of two levels, with distributions limited to `SUPPORT` tokens, methods are also compared
with the best exact verifier (`planning.optimum`).
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from spectr_jax.decoding import Call, Method, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.policy import ends
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree, prefix_tree
from spectr_jax.decoding.verifiers import Selection, base
from spectr_jax.experiments.config import frontier_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Contender
from spectr_jax.experiments.planning.on_tree import on_tree
from spectr_jax.experiments.planning.optimum import most_tokens
from spectr_jax.loading.by_name import shape_name
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel
from spectr_jax.transport import rules
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "frontier"
SUPPORT = 3
"""The number of tokens to which distributions are limited for the comparison with the optimum."""
SMALL = {"draft_length": 2, "stems": (0, 1), "paths": (2, 3)}
"""The trees of that comparison."""


class Part(NamedTuple):
    """Method `name` on the first paths of the drafted tree."""

    name: str
    paths: int
    method: Method


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Counts the tokens of each method on all trees, and writes the tables to `workdir`.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_frontier_config(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))
    weights = report.weights(target, draft)
    journal = Journal(workdir, NAME, config, weights, again, prompts.digest())
    bench = Bench(config, target, [draft], prompts, journal)
    benches = [
        bench._replace(config=_with_policy(config, temperature, top_p))
        for temperature, top_p in config.policies
    ]
    rows = []
    for each, stem in itertools.product(benches, config.stems):
        rows += _measured_rows(each, stem)
        jax.clear_caches()  # The number of programs a process can hold is limited.
    small = [
        row
        for each in benches
        for row in journal.get_or_measure(
            f"optimum, {_spelled(each.config)}", functools.partial(_optimum_rows, each)
        )
    ]
    result = {
        "title": f"Methods on the same i.i.d. drafts: {shape_name(draft)} drafts for {target.name}",
        "rows": rows,
        "optimum": small,
        "prompts": prompts.real,
    }
    return journal.finish(result, markdown)


def check_frontier_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, frontier_config())
    check_positive(config, "paths", "draft_length", "contexts", "calls")
    if config.contexts > config.num_prompts:
        raise UserError(
            f"contexts={config.contexts}: must not exceed num_prompts={config.num_prompts}; lower it"
        )
    for policy in config.policies:
        if len(policy) != 2:
            raise UserError(
                f"policies={policy}: must be a temperature and top-p, such as (1.0, 0.9)"
            )
        each = _with_policy(config, *policy)
        measurement.check_decoding(each)
        if not measurement.policies_of(each, -1)[1].temperature:
            raise UserError(
                f"policies={policy}: greedy drafts are all equal; give a positive temperature"
            )
    for stem in config.stems:
        if not 0 <= stem < config.draft_length:
            raise UserError(
                f"stems={stem}: must be below draft_length={config.draft_length}; lower it"
            )
    for name in config.methods:
        if get_method(name).verifier.rule != rules.IID or not get_method(name).needs_draft:
            raise UserError(f"methods={name!r}: does not choose among i.i.d. drafts; leave it out")
    if on_tree(config.methods[0], _tree(config, 1, 2)) is None:
        raise UserError(
            f"methods={config.methods[0]!r}: does not draft trees with a stem, so it cannot "
            "continue the sequences; give another one first"
        )


def _with_policy(
    config: ml_collections.ConfigDict, temperature: float, top_p: float
) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(
        {**config.to_dict(), "temperature": temperature, "top_p": top_p}
    )


def _spelled(config: ml_collections.ConfigDict) -> str:
    return f"temperature {config.temperature}, top-p {config.top_p}"


def _tree(config: ml_collections.ConfigDict, stem: int, paths: int) -> Tree:
    """Returns `paths` paths of `draft_length` tokens that branch after `stem` tokens."""
    return prefix_tree(*[1] * stem, paths, *[1] * (config.draft_length - stem - 1))


def parts_of(config: ml_collections.ConfigDict, stem: int) -> tuple[Part, ...]:
    """Returns all methods on all numbers of paths; those that cannot draft such trees are absent."""
    parts = []
    for name, paths in itertools.product(config.methods, sorted(config.paths)):
        method = on_tree(name, _tree(config, stem, paths))
        if method is not None:
            parts.append(Part(name, paths, method))
    return tuple(parts)


@functools.cache
def observe_choices(methods: tuple[Method, ...]) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` that gives the drafts of a call to several methods.

    Args:
      methods: methods whose trees are the first paths of the drafted tree.

    Returns:
      A function that returns `emitted` [methods], the tokens up to EOS that each method chooses.
    """

    def emitted(call: Call) -> jax.Array:
        counts = []
        for index, method in enumerate(methods):
            key = jax.random.fold_in(call.key, index)
            chosen = method.verifier(key, first_paths(call.scored, method.tree))
            counts.append(_until_eos(chosen, call.eos))
        return jnp.stack(counts)

    def observe(call: Call) -> dict[str, jax.Array]:
        in_turn = base.in_turn(call.scored.vocab_size)  # Of sequences, as in `base.for_each_row`.
        count = jax.custom_batching.sequential_vmap(emitted) if in_turn else emitted
        return {"emitted": count(call)}

    return observe


def _until_eos(chosen: Selection, eos: jax.Array) -> jax.Array:
    is_eos = ends(chosen.tokens, eos)
    kept = (jnp.arange(len(chosen.tokens)) < chosen.emitted) & (jnp.cumsum(is_eos) - is_eos == 0)
    return jnp.sum(kept, dtype=jnp.int32)


def first_paths(scored: ScoredTree, tree: Tree) -> ScoredTree:
    """Returns the part of a scored tree that is `tree`: the first nodes of each level."""
    levels = zip(scored.tree.levels, tree.levels, strict=True)
    nodes = np.concatenate([all_nodes[: len(some)] for all_nodes, some in levels])
    ranks = scored.tree.inner_rank[nodes[tree.inner]]
    return dataclasses.replace(
        scored,
        tree=tree,
        tokens=scored.tokens[nodes],
        p=scored.p[ranks],
        logits=scored.logits[nodes],
    )


def _measured_rows(bench: Bench, stem: int) -> list[dict[str, Any]]:
    """Returns a row of the table for each number of paths."""
    config, parts = bench.config, parts_of(bench.config, stem)
    widest = next(part.method for part in parts if part.paths == max(config.paths))
    observe = observe_choices(tuple(part.method for part in parts))
    label = f"{_spelled(config)}, stem {stem}"
    contender = Contender(widest, bench.drafts[0], observe)
    (runs,) = bench.measure_all({label: contender}, config.seeds).values()
    per_call = np.array([run.observed["emitted"] / run.calls for run in runs])  # [seeds, parts]
    rows = []
    for paths in sorted(config.paths):
        tokens = {
            part.name: per_call[:, index].tolist()
            for index, part in enumerate(parts)
            if part.paths == paths
        }
        rows.append(
            {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "stem": stem,
                "paths": paths,
                "nodes": _tree(config, stem, paths).size,
                "calls": sum(run.calls for run in runs),
                "tokens_per_call_by_seed": tokens,
            }
        )
    return rows


class Limited(NamedTuple):
    """Distributions [contexts, 1 + SUPPORT, SUPPORT] of the draft's likeliest tokens, after a
    context and after the context with each of these tokens."""

    p: np.ndarray
    q: np.ndarray


def observe_limited(call: Call) -> dict[str, jax.Array]:
    """Returns the distributions of `Limited`, on a tree of all `SUPPORT` tokens on two levels."""
    scored = call.scored
    rows = [
        (scored.p_of(rank)[tokens], scored.q(node)[tokens])
        for rank, node in enumerate(scored.tree.inner.tolist())
        for tokens in [scored.tokens[scored.tree.children_table[node]]]
    ]
    return {name: jnp.stack(some) for name, some in zip("pq", zip(*rows, strict=True), strict=True)}


def _limited(bench: Bench) -> Limited:
    """Returns the distributions after the first `contexts` prompts."""
    config, (draft,) = bench.config, bench.drafts
    everything = get_method("gsd", tree=prefix_tree(SUPPORT, SUPPORT))
    policies = [
        dataclasses.replace(policy, top_k=SUPPORT)
        for policy in measurement.policies_of(config, bench.target.tokenizer.eos)
    ]
    tokens, lengths = (
        array.reshape(-1, *array.shape[2:])[: config.contexts] for array in bench.prompts[:2]
    )
    generation = generate(
        jax.random.key(0),
        everything,
        freeze(bench.target),
        freeze(draft),
        tokens,
        lengths,
        1,
        policies[0],
        draft_policy=policies[1],
        observe=observe_limited,
    )
    return Limited(**jax.tree.map(np.asarray, generation.observed))


def tables_of(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns draft and target as tables of a `TableModel`, from the rows of one context.

    Token `SUPPORT` stands for all other tokens, and token `SUPPORT` + 1 is the context.
    """
    size = SUPPORT + 2
    draft, target = np.full((2, size, size, size), 1 / size)
    for table, rows in ((draft, p), (target, q)):
        whole = np.zeros((1 + SUPPORT, size))
        whole[:, :SUPPORT] = rows
        whole[:, SUPPORT] = np.maximum(1 - rows.sum(axis=1), 0)
        table[-1, [size - 1, *range(SUPPORT)]] = whole / whole.sum(axis=1, keepdims=True)
    return draft, target


def _optimum_rows(bench: Bench) -> list[dict[str, Any]]:
    """Returns for each small tree the optimum, and the tokens of each method, by context."""
    limited, config = _limited(bench), ml_collections.ConfigDict(bench.config.to_dict())
    config.update(SMALL)
    pairs = [tables_of(p, q) for p, q in zip(*limited, strict=True)]
    rows = []
    for stem in config.stems:
        parts = parts_of(config, stem)
        counts = np.array([_simulated(config, parts, *pair) for pair in pairs])
        for paths in config.paths:
            tree = _tree(config, stem, paths)
            best = [
                most_tokens(_from_table(draft), _from_table(target), tree)
                for draft, target in pairs
            ]
            tokens = {"optimum": best}
            for index, part in enumerate(parts):
                if part.paths == paths:
                    tokens[part.name] = counts[:, index].tolist()
            policy = {"temperature": config.temperature, "top_p": config.top_p}
            rows.append({**policy, "stem": stem, "paths": paths, "tokens_per_call": tokens})
    return rows


def _from_table(table: np.ndarray) -> Callable[[tuple[int, ...]], np.ndarray]:
    context = len(table) - 1
    return lambda sequence: table[tuple((context, context, *sequence)[-2:])]


def _simulated(
    config: ml_collections.ConfigDict,
    parts: tuple[Part, ...],
    draft: np.ndarray,
    target: np.ndarray,
) -> np.ndarray:
    """Returns the mean tokens of one call [parts]; all parts choose from the same drafts."""
    widest, context = max(parts, key=lambda part: part.paths).method, len(target) - 1
    models = freeze(TableModel(jnp.asarray(target))), freeze(TableModel(jnp.asarray(draft)))
    prompts, lengths = np.full((config.calls, 2), context), np.full(config.calls, 2)
    observe = observe_choices(tuple(part.method for part in parts))
    generation = generate(jax.random.key(0), widest, *models, prompts, lengths, 1, observe=observe)
    return np.mean(generation.observed["emitted"], axis=0)


def markdown(result: dict[str, Any]) -> str:
    """Returns both tables with their provenance, as Markdown."""
    config = result["config"]
    policy: report.Columns = {
        "Temperature": lambda row: row["temperature"],
        "Top-p": lambda row: row["top_p"],
    }
    columns: report.Columns = {
        **policy,
        "Stem": lambda row: row["stem"],
        "Paths": lambda row: row["paths"],
        "Nodes": lambda row: row["nodes"],
        **{f"`{name}`": functools.partial(_mean, name) for name in config["methods"]},
    }
    shares: report.Columns = {
        **policy,
        "Stem": lambda row: row["stem"],
        "Paths": lambda row: row["paths"],
        "Optimum": lambda row: f"{np.mean(row['tokens_per_call']['optimum']):.3f}",
        **{f"`{name}`": functools.partial(_share, name) for name in config["methods"]},
    }
    spread = ""
    if len(config["seeds"]) > 1:
        rows = [row["tokens_per_call_by_seed"] for row in result["rows"]]
        largest = max(np.std(cell, ddof=1) for row in rows for cell in row.values())
        spread = f"; the largest standard deviation over seeds is {largest:.2f}"
    first, widest = config["methods"][0], max(config["paths"])
    notes = [
        f"Tokens per call. {widest} paths of {config['draft_length']} tokens share their first "
        "tokens, the stem, and branch once. All methods choose from the same drafts, and from "
        f"those of the first paths. The choices of `{first}` among {widest} paths continue the "
        "sequences, so all methods see its contexts. A dash: the method does not draft that tree.",
        f"{result['prompts']} prompts of up to {config['prompt_tokens']} tokens, up to "
        f"{config['max_new_tokens']} new tokens each, {config['dtype']}, seeds "
        f"{tuple(config['seeds'])}{spread}.",
        "## Share of the optimum",
        report.table(shares, result["optimum"]),
        f"Paths of {SMALL['draft_length']} tokens. Mean over {config['contexts']} contexts, with "
        f"both distributions limited to their {SUPPORT} likeliest tokens. The optimum over all "
        f"exact verifiers is by linear program, the methods by {config['calls']:,} simulated calls "
        "for each context, so shares slightly above 100 % are noise.",
        f"Target `{config['target']}`, draft `{config['draft']}`, prompts `{config['prompts']}`.",
        report.provenance_line(result),
    ]
    return report.page(result["title"], report.table(columns, result["rows"]), notes)


def _mean(name: str, row: dict[str, Any]) -> str:
    values = row["tokens_per_call_by_seed"].get(name)
    return report.number(None if values is None else float(np.mean(values)), ".2f")


def _share(name: str, row: dict[str, Any]) -> str:
    tokens = row["tokens_per_call"]
    if name not in tokens:
        return "-"
    return f"{100 * np.mean(tokens[name]) / np.mean(tokens['optimum']):.1f} %"
