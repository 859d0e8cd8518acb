"""Each sequence follows its own policy, and invalid values of a policy are refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy, decode, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.policy import probabilities
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, exact_pmf, perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

POLICIES = [
    Policy(),
    Policy(temperature=0.0),
    Policy(temperature=0.5, top_k=3),
    Policy(temperature=1.5, top_p=0.7),
    Policy(min_p=0.3),
    Policy(temperature=0.8, top_k=4, top_p=0.9, min_p=0.1),
]
VALUES = ("temperature", "top_k", "top_p", "min_p")


def _batch(policies, repeated=1):
    """Returns one policy for a batch whose rows cycle through `policies`."""
    columns = {name: [getattr(each, name) for each in policies] for name in VALUES}
    return Policy(**{name: np.tile(column, repeated) for name, column in columns.items()})


def _expected(logits, policy):
    """Returns the distribution by its definition, in float64, with sorted logits."""
    if policy.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / policy.temperature)
    kept = np.ones(len(p), bool)
    if policy.top_k:
        kept &= logits >= np.sort(logits)[::-1][min(policy.top_k, len(p)) - 1]
    if policy.top_p < 1:
        order = np.argsort(-logits)
        mass = np.cumsum(np.where(kept, p, 0)[order]) / np.where(kept, p, 0).sum()
        kept &= logits >= logits[order][np.argmax(mass >= policy.top_p)]
    kept &= p >= policy.min_p
    return np.where(kept, p, 0) / np.where(kept, p, 0).sum()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_top_k_top_p_and_min_p_equal_a_sorted_reference(on_cpu, monkeypatch):
    """The logits have ties, entries of -inf, and a dimension for nodes."""
    monkeypatch.setattr(backend, "on_cpu", lambda: on_cpu)
    jax.clear_caches()
    rng = np.random.default_rng(0)
    logits = np.float32(rng.integers(-20, 20, (len(POLICIES), 2, 301)) / 4)
    logits[:, 1, :60] = -np.inf
    made = probabilities(jnp.asarray(logits), _batch(POLICIES))
    for row, policy in enumerate(POLICIES):
        for node in range(2):
            expected = _expected(logits[row, node], policy)
            np.testing.assert_array_equal(np.asarray(made[row, node]) > 0, expected > 0)
            np.testing.assert_allclose(made[row, node], expected, rtol=1e-5)
            alone = probabilities(jnp.asarray(logits[row, node]), policy)
            np.testing.assert_array_equal(made[row, node], alone)


def test_rows_follow_their_own_policies():
    target, repeated, length = random_table(0, 4), 2000, 3
    policy = _batch(POLICIES, repeated)
    rows = len(policy.temperature)
    arguments = (
        get_method("otm_block", tree="2,1"),
        TableModel(target),
        TableModel(perturbed(target, 1, 0.8)),
    )
    arguments += np.tile([[1, 2]], (rows, 1)), np.full(rows, 2), length, policy
    counts = np.zeros((len(POLICIES), 4**length))
    digits = 4 ** np.arange(length)
    for seed in range(3):
        out = generate(jax.random.split(jax.random.key(seed), rows), *arguments)
        codes = np.asarray(out.tokens)[:, 2 : 2 + length] @ digits
        for number in range(len(POLICIES)):
            counts[number] += np.bincount(codes[number :: len(POLICIES)], minlength=4**length)
    for number, each in enumerate(POLICIES):
        shaped = np.array([[_expected(np.log(row), each) for row in rows] for rows in target])
        pmf = exact_pmf(shaped, (1, 2), length)
        expected = np.zeros(4**length)
        for tokens, probability in pmf.items():
            expected[np.array(tokens) @ digits] = probability
        assert not counts[number][expected == 0].any()
        assert chi_square.p_value(counts[number], expected) > 1e-4


def test_a_row_with_its_own_policy_equals_the_row_alone():
    models = [TableModel(random_table(seed, 100)) for seed in (0, 1)]
    method = get_method("speculative", draft_length=2)
    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(0, 100, (len(POLICIES), 5)), np.array([1, 5, 3, 2, 4, 5])
    keys = jax.random.split(jax.random.key(0), len(POLICIES))
    together = generate(keys, method, *models, prompts, lengths, 20, _batch(POLICIES))
    for row, policy in enumerate(POLICIES):
        one = slice(row, row + 1)
        alone = generate(keys[one], method, *models, prompts[one], lengths[one], 20, policy)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        assert int(alone.target_calls[0]) == int(together.target_calls[row])


def test_new_policy_values_compile_no_new_programs(count_compilations):
    models = [TableModel(random_table(seed, 5)) for seed in (0, 1)]
    arguments = get_method("speculative", draft_length=2), *models, [[1], [2]], [1, 1], 6
    generate(jax.random.key(0), *arguments, Policy())
    generate(jax.random.key(0), *arguments, Policy(top_k=2))
    mixed = (
        [np.array([0.0, 1.5]), 2.0],
        [0, np.array([0, 4]), 7],
        [0.2, 1, np.array([1, 0.5])],
        [0, jnp.float32(0.5)],
    )
    with count_compilations() as compiled:
        for values in itertools.product(*mixed):
            policy = Policy(**dict(zip(VALUES, values, strict=True)))
            generate(jax.random.key(0), *arguments, policy, draft_policy=policy)
    assert not compiled


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(temperature=-1.0), "temperature=-1.0"),
        (Policy(temperature=float("nan")), "temperature=nan"),
        (Policy(temperature=1e39), r"temperature=1e\+39"),
        (Policy(temperature=1e-50), "temperature=1e-50"),
        (Policy(temperature=None), "temperature=None"),
        (Policy(temperature="hot"), "temperature=hot"),
        (Policy(temperature=True), "temperature=True"),
        (Policy(temperature=np.ones(3)), r"temperature: has shape \[3\]"),
        (Policy(top_k=np.array([3, -1])), r"top_k=\[ 3 -1\]"),
        (Policy(top_k=2.5), "top_k=2.5"),
        (Policy(top_k=2**32 + 1), "top_k=4294967297"),
        (Policy(top_p=0.0), "top_p=0.0"),
        (Policy(top_p=1e-50), "top_p=1e-50"),
        (Policy(top_p=None), "top_p=None"),
        (Policy(min_p=1.5), "min_p=1.5"),
        (Policy(min_p=float("nan")), "min_p=nan"),
        (Policy(eos=[[3, 4]]), r"eos=\[\[3, 4\]\]"),
        (Policy(eos=2.7), "eos=2.7"),
        (Policy(eos=None), "eos=None"),
        (Policy(eos=2**32 + 1), "eos=4294967297"),
        ({"temperature": 1.0}, "policy={'temperature': 1.0}"),
    ],
)
@pytest.mark.parametrize("owner", ["", "draft_"])
def test_invalid_policy_values_are_refused(policy, message, owner):
    models = [TableModel(random_table(seed, 5)) for seed in (0, 1)]
    arguments = jax.random.key(0), get_method("spectr"), *models, [[1], [2]], [1, 1], 4
    with pytest.raises(UserError, match=owner + message):
        generate(*arguments, **{f"{owner}policy": policy})


def test_a_traced_policy_may_have_several_eos_tokens():
    model, method = TableModel(random_table(0, 7)), get_method("baseline")
    target, rows = freeze(model), (np.array([[1, 2]] * 2), np.array([2, 2]), 9)

    @jax.jit
    def decoded(key, target, policy):
        return decode(key, method, target, None, *rows, policy).tokens

    key, policy = jax.random.key(0), Policy(temperature=[0.8, 0.0], eos=(2, 3))
    expected = generate(key, method, model, None, *rows, policy).tokens
    # `decode` does not pad prompts to a bucket.
    np.testing.assert_array_equal(decoded(key, target, policy), expected[:, :11])


@pytest.mark.slow
def test_policies_accept_jax_scalars():
    models = [TableModel(random_table(seed, 5)) for seed in (0, 1)]
    arguments = jax.random.key(0), get_method("spectr", num_drafts=2), *models, [[1]], [1], 6
    policy = Policy(temperature=0.5, top_k=3, top_p=0.5)
    scalars = {name: jnp.asarray(getattr(policy, name)) for name in VALUES}
    expected = generate(*arguments, policy).tokens
    made = generate(*arguments, dataclasses.replace(policy, **scalars)).tokens
    np.testing.assert_array_equal(made, expected)
