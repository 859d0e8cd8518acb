"""Spec-Bench (Xia et al., 2024, arXiv 2401.07851): speedup over the baseline on questions of six
tasks, and where drafts are accepted.

Its protocol is one conversation at a time with the model's chat template, where the second message
follows the model's own answer. The speed of a question is its number of new tokens divided by the
time of its answers, prompts included. The speed of a task is the mean over its questions. The
speedup is the ratio of two such speeds, averaged over runs. The baseline and the methods take
turns.
"""

import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from spectr_jax.data.questions import OVERALL, Question, read_questions, spread
from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.decoding import Method, Policy, get_method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.decoding.policy import check_policy
from spectr_jax.decoding.request import LONG, padded_length
from spectr_jax.experiments import paper
from spectr_jax.experiments.config import spec_bench_config
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.acceptance import observe_positions
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.planning.on_tree import method_of
from spectr_jax.loading.by_name import Trained, check_dtype
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, check_context, freeze
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, write_figure
from spectr_jax.utils.progress import progress

NAME, BASELINE = "spec_bench", "baseline"
PARTS = 8
"""Number of parts of an answer in which acceptance is counted."""


class Setup(NamedTuple):
    """The inputs that all conversations share. `compiled` has the label and the padded prompt
    length of each compiled program."""

    config: ml_collections.ConfigDict
    tokenizer: AnyTokenizer
    target: Frozen
    methods: dict[str, tuple[Method, Frozen | None]]  # By label, with the draft model or table.
    compiled: set[tuple[str, int]]


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Measures all questions, and writes the table to `workdir` as Markdown, JSON and PNG.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, questions, models or workdir are invalid, before any measurement.
    """
    check_spec_bench_config(config)
    methods = {BASELINE: get_method(BASELINE), **{spec: method_of(spec) for spec in config.methods}}
    questions = spread(read_questions(config.questions), config.questions_per_task)
    check_table(config, workdir, NAME)
    fields = {label: _field_of(method) for label, method in methods.items()}
    for field in ("draft", "table"):
        if config[field] not in ("", spec_bench_config()[field]) and field not in fields.values():
            raise UserError(
                f"{field}={config[field]!r}: none of the methods uses one; leave it out"
            )
    names = {label: config[field] if field else "" for label, field in fields.items()}
    used = tuple(dict.fromkeys(filter(None, names.values())))
    target, drafts = load_pair(config.target, used, config.dtype)
    check_room(config, questions, [target, *drafts])
    frozen_target = freeze(target)
    frozen = {"": None, **dict(zip(used, map(freeze, drafts), strict=True))}
    contenders = {label: (method, frozen[names[label]]) for label, method in methods.items()}
    for method, draft in contenders.values():
        method.drafter_for(draft).check(frozen_target, draft)
    setup = Setup(config, target.tokenizer, frozen_target, contenders, set())
    inputs = digest(json.dumps(questions).encode())[:16]
    journal = Journal(workdir, NAME, config, report.weights(target, *drafts), again, inputs)
    rows: list[dict[str, Any]] = []
    with progress(len(config.temperatures) * len(questions), "question") as bar:
        for temperature in dict.fromkeys(config.temperatures):
            measured = []
            for number, question in enumerate(questions):
                entry = f"question {question.identity} at temperature {temperature}"
                bar.set_description(entry)
                measure = functools.partial(measure_question, setup, question, number, temperature)
                measured.append((question.task, journal.get_or_measure(entry, measure)))
                bar.update()
            rows += summaries(temperature, measured)
    title = f"Speedup by task, {target.name}"
    result = {"title": title, "questions": len(questions), "rows": rows}
    return journal.finish(result, markdown, plot)


def _field_of(method: Method) -> str:
    """Returns the field of the config that names a method's draft model or table; "" for none."""
    return "draft" if method.needs_draft else "table" if method.takes_draft else ""


def check_spec_bench_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, spec_bench_config())
    check_positive(config, "max_new_tokens", "runs")
    check_dtype(config.dtype)
    if config.questions_per_task < 0:
        raise UserError(
            f"questions_per_task={config.questions_per_task}: must not be negative; give a number "
            "of questions, or 0 for all"
        )
    for temperature in config.temperatures:
        check_policy(Policy(temperature))
    if not config.questions:
        raise UserError(
            "questions='': names no file; give Spec-Bench's, --config.questions=question.jsonl"
        )


def check_room(
    config: ml_collections.ConfigDict, questions: Sequence[Question], models: Sequence[Trained]
) -> None:
    """Raises `UserError` if the target has no chat template, or a conversation can exceed the
    context of a model."""
    if models[0].tokenizer.template is None:
        raise UserError(
            f"target={config.target!r}: has no chat template, which Spec-Bench needs; give an "
            "instructed model"
        )
    shortest = min(models, key=lambda trained: trained.model.context)
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn in question.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        prompt = models[0].tokenizer.chat(messages[:-1])
        answers = config.max_new_tokens * (len(question.turns) - 1)
        asked = f"max_new_tokens={config.max_new_tokens}, question {question.identity}"
        tokens = _padded(len(prompt) + answers) + config.max_new_tokens
        check_context(asked, tokens, shortest, "lower it, or leave the question out")


