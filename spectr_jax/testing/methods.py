"""Checks of methods: one function per property, and `check_method` for all of them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.request import BUCKET
from spectr_jax.models.table import TableModel, exact_pmf, perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.utils.errors import UserError

VOCAB, EOS = 4, 3
TARGET = random_table(0, VOCAB)
DRAFT = perturbed(TARGET, 1, 0.8)
"""Table models on which methods are checked."""
PROMPT, LENGTH = (1, 2), 5
"""The prompt of `check_outputs`, and the largest number of new tokens."""
GENERATIONS, BATCH = 200_000, 4_000
"""The number of sequences of `check_outputs`, and of a batch in all checks."""
PLAIN = Policy(eos=EOS)
SHAPED = Policy(temperature=0.7, top_k=3, top_p=0.9, eos=EOS)
GREEDY_SEEDS = (0, 3, 4, 5)


def check_method(method: Method) -> None:
    """Checks a method on table models of four tokens, with all checks of this module.

    Use small options: at most a dozen nodes, and at most four children per node if drafts are
    distinct.

    Raises:
      AssertionError: the method is wrong; the message says where.
      UserError: `method` is not a method.
    """
    if not isinstance(method, Method):
        raise UserError(f"method={method!r}: must be a Method, such as get_method('spectr')")
    for policy in (PLAIN, SHAPED):
        check_outputs(method, policy)
    for seed in GREEDY_SEEDS:
        check_greedy(method, seed)
    check_rows(method)
    check_counters(method)
    check_compilations(method, dataclasses.replace(method))


def check_outputs(
    method: Method,
    policy: Policy = PLAIN,
    least: float = chi_square.LEAST,
    generations: int | None = None,
) -> None:
    """Tests whole outputs by chi-square against the target's exact distribution under `policy`.

    Outputs are drafted at the target's temperature, at twice that, and greedily, so that the plan
    also sees a p with one token.

    Args:
      method: to check.
      policy: of the target; it has `eos`.
      least: p-values below this fail.
      generations: number of outputs to decode, a multiple of 4,000; None for 200,000.

    Raises:
      AssertionError: the outputs do not follow the distribution.
      UserError: `generations` is not a positive multiple of 4,000.
    """
    generations = GENERATIONS if generations is None else generations
    if generations < BATCH or generations % BATCH:
        wanted = f"must be a positive multiple of {BATCH:,}; give {3 * BATCH:,} or more"
        raise UserError(f"generations={generations}: {wanted}")
    eos = int(policy.eos)  # type: ignore[arg-type]
    pmf = exact_pmf(_shaped(TARGET, policy), PROMPT, LENGTH, eos)
    prompts = np.tile(np.pad(PROMPT, (0, BUCKET - len(PROMPT))), (BATCH, 1))
    lengths, digits = np.full(BATCH, len(PROMPT)), VOCAB ** np.arange(LENGTH)
    counts = np.zeros((LENGTH + 1, VOCAB**LENGTH), int)  # By number of new tokens, and by tokens.
    for chunk in range(generations // BATCH):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(11), chunk), BATCH)
        own = policy.temperature * (1, 2, 0)[chunk % 3]
        result = _decode(method, keys, prompts, lengths, policy, draft_temperature=own)
        new = result.tokens[:, len(PROMPT) : len(PROMPT) + LENGTH]
        longest = result.lengths.max() - len(PROMPT)
        if longest > LENGTH:
            _fail(method, f"a sequence has {longest} new tokens, and max_new_tokens is {LENGTH}")
        outside = new[(new < 0) | (new >= VOCAB)]
        if len(outside):
            _fail(method, f"a sequence has token {outside[0]}, outside 0..{VOCAB - 1}")
        np.add.at(counts, (result.lengths - len(PROMPT), new @ digits), 1)

    outputs, expected = list(pmf), generations * np.array(list(pmf.values()))
    places = [(len(new), int(np.dot(new, digits[: len(new)]))) for new in outputs]
    observed = np.array([counts[place] for place in places])
    impossible = generations - observed[expected > 0].sum()
    p_value = chi_square.p_value(observed, expected)
    if impossible or not p_value >= least:
        worst = int(np.argmax(np.abs(observed - expected) / np.sqrt(expected + 1)))
        _fail(
            method,
            f"whole outputs do not follow the target under {policy}: of {generations:,} sequences "
            f"{observed[worst]:,} continue {PROMPT} with {outputs[worst]}, {expected[worst]:,.0f} "
            f"expected, and {impossible:,} are impossible (chi-square: p-value {p_value:.1g})",
        )


def check_greedy(method: Method, seed: int, policy: Policy = PLAIN) -> None:
    """Checks that at temperature 0 every sequence is the target's likeliest, token for token.

    Tables and prompts depend on `seed`. Drafts are greedy for even seeds and at temperature 1 for
    odd seeds.

    Raises:
      AssertionError: a sequence differs.
    """
    table, (prompts, lengths) = random_table(seed, VOCAB), _ragged_prompts(seed)
    greedy = dataclasses.replace(policy, temperature=0.0)
    models = table, perturbed(table, seed + 1, 0.8)
    result = _decode(method, _keys(seed), prompts, lengths, greedy, *models, seed % 2)
    tokens, ends = _likeliest(table, prompts, lengths)
    wrong = np.flatnonzero((result.tokens != tokens).any(axis=1) | (result.lengths != ends))
    if len(wrong):
        row = wrong[0]
        _fail(
            method,
            f"at temperature 0 it does not emit the target's likeliest tokens (seed {seed}, "
            f"{len(wrong)} of {BATCH} sequences): {_tokens(result, row)}, likeliest "
            f"{tokens[row, : ends[row]].tolist()}; the prompt is the first {lengths[row]}",
        )


def check_rows(method: Method, policy: Policy = PLAIN) -> None:
    """Checks that a sequence depends only on its key and prompt, not on its row or other sequences.

    Raises:
      AssertionError: a sequence depends on one of these.
    """
    keys, (prompts, lengths) = _keys(3), _ragged_prompts(5)
    together = _decode(method, keys, prompts, lengths, policy)
    # The sequences that finished first, repeated in other rows.
    order = np.tile(np.argsort(together.target_calls, kind="stable")[: BATCH // 8], 8)[::-1]
    again = _decode(method, keys[order], prompts[order], lengths[order], policy)
    for field in ("tokens", "lengths", "target_calls", "emitted_per_call"):
        before, after = getattr(together, field)[order], getattr(again, field)
        wrong = np.flatnonzero((before != after).reshape(BATCH, -1).any(axis=1))
        if len(wrong):
            row = wrong[0]
            _fail(
                method,
                f"a sequence depends on its row or on other sequences: with the same key and "
                f"prompt, {field} is {before[row].tolist()} in row {order[row]} of one batch and "
                f"{after[row].tolist()} in row {row} of another",
            )


def check_counters(method: Method, policy: Policy = PLAIN) -> None:
    """Checks that counters add up, prompts stay unchanged, and nothing follows the end.

    Raises:
      AssertionError: one of these fails.
    """
    prompts, lengths = _ragged_prompts(6)
    result = _decode(method, _keys(0), prompts, lengths, policy)
    tokens, calls = result.tokens, result.emitted_per_call
    place, padded = np.arange(tokens.shape[1]), np.pad(prompts, ((0, 0), (0, LENGTH)))
    new = calls @ np.arange(calls.shape[1])
    wrong_in = {
        "emitted_per_call does not add up to the new tokens": new != result.lengths - lengths,
        "emitted_per_call does not add up to target_calls": calls.sum(1) != result.target_calls,
        "a call emits no token": calls[:, 0] > 0,
        "tokens follow the end": ((tokens != 0) & (place >= result.lengths[:, None])).any(1),
        "the prompt has changed": ((tokens != padded) & (place < lengths[:, None])).any(1),
    }
    for what, wrong in wrong_in.items():
        if wrong.any():
            row = int(np.argmax(wrong))
            _fail(
                method,
                f"{what} ({wrong.sum()} of {BATCH} sequences): sequence {_tokens(result, row)} "
                f"with a prompt of {lengths[row]} tokens, target_calls {result.target_calls[row]}, "
                f"emitted_per_call {calls[row].tolist()}",
            )


def check_compilations(first: Method, second: Method, policy: Policy = PLAIN) -> None:
    """Checks that a call with `second`, built like `first`, compiles nothing.

    The second call has another key, other prompts, another temperature and equal models.

    Raises:
      AssertionError: it compiles.
    """
    _decode(first, _keys(0), *_ragged_prompts(7), dataclasses.replace(policy, temperature=0.9))
    with count_compilations() as compiled:
        _decode(second, _keys(1), *_ragged_prompts(8), dataclasses.replace(policy, temperature=0.3))
    if compiled:
        _fail(
            second,
            f"the second call compiled {len(compiled)} programs; build the method of parts that "
            "are equal each time, such as functions at the top of a module",
        )


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Yields a list that grows by one entry for each program compiled inside the context."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _decode(
    method, keys, prompts, lengths, policy, table=TARGET, draft=DRAFT, draft_temperature=None
) -> Any:
    """Decodes `BATCH` sequences of at most `LENGTH` new tokens; returns a `Generation` in NumPy.

    All checks of a method under one policy share this program.
    """
    models = _models(method, table, draft)
    own = None
    if draft_temperature is not None:
        own = dataclasses.replace(policy, temperature=float(draft_temperature))
    result = generate(keys, method, *models, prompts, lengths, LENGTH, policy, draft_policy=own)
    result = jax.tree.map(np.asarray, result)
    return dataclasses.replace(result, tokens=result.tokens[:, : prompts.shape[1] + LENGTH])


def _models(method, table=TARGET, draft=DRAFT) -> tuple[TableModel, TableModel | None]:
    # Self-speculation drafts with the target's first layers.
    target = TableModel(table, exits=(draft,) * getattr(method.drafter, "layers", 1))
    return target, TableModel(draft) if method.needs_draft else None


def _keys(seed: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), BATCH)


def _ragged_prompts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts [B, T] of 1 to 6 tokens and their lengths [B].

    Random tokens follow each prompt and must not matter.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, BATCH).astype(np.int32)
    return rng.integers(0, VOCAB - 1, (BATCH, BUCKET)).astype(np.int32), lengths


def _likeliest(table: np.ndarray, prompts: np.ndarray, lengths: np.ndarray) -> tuple[Any, Any]:
    """Returns greedy sequences [B, T + LENGTH] and their lengths [B], from the table alone."""
    rows, T = np.arange(len(prompts)), prompts.shape[1]
    tokens = np.pad(np.where(np.arange(T) < lengths[:, None], prompts, 0), ((0, 0), (0, LENGTH)))
    ends, done = lengths.copy(), np.zeros(len(prompts), bool)
    for _ in range(LENGTH):
        before = np.where(ends > 1, tokens[rows, ends - 2], 0)
        token = np.where(done, 0, table[before, tokens[rows, ends - 1]].argmax(-1))
        tokens[rows, ends] = token
        ends += ~done
        done |= token == EOS
    return tokens, ends


def _shaped(table: np.ndarray, policy: Policy) -> np.ndarray:
    """Returns `table` under `policy`, computed independently of `policy.probabilities`."""
    logits = np.log(table) / policy.temperature
    shaped = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-shaped, axis=-1)
    for index in np.ndindex(table.shape[:-1]):
        row, ranked = shaped[index], order[index]
        row[ranked[policy.top_k or len(ranked) :]] = 0
        row /= row.sum()
        mass = 0.0
        for token in ranked:
            if mass >= float(policy.top_p):
                row[token] = 0
            mass += row[token]
        row /= row.sum()
    return shaped


def _tokens(result: Any, row: int) -> list[int]:
    return result.tokens[row, : result.lengths[row]].tolist()


def _fail(method: Method, message: str) -> NoReturn:
    raise AssertionError(f"method {method.name!r}: {message}")
