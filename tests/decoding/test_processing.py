"""Logits processes: each node sees its own path, and outputs follow the processed target."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy, bias, decode, get_method, only, repetition_penalty
from spectr_jax.decoding.generate import generate
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.utils.errors import UserError

V, LENGTH, PROMPT = 4, 3, (1, 2)
TABLE = random_table(0, V)
LARGER = TableModel(random_table(1, 13))
ROWS = LARGER, None, [[1, 2]] * 4, [2] * 4, 12


def no_token_again_within_two(logits, tokens, length):
    """Bans the last two tokens, so the result depends on the order of the path."""
    last = tokens[jnp.maximum(length - 1 - jnp.arange(2), 0)]
    return logits.at[last].set(-jnp.inf)


def penalised(logits, tokens, length):
    return repetition_penalty(1.7)(bias({0: 1.0, 3: -0.5})(logits, tokens, length), tokens, length)


def _exact(process, temperature):
    """Returns the probability of each continuation, indexed by its tokens as digits."""
    pmf, step, cache = np.zeros(V**LENGTH), jax.jit(process), {}
    for tokens in itertools.product(range(V), repeat=LENGTH):
        probability, sequence = 1.0, PROMPT
        for token in tokens:
            if sequence not in cache:
                padded = jnp.asarray([*sequence, *[0] * (len(PROMPT) + LENGTH - len(sequence))])
                logits = step(jnp.log(jnp.float32(TABLE[sequence[-2:]])), padded, len(sequence))
                logits = np.asarray(logits, np.float64)
                weights = np.exp((logits - logits.max()) / temperature)
                cache[sequence] = weights / weights.sum()
            probability *= cache[sequence][token]
            sequence = (*sequence, token)
        pmf[np.array(tokens) @ V ** np.arange(LENGTH)] = probability
    return pmf


def test_sequences_follow_the_processed_target():
    """The drafts have a process of their own."""
    rows, policy = 8000, Policy(temperature=0.8, process=no_token_again_within_two)
    models = TableModel(TABLE), TableModel(perturbed(TABLE, 1, 0.8))
    own = Policy(0.8, process=penalised)
    prompts = np.tile(PROMPT, (rows, 1)), np.full(rows, 2)
    arguments = get_method("otm_block", tree="2,1,1"), *models, *prompts, LENGTH, policy
    counts = np.zeros(V**LENGTH)
    for seed in range(3):
        out = generate(jax.random.split(jax.random.key(seed), rows), *arguments, draft_policy=own)
        digits = np.asarray(out.tokens)[:, 2 : 2 + LENGTH] @ V ** np.arange(LENGTH)
        counts += np.bincount(digits, minlength=V**LENGTH)
    pmf = _exact(no_token_again_within_two, 0.8)
    assert not counts[pmf == 0].any()
    assert chi_square.p_value(counts, pmf) > 1e-4


@pytest.mark.parametrize(
    ("process", "other"),
    [
        (only([3, 5, 8]), only((1, 0, 7))),
        (bias({3: 50.0, 5: -math.inf}), bias({2: 50.0, 4: 0.5})),
        (repetition_penalty(1.01), repetition_penalty(1e9)),
    ],
)
def test_processes_of_other_numbers_share_a_program(process, other, count_compilations):
    arguments = jax.random.key(0), get_method("baseline"), *ROWS
    outs = [generate(*arguments, Policy(process=process))]
    with count_compilations() as compiled:
        outs.append(generate(*arguments, Policy(temperature=0.5, process=other)))
    assert not compiled
    first, second = ({*np.asarray(out.tokens)[:, 2:14].ravel().tolist()} for out in outs)
    assert first != second


def test_a_process_that_is_a_pytree_need_not_be_hashable():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Only:
        token: int

        def __call__(self, logits, tokens, length):
            return jnp.where(jnp.arange(len(logits)) == self.token, 0, -jnp.inf)

    out = generate(jax.random.key(0), get_method("baseline"), *ROWS, Policy(process=Only(5)))
    assert (np.asarray(out.tokens)[:, 2:14] == 5).all()


def test_a_process_is_traced_in_a_jit_of_ones_own(count_compilations):
    prompts, lengths = jnp.full((2, 16), 1), jnp.full(2, 2)

    @jax.jit
    def tokens(policy, target):
        key = jax.random.key(0)
        return decode(key, get_method("baseline"), target, None, prompts, lengths, 4, policy).tokens

    target = freeze(TableModel(random_table(0, 13)))
    for value in range(3):
        policy = Policy(process=bias({value: 50.0}))
        with count_compilations() as compiled:
            out = np.asarray(tokens(policy, target))
        assert (out[:, 2:6] == value).all() and bool(compiled) == (value == 0)
    assert tokens(Policy(process=_all_nan), target)[0, 4] == -1


def _all_nan(logits, tokens, length):
    return jnp.where(length == 4, jnp.nan, logits)


def _none_allowed(logits, tokens, length):
    return jnp.where(length == 4, -jnp.inf, logits)


@pytest.mark.optimized
@pytest.mark.parametrize(("name", "process"), [("baseline", _all_nan), ("lookup", _none_allowed)])
def test_a_process_that_allows_no_token_ends_the_sequence(name, process):
    """XLA for CPUs may fold the exponential of a constant NaN into an arbitrary number."""
    policy = Policy(temperature=[1.0, 0.0, 1.0, 0.0], process=process)
    out = generate(jax.random.key(0), get_method(name), *ROWS, policy)
    tokens = np.asarray(out.tokens)
    assert np.all(tokens[:, :4] >= 0) and np.all(tokens[:, 4] == -1)
    np.testing.assert_array_equal(out.lengths, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: repetition_penalty(0), "penalty=0"),
        (lambda: repetition_penalty(1e-50), "penalty=1e-50"),
        (lambda: repetition_penalty("1"), "penalty='1'"),
        (lambda: bias({}), "values={}"),
        (lambda: bias([1]), r"values=\[1\]"),
        (lambda: bias({1: 1e39}), r"values=1e\+39"),
        (lambda: bias({0.5: 1.0}), "tokens={0.5: 1.0}"),
        (lambda: only([]), r"tokens=\[\]"),
        (lambda: only([2**32 + 1]), r"tokens=\[4294967297\]"),
    ],
)
def test_invalid_arguments_of_built_in_processes_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (3, "process=3"),
        (only([13]), r"process: token 13 is outside the vocabulary 0\.\.12"),
        (lambda logits, tokens, length: logits[:3], r"must return logits float\[13\]"),
        (lambda logits, tokens, length: logits + 1j, r"must return logits float\[13\]"),
        (lambda logits: logits, r"must be a hashable function of \(logits, tokens, length\)"),
    ],
)
def test_invalid_processes_are_refused(process, message):
    with pytest.raises(UserError, match=message):
        generate(jax.random.key(0), get_method("baseline"), *ROWS, Policy(process=process))
