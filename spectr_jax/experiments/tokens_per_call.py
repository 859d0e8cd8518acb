"""SpecTr Tables 2 and 4: tokens decoded per serial call of the target, by draft model, method, K and L."""

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.config import check_fields, check_positive, config_hash, eval_config, to_json
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import BOS, EOS, PAD, Tokenizer
from spectr_jax.decoding import Method, Policy, generate, get_method
from spectr_jax.decoding.policy import check_policy
from spectr_jax.errors import UserError
from spectr_jax.experiments import acceptance, paper, report
from spectr_jax.experiments.loading import EMBEDDED, Trained, load_pair, shape_name
from spectr_jax.files import write_json, write_whole

NAME = "tokens_per_call"


class Row(NamedTuple):
    """One row of the table, before it is measured."""

    draft: Trained | None
    algorithm: str
    num_drafts: int
    draft_length: int
    method: Method


class Prompts(NamedTuple):
    """Prompts in batches of one shape: [batches, B, T] tokens, [batches, B] lengths; the first `real` of them count."""

    tokens: np.ndarray
    lengths: np.ndarray
    real: int


class Measurement(NamedTuple):
    """One row on one seed, over all prompts.

    Attributes:
      tokens: emitted.
      calls: of the target.
      seconds: taken.
      observed: sums of `acceptance.observe`, if asked for.
    """

    tokens: int
    calls: int
    seconds: float
    observed: dict[str, float]


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures every row of the table, prints it, and writes it to `workdir` as Markdown, JSON and PNG.

    Raises:
      UserError: anything wrong with the config, the models, the prompts or the workdir, before any measurement.
    """
    check_eval_config(config)
    _claim_workdir(config, workdir)
    target, drafts = load_pair(config.target, tuple(config.drafts), config.dtype)
    rows = table_rows(config, drafts)
    prompts = read_prompts(config, target.tokenizer)
    for trained in (target, *drafts):
        if prompts.tokens.shape[-1] + config.max_new_tokens > trained.model.context:
            raise UserError(
                f"prompt_tokens={config.prompt_tokens}, BOS and max_new_tokens={config.max_new_tokens} exceed the context "
                f"{trained.model.context} of {trained.name!r}; shorten one of them"
            )
    policy = Policy(config.temperature, config.top_k, config.top_p, EOS)

    seconds = time.monotonic()
    measured: list[list[Measurement]] = [[] for _ in rows]
    everything = len(prompts.tokens)
    with tqdm.tqdm(total=len(rows) * (len(config.seeds) + 2), unit="run", dynamic_ncols=True) as bar:
        for row in rows:
            bar.set_description(f"compiling {_label(row)}")
            _measure(row, target, prompts, config, policy, seed=0, batches=1)
            bar.update()
        # Seeds outside: the rows that are compared ran close together in time.
        for seed in config.seeds:
            for row, results in zip(rows, measured, strict=True):
                bar.set_description(f"seed {seed}, {_label(row)}")
                results.append(_measure(row, target, prompts, config, policy, seed, everything))
                bar.update()
        nodes = []
        for row in rows:  # The first seed again: what is observed would count in the time.
            bar.set_description(f"acceptance of {_label(row)}")
            nodes.append(_measure(row, target, prompts, config, policy, config.seeds[0], everything, acceptance.observe))
            bar.update()
    result = {
        "title": f"Tokens per serial call of the target {target.name} ({shape_name(target.model.config)})",
        "rows": [_summary(*row, baseline=measured[0]) for row in zip(rows, measured, nodes, strict=True)],
        "prompts": prompts.real,
        "seconds": round(time.monotonic() - seconds, 1),
        "config": to_json(config),
        "config_hash": config_hash(config),
        **report.provenance(),
    }
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / f"{NAME}.md", markdown(result))
    write_json(workdir / f"{NAME}.json", result)
    plot(result, workdir / f"{NAME}.png")
    print(markdown(result))
    return result


def check_eval_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that cannot be evaluated."""
    check_fields(config, eval_config())
    check_positive(config, "prompt_tokens", "num_prompts", "batch_size", "max_new_tokens", "num_drafts", "draft_lengths")
    if config.dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype={config.dtype!r} is not known; give 'float32' or 'bfloat16'")
    check_policy(Policy(config.temperature, config.top_k, config.top_p))
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


