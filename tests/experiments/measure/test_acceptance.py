"""Acceptance at visited nodes, where it is known: one call of one level on table models."""

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
TEXTS, PROMPT = 20_000, (1, 2)


def _both(call):
    return acceptance.observe_optimum(call) | acceptance.observe_accepted(call)


def _observed(method, length, max_new_tokens, texts=TEXTS):
    method = get_method(method, num_drafts=2, draft_length=length)
    prompts, lengths = np.tile(PROMPT, (texts, 1)), np.full(texts, 2)
    result = generate(
        jax.random.key(0),
        method,
        TableModel(TABLE),
        TableModel(DRAFT),
        prompts,
        lengths,
        max_new_tokens,
        observe=_both,
    )
    return {name: float(np.sum(values)) for name, values in result.observed.items()}, result


@pytest.mark.parametrize("method", ["spectr", "otm", "naive"])
def test_one_node_a_text(method):
    p, q = DRAFT[PROMPT], TABLE[PROMPT]
    seen, _ = _observed(method, 1, 1)
    assert seen["nodes"] == TEXTS  # The bonus behind an accepted draft is no choice among drafts.
    assert seen["optimum"] / TEXTS == pytest.approx(transport.optimal_acceptance(p, q, 2), abs=1e-5)
    exact = transport.get({"spectr": "kseq"}.get(method, method)).acceptance(p, q, 2)
    assert exact < 0.97
    assert seen["accepted"] / TEXTS == pytest.approx(
        exact, abs=4 * np.sqrt(exact * (1 - exact) / TEXTS)
    )


def test_where_drafts_are_accepted():
    """By level as `emitted` says, by place in the sequence as the calls began, and nothing behind EOS."""
    table, rows = random_table(3, 4), 500
    models, eos = (TableModel(table), TableModel(perturbed(table, 1, 0.8))), 3
    capacity = 2 + 12

    def observe(call):
        seen = acceptance.observe_positions(capacity)(call)
        levels = jnp.arange(3) < call.chosen.emitted - 1
        ended = jnp.cumsum(call.chosen.tokens[:3] == eos) > (call.chosen.tokens[:3] == eos)
        start = jnp.zeros(capacity).at[call.scored.length].set(jnp.sum(levels & ~ended))
        return seen | {"levels": levels & ~ended, "starts": start}

    method, prompts = get_method("speculative", draft_length=3), np.tile([1, 2], (rows, 1))
    made = generate(
        jax.random.key(0), method, *models, prompts, [2] * rows, 12, Policy(eos=eos), observe
    )
    seen = {name: np.sum(values, axis=0) for name, values in made.observed.items()}
    np.testing.assert_array_equal(seen["accepted"], seen["levels"])
    np.testing.assert_array_equal(seen["accepted_at"], seen["starts"])
    assert (
        seen["calls"][2] == rows
        and not seen["calls"][:2].any()
        and seen["calls"].sum() == made.target_calls.sum()
    )
    assert (
        seen["chosen_at"].sum() == seen["reached"].sum()
        and seen["reached"][0] == made.target_calls.sum()
    )
    assert (seen["reached"][1:] <= seen["accepted"][:-1]).all() and (
        seen["accepted"] < seen["reached"]
    ).all()


@pytest.mark.slow
@pytest.mark.optimized
def test_nodes_and_accepted_ones_add_up_over_calls():
    """Without EOS, and up to the last call: a call of e tokens accepted e - 1, at e nodes or, with a bonus, e - 1."""
    texts = 5_000
    seen, result = _observed("otm", 3, 60, texts)
    calls, tokens = int(np.sum(result.target_calls)), 60 * texts
    assert (
        tokens - calls <= seen["accepted"] <= tokens - calls + 3 * texts
    )  # What the limit cut off was decided, too.
    rejected = seen["nodes"] - seen["accepted"]
    bonuses = calls - rejected
    assert 0 < bonuses < calls and 0 < rejected < calls
    assert seen["accepted"] / seen["nodes"] == pytest.approx(
        seen["optimum"] / seen["nodes"], abs=0.005
    )
