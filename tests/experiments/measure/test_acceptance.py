"""Tests that observed acceptance equals the exact acceptance on table models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import transport
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.experiments.measure import acceptance
from spectr_jax.models.table import TableModel, perturbed, random_table

TABLE = random_table(0, 4)
DRAFT = perturbed(TABLE, 1, 0.8)
ROWS, PROMPT = 20_000, (1, 2)


def _both(call):
    return acceptance.observe_optimum(call) | acceptance.observe_accepted(call)


def _observed(method, length, max_new_tokens, rows=ROWS):
    method = get_method(method, num_drafts=2, draft_length=length)
    prompts = np.tile(PROMPT, (rows, 1)), np.full(rows, 2)
    arguments = method, TableModel(TABLE), TableModel(DRAFT), *prompts, max_new_tokens
    result = generate(jax.random.key(0), *arguments, observe=_both)
    return {name: float(np.sum(values)) for name, values in result.observed.items()}, result


def test_observed_acceptance_of_one_level_is_exact():
    p, q = DRAFT[PROMPT], TABLE[PROMPT]
    seen, _ = _observed("naive", 1, 1)
    assert seen["nodes"] == ROWS  # The bonus token has no drafts to choose among.
    assert seen["optimum"] / ROWS == pytest.approx(transport.optimal_acceptance(p, q, 2), abs=1e-5)
    exact = transport.get("naive").acceptance(p, q, 2)
    assert exact < 0.97
    error = np.sqrt(exact * (1 - exact) / ROWS)
    assert seen["accepted"] / ROWS == pytest.approx(exact, abs=4 * error)


def test_acceptance_is_counted_by_level_and_position():
    """Counts agree with `emitted` and with where calls start. Tokens after EOS do not count."""
    table, rows = random_table(3, 4), 500
    models = TableModel(table), TableModel(perturbed(table, 1, 0.8))
    eos, capacity = 3, 2 + 12

    def observe(call):
        seen = acceptance.observe_positions(capacity)(call)
        levels = jnp.arange(3) < call.chosen.emitted - 1
        ended = jnp.cumsum(call.chosen.tokens[:3] == eos) > (call.chosen.tokens[:3] == eos)
        start = jnp.zeros(capacity).at[call.scored.length].set(jnp.sum(levels & ~ended))
        return seen | {"levels": levels & ~ended, "starts": start}

    method, prompts = get_method("speculative", draft_length=3), np.tile([1, 2], (rows, 1))
    arguments = method, *models, prompts, [2] * rows, 12, Policy(eos=eos)
    made = generate(jax.random.key(0), *arguments, observe=observe)
    seen = {name: np.sum(values, axis=0) for name, values in made.observed.items()}
    np.testing.assert_array_equal(seen["accepted"], seen["levels"])
    np.testing.assert_array_equal(seen["accepted_at"], seen["starts"])
    calls = made.target_calls.sum()
    assert seen["calls"][:3].tolist() == [0, 0, rows] and seen["calls"].sum() == calls
    assert seen["chosen_at"].sum() == seen["reached"].sum() and seen["reached"][0] == calls
    assert (seen["reached"][1:] <= seen["accepted"][:-1]).all()
    assert (seen["accepted"] < seen["reached"]).all()


@pytest.mark.slow
@pytest.mark.optimized
def test_nodes_and_accepted_drafts_add_up_over_calls():
    """A call that emits e tokens accepts e - 1 drafts. It chooses among drafts at e nodes, or at
    e - 1 nodes if its last token is a bonus token."""
    rows = 5_000
    seen, result = _observed("otm", 3, 60, rows)
    calls, tokens = int(np.sum(result.target_calls)), 60 * rows
    # Accepted drafts that `max_new_tokens` cuts off are counted too.
    assert tokens - calls <= seen["accepted"] <= tokens - calls + 3 * rows
    rejected = seen["nodes"] - seen["accepted"]
    bonuses = calls - rejected
    assert 0 < bonuses < calls and 0 < rejected < calls
    accepted, optimum = seen["accepted"] / seen["nodes"], seen["optimum"] / seen["nodes"]
    assert accepted == pytest.approx(optimum, abs=0.005)
