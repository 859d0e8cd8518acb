"""Speed of a real target with drafts of its own, one sequence or several at once: chats and sentences, several temperatures.

    python scripts/dev/compare_drafts.py --draft=drafts/eagle [--method=block:chain:3 ...] [--workdir=results/smollm2/drafts]

Nothing else may run meanwhile. Each round decodes all prompts by each method in turn, from the same keys; prompts are ours.
A round's speed is all new tokens over all seconds, the call on the prompt included; ratios are of one round. A second table
says where the time of a call goes, and how many tokens a call, or which acceptance of each draft, a speed-up would take.
Writes drafts.md and .json.
"""

import functools
import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np
import scipy.optimize
import tqdm
from absl import flags

from spectr_jax import get_method
from spectr_jax.decoding import Method, Policy
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.policy import check_policy
from spectr_jax.decoding.tree import parse
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.call_times import PHASES, call_seconds, phase_timers, timed
from spectr_jax.loading.by_name import Trained
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import freeze
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError

_WORKDIR = flags.DEFINE_string(
    "workdir", "results/smollm2/drafts", "Where the table goes: Markdown and JSON."
)
_TARGET = flags.DEFINE_string(
    "target", "smollm2", "The target model; without a chat template it gets sentences only."
)
_DRAFT = flags.DEFINE_string("draft", None, "Its draft.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Precision of both: float32, bfloat16 or int8.")
_METHODS = flags.DEFINE_multi_string(
    "method",
    ["block:chain:2", "block:chain:3", "block:chain:4", "otm_layer:2x3"],
    "A method and its tree, as in `tree.parse`.",
)
_TEMPERATURES = flags.DEFINE_list("temperatures", ["0", "1"], "Of target and draft.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timed ones, after one that is not.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer(
    "prompts", 8, "Of each kind, the first ones.", lower_bound=1, upper_bound=8
)
_SEQUENCES = flags.DEFINE_integer(
    "sequences", 1, "Decoded at once, all of one kind.", lower_bound=1, upper_bound=8
)
_NEW = flags.DEFINE_integer("max_new_tokens", 64, "The most tokens of a sequence.", lower_bound=1)

CONTEXT = 64
"""Tokens before the calls that are timed by themselves."""
GOAL = 1.5
"""The speed-up that the table of calls asks about."""

CHATS = (
    "Why is the sky blue?",
    "Write three tips for a good night's sleep.",
    "Explain what a bicycle is to a child.",
    "What should I cook with rice, tomatoes and eggs?",
    "Give me a short poem about the sea.",
    "How does a bank make money?",
    "List five animals that live in the forest.",
    "What is the capital of France, and why is it famous?",
)
SENTENCES = (
    "The committee will meet again next week to",
    "In the early morning the old fisherman walked",
    "The university announced on Monday that",
    "A small town in the north of the country",
    "She opened the letter and",
    "The most important thing about water is",
    "After the war, the two brothers",
    "The new law would allow farmers to",
)


def prompts_of(target: Trained) -> dict[str, list[list[int]]]:
    """The tokens of all prompts, by kind."""
    tokenizer, count = target.tokenizer, _PROMPTS.value
    sentences = {"sentences": [tokenizer.prompt(each) for each in SENTENCES[:count]]}
    if tokenizer.template is None:
        return sentences
    return {
        "chats": [tokenizer.chat([{"role": "user", "content": each}]) for each in CHATS[:count]],
        **sentences,
    }


def decoder(method, models, prompts: list[list[int]], policy: Policy):
    """A function of a round: new tokens, calls and seconds of all prompts; the calls are those of
    each sequence."""
    width, lengths = max(map(len, prompts)), np.array([len(prompt) for prompt in prompts])
    padded = np.array([prompt + [0] * (width - len(prompt)) for prompt in prompts], np.int32)

    def run(number: int) -> tuple[int, int, float]:
        keys = jax.vmap(lambda index: jax.random.fold_in(jax.random.key(number), index))(
            np.arange(len(prompts))
        )
        tokens, calls, started = 0, 0, time.perf_counter()
        for first in range(0, len(prompts), _SEQUENCES.value):
            part = slice(first, first + _SEQUENCES.value)
            made = generate(
                keys[part], method, *models, padded[part], lengths[part], _NEW.value, policy
            )
            tokens += int(np.sum(made.lengths - lengths[part]))
            calls += int(np.sum(made.target_calls))
        return tokens, calls, time.perf_counter() - started

    return run


