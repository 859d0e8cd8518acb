"""Fits the log-odds by which `decoding.drafters.recall` ranks its candidates.

    python scripts/dev/fit_recall.py --questions=question.jsonl --count=144

The target answers the questions at two temperatures. At each token of an answer, the candidates are
those that `Recall` would have; a logistic regression on the length of the match, whether it is the
best one, and the rank in the table predicts which of them comes next. It is fitted on every other
question; the others test it. It prints the constants, and how often the best one, two and four
candidates contain the next token. 144 questions take half an hour on two cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from spectr_jax.data.questions import read_questions
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.drafters.recall import MATCHED, RANKED
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.request import LONG, padded_length
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.utils import cli

_TARGET = flags.DEFINE_string("target", "smollm2", "The target, with a chat template.")
_TABLE = flags.DEFINE_string("table", "smollm2-bigram", "Its table.")
_QUESTIONS = flags.DEFINE_string("questions", None, "Spec-Bench's file.", required=True)
_COUNT = flags.DEFINE_integer("count", 144, "Number of questions, evenly spaced.", lower_bound=2)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "New tokens per answer.", lower_bound=1)

LONGEST, RANKS, COPIES = len(MATCHED) - 1, len(RANKED), 2
TEMPERATURES = (0.0, 1.0)


@jax.jit
def likeliest(target: Frozen, tokens: jax.Array) -> jax.Array:
    """Returns the target's likeliest tokens [T, RANKS] after each of `tokens` [1, T]."""
    model, T = target.merge(), tokens.shape[1]
    visible = jnp.tril(jnp.ones((1, T, T), bool))
    hidden, _ = model.hidden(tokens, jnp.arange(T)[None], visible)
    return jax.lax.map(lambda x: jax.lax.top_k(model.logits_of(x), RANKS)[1], hidden[0])


def candidates(
    tokens: np.ndarray, end: int, ranked: list[int]
) -> list[tuple[int, tuple[int, int, int]]]:
    """Returns tokens that may come at `end`, each with (match, number of the copy, rank).

    A match of 0 and copy 0 mean that it is not copied; rank `RANKS` that it is not in the table.
    """
    places, matches = np.arange(1, end), np.zeros(end - 1, int)
    agree = np.ones(end - 1, bool)
    for back in range(1, min(LONGEST, end) + 1):
        agree &= (places >= back) & (tokens[np.maximum(places - back, 0)] == tokens[end - back])
        matches += agree
    found: dict[int, tuple[int, int, int]] = {}
    for place in np.lexsort((-places, -matches)):
        token = int(tokens[places[place]])
        if not matches[place] or len(found) == COPIES:
            break
        rank = ranked.index(token) if token in ranked else RANKS
        found.setdefault(token, (int(matches[place]), len(found) + 1, rank))
    for rank, token in enumerate(ranked):
        found.setdefault(token, (0, 0, rank))
    return list(found.items())


def features(about: tuple[int, int, int]) -> np.ndarray:
    """Returns the one-hot features of a candidate."""
    sizes = LONGEST + 1, COPIES + 1, RANKS + 1
    return np.concatenate([np.eye(size)[value] for size, value in zip(sizes, about, strict=True)])


def samples(target, table, tokens: np.ndarray, start: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the features of the candidates at each place of an answer, and which comes next."""
    length = padded_length(len(tokens))
    padded = np.pad(tokens, (0, length - len(tokens)))[None]
    top, ranks = np.asarray(likeliest(target, padded)), table.copy()
    rows = []
    for end in range(start, len(tokens)):
        if end > start:
            ranks[tokens[end - 2]] = top[end - 2]
        found = candidates(tokens, end, ranks[tokens[end - 1]].tolist())
        is_next = np.array([token == tokens[end] for token, _ in found])
        rows.append((np.stack([features(about) for _, about in found]), is_next))
    return rows


def fitted(rows: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns the weights of a logistic regression, with a prior of variance 1."""
    X, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    weights = np.zeros(X.shape[1])
    for _ in range(30):  # Newton's method.
        p = 1 / (1 + np.exp(-X @ weights))
        curvature = (X * (p * (1 - p))[:, None]).T @ X + np.eye(len(weights))
        weights += np.linalg.solve(curvature, X.T @ (y - p) - weights)
    return weights


def main():
    target, (table,) = load_pair(_TARGET.value, (_TABLE.value,), "int8")
    frozen, tokenizer = freeze(target), target.tokenizer
    start_table = np.asarray(table.model.tokens[...])[:, :RANKS].astype(int)
    questions = read_questions(_QUESTIONS.value)
    chosen = np.linspace(0, len(questions) - 1, _COUNT.value).astype(int)
    halves: list[list] = [[], []]
    for number, index in enumerate(tqdm.tqdm(chosen, unit="question")):
        prompt = tokenizer.chat([{"role": "user", "content": questions[index].turns[0]}])
        padded = np.pad(prompt, (0, padded_length(len(prompt), LONG) - len(prompt)))[None]
        for temperature in TEMPERATURES:
            key, policy = jax.random.key(number), Policy(temperature, eos=tokenizer.eos)
            method = get_method("recycle")
            rest = padded, [len(prompt)], _NEW.value, policy
            answer = generate(key, method, frozen, freeze(table), *rest)
            tokens = np.asarray(answer.tokens[0, : int(answer.lengths[0])])
            halves[number % 2] += samples(frozen, start_table, tokens, len(prompt))
    weights = fitted(halves[0])
    matched, copied, ranked = np.split(weights, [LONGEST + 1, LONGEST + COPIES + 2])
    matched = np.append(matched[0] + copied[0], matched[1:] + copied[1])
    print(f"MATCHED = {np.round(matched, 1).tolist()}, LATER = {copied[2] - copied[1]:.1f}")
    print(f"RANKED = {np.round(ranked[:-1], 1).tolist()}, UNRANKED = {ranked[-1]:.1f}")
    for name, half in zip(("fitted", "held out"), halves, strict=True):
        order = [np.argsort(-(X @ weights), kind="stable") for X, _ in half]
        shares = [
            np.mean([y[best[:count]].any() for (_, y), best in zip(half, order, strict=True)])
            for count in (1, 2, 4)
        ]
        print(f"{name}: the best 1, 2, 4 contain the next token: {np.round(shares, 3).tolist()}")


if __name__ == "__main__":
    cli.run(main)