def _padded(tokens: int) -> int:
    """Returns the padded length of a prompt. Prompts of at most `LONG` tokens share one program."""
    return padded_length(max(tokens, LONG), LONG)


def measure_question(
    setup: Setup, question: Question, number: int, temperature: float
) -> dict[str, Any]:
    """Returns the results of each method on a question, by label.

    `runs` has the tokens, calls and seconds of each run. `positions` has the sums over all runs of
    the counts of `observe_positions`, by level and by part of an answer.
    """
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in setup.methods}
    positions: dict[str, list[dict[str, list[int]]]] = {label: [] for label in setup.methods}
    for turn in range(setup.config.runs):
        key = jax.random.fold_in(jax.random.key(setup.config.seed), number)
        key = jax.random.fold_in(key, turn)
        for label in setup.methods:
            totals, counts = converse(setup, label, question, temperature, key)
            runs[label].append(totals)
            positions[label].append(counts)
    return {label: {"runs": runs[label], "positions": _summed(positions[label])} for label in runs}


def _summed(counts: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Returns the sums of the counts of each name."""
    return {name: np.sum([one[name] for one in counts], axis=0).tolist() for name in counts[0]}


def converse(
    setup: Setup, label: str, question: Question, temperature: float, key: jax.Array
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Answers the messages of a question in turn by the method `label`. Consumes `key`.

    Returns:
      tokens, calls and seconds, and the counts of `observe_positions` by level and by part of an
      answer.
    """
    tokenizer, new_tokens = setup.tokenizer, setup.config.max_new_tokens
    policy = Policy(temperature, eos=tokenizer.eos)
    messages: list[dict[str, str]] = []
    totals, positions = {"tokens": 0, "calls": 0, "seconds": 0.0}, []
    for number, turn in enumerate(question.turns):
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.chat(messages)
        start, length = len(prompt), _padded(len(prompt))
        tokens = np.zeros((1, length), np.int32)
        tokens[0, :start] = prompt
        method, draft = setup.methods[label]
        decoder = jax.random.fold_in(key, number), method, setup.target, draft
        observe = observe_positions(length + new_tokens)
        arguments: Any = (*decoder, tokens, [start], new_tokens, policy, observe)
        if (label, length) not in setup.compiled:
            lower(*arguments).compile()
            setup.compiled.add((label, length))
        started = time.perf_counter()
        generation = jax.block_until_ready(generate(*arguments))
        totals["seconds"] += time.perf_counter() - started
        new = np.asarray(generation.tokens[0, start : int(generation.lengths[0])]).tolist()
        totals["tokens"] += len(new)
        totals["calls"] += int(generation.target_calls[0])
        positions.append(_by_part(generation.observed, start, new_tokens))
        messages.append({"role": "assistant", "content": tokenizer.decode(new)})
    return totals, _summed(positions)


def _by_part(observed: dict[str, jax.Array], start: int, new_tokens: int) -> dict[str, np.ndarray]:
    """Returns the counts by level, and the counts by position summed over each part of the answer,
    which starts at `start`."""
    counts = {name: np.asarray(values[0]) for name, values in observed.items()}
    edges = start + np.arange(PARTS) * new_tokens // PARTS
    for name in ("calls", "chosen_at", "accepted_at"):
        counts[name] = np.add.reduceat(counts[name][: start + new_tokens], edges)
    return counts


def summaries(temperature: float, measured: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each task and method, and for all questions together.

    `measured` has the task of each question, and what `measure_question` returned.
    """
    rows = []
    for task in (*dict.fromkeys(task for task, _ in measured), OVERALL):
        questions = [question for of_task, question in measured if task in (of_task, OVERALL)]
        speeds = {
            label: _speeds([question[label]["runs"] for question in questions])
            for label in questions[0]
        }
        for label, speed in speeds.items():
            runs = [run for question in questions for run in question[label]["runs"]]
            tokens, calls = (sum(run[name] for run in runs) for name in ("tokens", "calls"))
            ratios = speed / speeds[BASELINE]
            rows.append(
                {
                    "temperature": temperature,
                    "task": task,
                    "questions": len(questions),
                    "method": label,
                    "tokens_per_call": tokens / calls,
                    "tokens_per_second": float(np.mean(speed)),
                    "speedup": float(np.mean(ratios)),
                    "speedup_std": float(np.std(ratios, ddof=1)) if len(ratios) > 1 else 0.0,
                    **_summed([question[label]["positions"] for question in questions]),
                }
            )
    return rows


def _speeds(runs: list[list[dict[str, float]]]) -> np.ndarray:
    """Returns [runs], the mean tokens per second over questions, from [questions][runs]."""
    speeds = [[run["tokens"] / run["seconds"] for run in question] for question in runs]
    return np.mean(speeds, axis=0)


def acceptance_rates(accepted: Sequence[int], reached: Sequence[int]) -> list[float | None]:
    """Returns the share of accepted drafts at each place, None where nothing was drafted."""
    return [yes / every if every else None for yes, every in zip(accepted, reached, strict=True)]


def markdown(result: dict[str, Any]) -> str:
    """Returns the tables with their provenance, as Markdown."""
    config, tables = result["config"], []
    for temperature in config["temperatures"]:
        rows = [row for row in result["rows"] if row["temperature"] == temperature]
        tables += [f"## Temperature {temperature}", _speed_table(rows), _level_table(rows)]
    questions = pathlib.PurePath(config["questions"]).name
    fields = dict.fromkeys(_field_of(method_of(spec)) for spec in config["methods"])
    drafts = "".join(f"{field} `{config[field]}`, " for field in fields if field and config[field])
    header = ["Published for Spec-Bench", "Model, hardware", "Speedup", "Source"]
    cited = [
        [name, model, f"{speed:.2f}", source] for name, model, speed, source in paper.SPEC_BENCH
    ]
    notes = [
        "## Other models, other hardware",
        report.markdown_table(header, cited),
        f"{result['questions']} questions of `{questions}`, in the format and by the protocol of "
        "Spec-Bench (Xia et al., 2024): one conversation at a time, at most "
        f"{config['max_new_tokens']} new tokens per answer. In each of {config['runs']} run(s) the "
        "methods take turns. Speedup is the ratio of the mean tokens per second over questions to "
        "that of the baseline, prompts included, averaged over runs. "
        "Tokens per call count the accepted drafts and one extra token.",
        "Accepted is the acceptance rate: of the tokens that were chosen among drafts of a level, "
        f"the share that are drafts. The picture and `{NAME}.json` have it by part of an answer.",
        f"Target `{config['target']}`, {drafts}{config['dtype']}.",
        report.provenance_line(result),
    ]
    return report.page(result["title"], "\n\n".join(tables), notes)


def _speed_table(rows: list[dict[str, Any]]) -> str:
    labels = [label for label in dict.fromkeys(row["method"] for row in rows) if label != BASELINE]
    header = ["Task", "Questions", "Baseline tokens/s"]
    header += [f"`{label}`: {what}" for label in labels for what in ("tokens/call", "speedup")]
    table = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = {row["method"]: row for row in rows if row["task"] == task}
        baseline = of_task[BASELINE]
        cells = [task, baseline["questions"], f"{baseline['tokens_per_second']:.1f}"]
        for row in (of_task[label] for label in labels):
            cells += [f"{row['tokens_per_call']:.2f}", f"{row['speedup']:.2f}"]
        table.append(cells)
    return report.markdown_table(header, table)


def _level_table(rows: list[dict[str, Any]]) -> str:
    height = max(len(row["reached"]) for row in rows)
    header = ["Task", "Method", *(f"Accepted, level {level}" for level in range(1, height + 1))]
    table = []
    for row in rows:
        if row["method"] != BASELINE:
            accepted = acceptance_rates(row["accepted"], row["reached"])
            accepted += [None] * (height - len(accepted))
            cells = ["-" if share is None else f"{share:.2f}" for share in accepted]
            table.append([row["task"], row["method"], *cells])
    return report.markdown_table(header, table)


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Plots accepted shares by level and by part of an answer, with one row per temperature and
    one line per task."""
    from matplotlib.figure import Figure

    config = result["config"]
    drafting = [row for row in result["rows"] if row["method"] != BASELINE]
    labels = list(dict.fromkeys(row["method"] for row in drafting))
    temperatures = config["temperatures"]
    size = (3.2 * 2 * len(labels), 2.8 * len(temperatures) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(temperatures), 2 * len(labels), squeeze=False, sharey=True)
    for row in drafting:
        line, column = temperatures.index(row["temperature"]), 2 * labels.index(row["method"])
        by_level = "level", row["accepted"], row["reached"]
        by_part = "part of the answer", row["accepted_at"], row["chosen_at"]
        pair = grid[line, column : column + 2]
        for axes, (what, *counts) in zip(pair, (by_level, by_part), strict=True):
            share = np.array(acceptance_rates(*counts), float)  # None becomes NaN.
            places = np.arange(1, len(share) + 1)
            style, width = ("k.-", 2) if row["task"] == OVERALL else (".-", 1)
            # Matplotlib would read formulas between dollars, and hide labels after underscores.
            label = row["task"].replace("$", r"\$")
            label = f" {label}" if label.startswith("_") else label
            axes.plot(places, share, style, linewidth=width, label=label)
            title = f"{row['method']}, temperature {row['temperature']}"
            axes.set(xlabel=what, title=title, ylim=(-0.02, 1.02))
            axes.set_xticks(places)
            axes.title.set_fontsize(8)
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylabel("accepted share")
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    write_figure(path, figure)