def read_methods() -> dict[str, Method]:
    """The methods that the flags name, by the names of their rows.

    Raises:
      UserError: one that cannot be read.
    """
    found = {}
    for spec in _METHODS.value:
        name, colon, tree = spec.partition(":")
        if not colon:
            raise UserError(f"--method={spec} needs a tree, such as {spec}:chain:3")
        made = on_tree(name, parse(tree))
        if made is None:
            raise UserError(f"--method={spec}: {name} does not draft such a tree; give another")
        if made.exit_layer or not made.tree.size:
            raise UserError(f"--method={spec} does not draft with --draft; give another")
        found[f"{name}, {tree}"] = made
    return found


def read_temperatures() -> list[float]:
    """Those that the flag names.

    Raises:
      UserError: one that is none.
    """
    try:
        found = [float(each) for each in _TEMPERATURES.value]
    except ValueError as error:
        raise UserError(
            f"--temperatures={','.join(_TEMPERATURES.value)} are no numbers ({error}); give 0,1"
        ) from error
    for each in found:
        check_policy(Policy(temperature=each))
    return found


def measure(
    target: Trained, draft: Trained, drafting: dict[str, Method], temperatures: list[float]
) -> list[dict[str, Any]]:
    """All kinds, temperatures and methods; those of one kind and temperature take turns."""
    models = freeze(target), freeze(draft)
    methods = {"baseline": get_method("baseline"), **drafting}
    rows = []
    for (kind, prompts), degrees in itertools.product(prompts_of(target).items(), temperatures):
        policy = Policy(temperature=degrees, eos=target.tokenizer.eos)
        runs = {name: decoder(method, models, prompts, policy) for name, method in methods.items()}
        found: dict[str, list] = {name: [] for name in runs}
        for number in tqdm.trange(
            _ROUNDS.value + 1, desc=f"{kind}, temperature {degrees}", dynamic_ncols=True
        ):
            for name, run in runs.items():
                made = run(number)
                if number:  # The first compiles.
                    found[name].append(made)
        rows += [
            {"kind": kind, "temperature": degrees, "method": name, "rounds": each}
            for name, each in found.items()
        ]
    return rows


def measure_calls(target: Trained, draft: Trained, drafting: dict[str, Method]) -> dict[str, Any]:
    """Milliseconds of the target's call on one token, and of each method's call and its phases,
    each measured by itself."""
    alone = call_seconds(target.model, _SEQUENCES.value, [1], CONTEXT)(1)
    tasks = {
        name: functools.partial(
            phase_timers, method, target.model, draft.model, _SEQUENCES.value, CONTEXT
        )
        for name, method in drafting.items()
    }
    phases = timed("calls", tasks)
    chains = {
        name: method.tree.height
        for name, method in drafting.items()
        if method.tree.height == method.tree.size
    }
    rows = [
        {
            "method": name,
            "levels": chains.get(name, 0),
            "ms": {phase: value * 1e3 for phase, value in seconds.items()},
        }
        for name, seconds in phases.items()
    ]
    return {"alone": alone * 1e3, "rows": rows}


def needed_acceptance(levels: int, tokens: float) -> float | None:
    """The alpha of each draft at which a chain emits this many tokens per call, 1 + alpha + alpha^2 +
    ...; None if none does."""
    if tokens > levels + 1:
        return None
    return scipy.optimize.brentq(
        lambda alpha: sum(alpha**n for n in range(levels + 1)) - tokens, 0.0, 1.0
    )


