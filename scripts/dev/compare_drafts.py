"""Compares the decoding speed of a target with and without its draft, in turns.

    python scripts/dev/compare_drafts.py --draft=smollm2-draft --method=block:chain:1

Nothing else may run meanwhile. In each round every method decodes all prompts from the same keys.
The prompts are beginnings of sentences, and chats if the target has a chat template. Writes
drafts.md and drafts.json.
"""

import itertools
import pathlib
import time
from typing import Any

import jax
import numpy as np
import tqdm
from absl import flags

from spectr_jax import get_method
from spectr_jax.decoding import Method, Policy
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import parse
from spectr_jax.experiments.measure import report
from spectr_jax.loading.by_name import Trained
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError

_WORKDIR = flags.DEFINE_string("workdir", "results/smollm2/drafts", "Where the table goes.")
_TARGET = flags.DEFINE_string("target", "smollm2", "The target model.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft model.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Precision of both: float32, bfloat16 or int8.")
_METHODS = flags.DEFINE_multi_string(
    "method", ["block:chain:1", "block:chain:2"], "A method and its tree; may be repeated."
)
_TEMPERATURES = flags.DEFINE_multi_float(
    "temperature", [0, 1], "Temperature of both models; may be repeated.", lower_bound=0
)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds after a warm-up round.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 8, "Prompts of each kind.", lower_bound=1, upper_bound=8)
_SEQUENCES = flags.DEFINE_integer(
    "sequences", 1, "Sequences decoded at once.", lower_bound=1, upper_bound=8
)
_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 64, "Largest number of new tokens per sequence.", lower_bound=1
)

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
    """Returns the tokens of all prompts, by kind."""
    tokenizer, count = target.tokenizer, _PROMPTS.value
    sentences = {"sentences": [tokenizer.prompt(each) for each in SENTENCES[:count]]}
    if tokenizer.template is None:
        return sentences
    chats = [tokenizer.chat([{"role": "user", "content": each}]) for each in CHATS[:count]]
    return {"chats": chats, **sentences}


def decode(
    method: Method,
    models: tuple[Frozen, Frozen],
    prompts: list[list[int]],
    policy: Policy,
    seed: int,
) -> tuple[int, int, float]:
    """Returns the new tokens, target calls and seconds of all prompts.

    The seconds include the calls on the prompts.
    """
    lengths, numbers = np.array([len(prompt) for prompt in prompts]), np.arange(len(prompts))
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    tokens, calls, started = 0, 0, time.perf_counter()
    for first in range(0, len(prompts), _SEQUENCES.value):
        part = slice(first, first + _SEQUENCES.value)
        inputs = padded[part], lengths[part], _NEW_TOKENS.value, policy
        made = generate(keys[part], method, *models, *inputs)
        tokens += int(np.sum(made.lengths - lengths[part]))
        calls += int(np.sum(made.target_calls))
    return tokens, calls, time.perf_counter() - started


def read_methods() -> dict[str, Method]:
    """Returns the methods that the flags name, by the names of their rows.

    Raises:
      UserError: a method is unknown, has no tree, or does not draft with a model.
    """
    found = {}
    for spec in _METHODS.value:
        name, colon, tree = spec.partition(":")
        if not colon:
            raise UserError(f"--method={spec}: must name a tree, such as {spec}:chain:3")
        method = on_tree(name, parse(tree))
        if method is None or method.exit_layer or not method.tree.size:
            raise UserError(f"--method={spec}: does not draft this tree with --draft; give another")
        found[f"{name}, {tree}"] = method
    return found


def measure(target: Trained, draft: Trained, drafting: dict[str, Method]) -> list[dict[str, Any]]:
    """Returns the rounds of each kind of prompt, temperature and method.

    All methods of one kind and temperature take turns.
    """
    models = freeze(target), freeze(draft)
    methods = {"baseline": get_method("baseline"), **drafting}
    rows = []
    kinds = prompts_of(target).items()
    for (kind, prompts), temperature in itertools.product(kinds, _TEMPERATURES.value):
        policy = Policy(temperature=temperature, eos=target.tokenizer.eos)
        rounds: dict[str, list] = {name: [] for name in methods}
        for seed in tqdm.trange(_ROUNDS.value + 1, desc=f"{kind}, {temperature}"):
            for name, method in methods.items():
                rounds[name].append(decode(method, models, prompts, policy, seed))
        row = {"kind": kind, "temperature": temperature}
        # The first round compiles.
        rows += [{**row, "method": name, "rounds": each[1:]} for name, each in rounds.items()]
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Returns the page with the table and its provenance."""
    cells = []
    for row in result["rows"]:
        tokens, calls, seconds = np.array(row["rounds"]).T
        if row["method"] == "baseline":  # The first row of its kind and temperature.
            base_speed, base_call = tokens / seconds, seconds.sum() / calls.sum()
        speed = tokens / seconds
        figures = (
            tokens.sum() / calls.sum(),
            seconds.sum() / calls.sum() / base_call,
            np.median(speed),
            np.median(speed / base_speed),
        )
        names = [row["kind"], f"{row['temperature']:g}", row["method"]]
        cells.append([*names, *(f"{figure:.2f}" for figure in figures)])
    header = ["Prompts", "Temperature", "Method", "Tokens/call", "Call time", "Tokens/s", "Speedup"]
    settings = result["settings"]
    return report.page(
        f"{settings['target']} with the draft {pathlib.Path(settings['draft']).name}",
        report.markdown_table(header, cells),
        [
            f"{settings['dtype']}, {settings['sequences']} sequences at once, "
            f"{settings['prompts']} prompts of each kind, up to {settings['max_new_tokens']} new "
            f"tokens each. Tokens/s: median of {settings['rounds']} rounds in which all methods "
            "take turns. Speedup: median of the ratios to the baseline within a round. Call time: "
            "time of a call divided by that of the baseline; the call on the prompt counts as time "
            "and not as a call.",
            report.made_by(result),
        ],
    )


def main() -> None:
    if _PROMPTS.value % _SEQUENCES.value:
        raise UserError(f"--sequences={_SEQUENCES.value}: must divide --prompts={_PROMPTS.value}")
    started, drafting = time.monotonic(), read_methods()
    target, (draft,) = load_pair(_TARGET.value, (_DRAFT.value,), _DTYPE.value)
    rows = measure(target, draft, drafting)
    names = ("target", "draft", "dtype", "prompts", "sequences", "rounds", "max_new_tokens")
    result = {
        "settings": {name: flags.FLAGS[name].value for name in names},
        "rows": rows,
        "weights": report.weights(target, draft),
        "seconds": time.monotonic() - started,
        **report.provenance(),
    }
    report.write(pathlib.Path(_WORKDIR.value), "drafts", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