def read_prompts(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> Prompts:
    """The first `num_prompts` prompts: BOS and the first pieces of each sentence, in full batches.

    Raises:
      UserError: there are fewer.
    """
    spec = str(EMBEDDED / "prompts.txt") if config.prompts == "embedded" else config.prompts
    sentences = open_sentences(spec, config.tfds_dir or None)
    if len(sentences) < config.num_prompts:
        raise UserError(f"{spec!r} has {len(sentences)} prompts, num_prompts is {config.num_prompts}; lower it")
    batches = -(-config.num_prompts // config.batch_size)
    shape = (batches * config.batch_size, config.prompt_tokens + 1)
    tokens, lengths = np.full(shape, PAD, np.int32), np.ones(shape[0], np.int32)
    tokens[:, 0] = BOS  # Rows that fill the last batch are a bare BOS, and are not counted.
    for index in range(config.num_prompts):
        pieces = tokenizer.encode(sentences[index])[: config.prompt_tokens]
        tokens[index, 1 : len(pieces) + 1] = pieces
        lengths[index] = len(pieces) + 1
    split = (batches, config.batch_size)
    return Prompts(tokens.reshape(*split, -1), lengths.reshape(split), config.num_prompts)


def markdown(result: dict[str, Any]) -> str:
    """The table with its provenance, as Markdown."""
    header = ["Draft", "Algorithm", "K", "L", "Tokens per call", "Paper*", "alpha", "alpha*", "Tokens/s", "x baseline"]
    rows = [
        [
            row["draft"] or "-",
            row["algorithm"],
            str(row["num_drafts"] or "-"),
            str(row["draft_length"] or "-"),
            f"{row['tokens_per_call']:.2f} ± {row['tokens_per_call_std']:.2f}",
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
        f"each, batch {config['batch_size']}, temperature {config['temperature']}; mean ± standard deviation over "
        f"{len(config['seeds'])} seeds {tuple(config['seeds'])}; tokens/s over the batch, x baseline in the same run.",
        "*Paper: SpecTr (Sun et al., 2023), Table 4, same draft size with its 97M target on LM1B; a figure to look at, not "
        "to match, where models or data differ.",
        "alpha: share of the nodes at which the token was a draft; alpha*: the mean of the most that any plan can reach at "
        f"the same nodes with as many drafts (optimal transport, SpecTr section 5); both on seed {config['seeds'][0]}.",
        f"Target `{config['target']}`, drafts {', '.join(f'`{draft}`' for draft in config['drafts'])}, prompts "
        f"`{config['prompts']}`.",
        f"Made by `{result['command']}` (config {result['config_hash']}, commit {result['commit'][:12]}, jax "
        f"{result['jax']}) on {result['hardware']} in {result['seconds']:.0f} s.",
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


def _measure(
    row: Row,
    target: Trained,
    prompts: Prompts,
    config: ml_collections.ConfigDict,
    policy: Policy,
    seed: int,
    batches: int,
    observe: Callable | None = None,
) -> Measurement:
    tokens = calls = 0
    observed: dict[str, float] = {}
    draft_model = row.draft.model if row.draft else None
    size = config.batch_size
    started = time.monotonic()
    for batch in range(batches):
        # A key a prompt, whatever the batch size.
        indices = np.arange(batch * size, (batch + 1) * size)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), indices)
        generation = generate(
            keys,
            row.method,
            target.model,
            draft_model,
            prompts.tokens[batch],
            prompts.lengths[batch],
            config.max_new_tokens,
            policy,
            observe,
        )
        real = indices < prompts.real
        tokens += int(np.sum((np.asarray(generation.lengths) - prompts.lengths[batch])[real]))
        calls += int(np.sum(np.asarray(generation.target_calls)[real]))
        for name, values in (generation.observed or {}).items():
            observed[name] = observed.get(name, 0.0) + float(np.sum(np.asarray(values)[real]))
    return Measurement(tokens, calls, time.monotonic() - started, observed)


def _summary(row: Row, results: list[Measurement], nodes: Measurement, baseline: list[Measurement]) -> dict[str, Any]:
    per_call = [result.tokens / result.calls for result in results]
    speeds = np.array([result.tokens / result.seconds for result in results])
    baseline_speeds = np.array([result.tokens / result.seconds for result in baseline])
    draft = shape_name(row.draft.model.config) if row.draft else None
    return {
        "draft": draft,
        "algorithm": row.algorithm,
        "num_drafts": row.num_drafts,
        "draft_length": row.draft_length,
        "tokens_per_call": float(np.mean(per_call)),
        "tokens_per_call_std": float(np.std(per_call, ddof=1)) if len(per_call) > 1 else 0.0,
        "tokens_per_call_by_seed": per_call,
        "acceptance": nodes.observed["accepted"] / nodes.observed["nodes"] if row.draft else None,
        "optimal_acceptance": nodes.observed["optimum"] / nodes.observed["nodes"] if row.draft else None,
        "nodes": int(nodes.observed["nodes"]),
        "paper": 1.0 if not row.draft else paper.TOKENS_PER_CALL.get(draft or "", {}).get(row[1:4]),
        "tokens_per_second": float(np.median(speeds)),
        "speedup": float(np.median(speeds / baseline_speeds)),
    }


def _claim_workdir(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
    path = workdir / f"{NAME}.json"
    if not path.exists():
        return
    try:
        theirs = json.loads(path.read_text())["config_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r} is not a table of ours; choose a new --workdir") from error
    if theirs != config_hash(config):
        raise UserError(
            f"workdir {str(workdir)!r} holds the table of another config ({theirs}, this one is {config_hash(config)}); "
            "choose a new --workdir"
        )


def _label(row: Row) -> str:
    return f"{row.algorithm} K={row.num_drafts} L={row.draft_length}" if row.draft else row.algorithm


def _tick(row: dict[str, Any]) -> str:
    if not row["draft"]:
        return "baseline"
    return f"{row['draft']}\n{row['algorithm']}\nK={row['num_drafts']}\nL={row['draft_length']}"