def costs(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds a call of each method over those of the baseline, as they decoded: the mean over
    kinds and temperatures."""
    seconds = {}
    for row in rows:
        _, calls, spent = np.sum(row["rounds"], axis=0)
        seconds[row["kind"], row["temperature"], row["method"]] = spent / calls
    places = {place[:2] for place in seconds}
    return {
        name: float(
            np.mean([seconds[*place, name] / seconds[*place, "baseline"] for place in places])
        )
        for name in dict.fromkeys(row["method"] for row in rows)
    }


def calls_table(result: dict[str, Any]) -> str:
    """What a call costs and would have to emit, and where its time goes."""
    cells, cost = [], costs(result["rows"])
    for row in result["calls"]["rows"]:
        needed = GOAL * cost[row["method"]]
        alpha = needed_acceptance(row["levels"], max(1.0, needed)) if row["levels"] else None
        cells.append(
            [
                row["method"],
                f"{cost[row['method']]:.2f}",
                f"{needed:.2f}",
                "-" if alpha is None else f"{alpha:.2f}",
            ]
        )
        cells[-1] += [f"{row['ms'][phase]:.1f}" for phase in (*PHASES, "call")]
    header = [
        "method",
        "cost",
        f"tokens for {GOAL} x",
        "alpha for it",
        *(f"{phase}, ms" for phase in (*PHASES, "call")),
    ]
    return (
        f"{report.markdown_table(header, cells)}\n\nCost: the time of a call over one of the "
        "baseline, in the rounds above, "
        "with the call on the prompt spread over them. A method is faster than the baseline if it "
        "emits more tokens a call "
        "than it costs. alpha: what each draft of a chain needs for that speed; - where no alpha "
        "does, and for trees. The "
        f"phases and the whole call are each timed alone, in a loop on the device after {CONTEXT} "
        "tokens; there a call of "
        f"the target on one token takes {result['calls']['alone']:.1f} ms."
    )


def markdown(result: dict[str, Any]) -> str:
    """The tables and their provenance."""
    speeds = {
        (row["kind"], row["temperature"], row["method"]): np.array(
            [made[0] / made[2] for made in row["rounds"]]
        )
        for row in result["rows"]
    }
    cells = []
    for row in result["rows"]:
        place = row["kind"], row["temperature"]
        tokens, calls, _ = np.sum(row["rounds"], axis=0)
        own = speeds[*place, row["method"]]
        ratio = np.median(own / speeds[*place, "baseline"])
        cells.append(
            [row["kind"], f"{row['temperature']:g}", row["method"], f"{tokens / calls:.2f}"]
        )
        cells[-1] += [f"{np.median(own):.1f}", f"{ratio:.2f}"]
    header = ["Prompts", "temperature", "method", "tokens per call", "tokens/s", "x baseline"]
    settings, kinds = result["settings"], {row["kind"] for row in result["rows"]}
    prompts = (
        f"{settings['prompts']} chats and as many" if "chats" in kinds else f"{settings['prompts']}"
    )
    at_once = (
        "one sequence"
        if settings["sequences"] == 1
        else f"{settings['sequences']} sequences at once"
    )
    return (
        f"# {settings['target']} with the draft {pathlib.Path(settings['draft']).name}, "
        f"{at_once}\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        f"{settings['dtype']}; {prompts} beginnings of sentences of ours, up to "
        f"{settings['max_new_tokens']} new tokens each, to the end of the answer; medians of "
        f"{settings['rounds']} rounds in "
        "which all methods take turns, ratios of one round. The call on the prompt is part of the "
        "time, and not of the "
        f"calls.\n\n## What a call costs\n\n{calls_table(result)}\n\n{report.made_by(result)}\n"
    )


def main():
    if _PROMPTS.value % _SEQUENCES.value:
        raise UserError(
            f"--prompts={_PROMPTS.value} is not a multiple of --sequences={_SEQUENCES.value}; "
            "change one"
        )
    started, drafting, temperatures = time.monotonic(), read_methods(), read_temperatures()
    target, (draft,) = load_pair(_TARGET.value, (_DRAFT.value,), _DTYPE.value)
    calls = measure_calls(target, draft, drafting)
    rows = measure(target, draft, drafting, temperatures)
    names = ("target", "draft", "dtype", "prompts", "sequences", "rounds", "max_new_tokens")
    settings = {name: flags.FLAGS[name].value for name in names}
    result = {
        "settings": settings,
        "rows": rows,
        "calls": calls,
        "weights": report.weights(target, draft),
        "seconds": time.monotonic() - started,
        **report.provenance(),
    }
    report.write(pathlib.Path(_WORKDIR.value), "drafts", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
