"""Compares the losses with sums over a whole vocabulary in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.distillation.losses import LOSSES, Place, acceptance, optimal_acceptance
from spectr_jax.transport import otm

KNOWN, V = 7, 12


def distributions(seed, kept=V):
    """Returns p and q [V] in float64; the student scores the first `kept` tokens."""
    p, q = np.random.default_rng(seed).dirichlet(np.full(V, 0.7), 2)
    p[kept:] = 0
    return p / p.sum(), q


def place(p, q, target=0):
    """Returns a `Place` with labels of the first `KNOWN` tokens."""
    with np.errstate(divide="ignore"):
        return Place(
            *(jnp.asarray(np.log(part), jnp.float32) for part in (p[:KNOWN], q[:KNOWN], p[target]))
        )


def merged(p, q):
    """Returns p and q over the labels that the student scores and one last outcome, the rest.

    q has no probability on labels that the student does not score, and is renormalised.
    """
    labelled = np.arange(V) < KNOWN
    named, lacking = labelled & (p > 0), labelled & (p == 0)
    q = np.where(lacking, 0, q) / q[~lacking].sum()
    return [np.append(part[named], part[~named].sum()) for part in (p, q)]


@pytest.mark.parametrize("kept", [V, KNOWN + 2, KNOWN - 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_loss_equals_its_definition_in_float64(seed, kept):
    p, q = distributions(seed, kept)
    mp, mq = merged(p, q)
    accepted = np.minimum(p[:KNOWN], q[:KNOWN]).sum()
    forward = (mq * np.log(mq / np.maximum(mp, 1e-6))).sum()
    weight = np.exp(-3 * accepted)
    wanted = {
        "kl": forward,
        "reverse_kl": (mp * np.log(np.maximum(mp, 1e-6) / mq)).sum(),
        "tv": 1 - accepted,
        "lk": -np.log(accepted),
        "lk_hybrid": weight * forward + (1 - weight) * (1 - accepted),
        "cross_entropy": -np.log(p[0]),
    }
    assert wanted.keys() == LOSSES.keys()
    seen = place(p, q)
    assert float(acceptance(seen)) == pytest.approx(accepted, rel=1e-5)
    for name, loss in LOSSES.items():
        assert float(loss(seen)) == pytest.approx(wanted[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("seed", range(4))
def test_optimal_acceptance_from_labels_is_a_lower_bound(seed):
    p, q = distributions(seed)
    for drafts in (1, 4):
        told, best = float(optimal_acceptance(place(p, q), drafts)), otm.acceptance(p, q, drafts)
        left = np.minimum(p, q)[KNOWN:].sum()  # The acceptance of unlabelled tokens with one draft.
        assert best - drafts * left - 1e-4 <= told <= best + 1e-4
        if drafts == 1:
            assert told == pytest.approx(float(acceptance(place(p, q))), abs=1e-4)
    assert left > 0.02


@pytest.mark.parametrize("lacking", [0.9, 0.9997, 0.9999])
def test_divergences_stay_bounded_when_the_head_misses_most_probability(lacking):
    """The student equals the teacher on the tokens that its head scores, so only the rounding of
    labels to float16 moves its divergences from 0. Another student has larger ones."""
    kept = np.array([0.75, 0.25])
    q = np.concatenate([np.array([0.6, 0.4]) * lacking, (1 - lacking) * kept]).astype(np.float64)
    log_p = jnp.asarray([-np.inf, -np.inf, *np.log(kept)], jnp.float32)
    seen = Place(log_p, jnp.asarray(np.log(q).astype(np.float16), jnp.float32), jnp.float32(0))
    for name in ("kl", "reverse_kl"):
        assert -1e-5 < float(LOSSES[name](seen)) < (0.01 if lacking < 0.99 else 2), name
        further = seen._replace(log_p=jnp.log(jnp.array([0, 0, 0.25, 0.75])))
        assert float(LOSSES[name](further)) > float(LOSSES[name](seen)), name


def test_losses_are_finite_for_tokens_outside_the_head():
    p, q = distributions(0, kept=3)
    assert float(LOSSES["cross_entropy"](place(p, q, target=5))) == 0
    for name, loss in LOSSES.items():
        value, gradient = jax.value_and_grad(
            lambda log_p, loss=loss: loss(place(p, q)._replace(log_p=log_p))
        )(place(p, q).log_p)
        assert np.isfinite(value) and np.isfinite(gradient).all(), name


@pytest.mark.parametrize("kept", [V, KNOWN - 2])
def test_padding_labels_change_no_loss(kept):
    """A vocabulary smaller than `TOP` leaves empty labels: token 0 with probability 0."""
    p, q = distributions(2, kept)
    seen = place(p, q)
    padded = seen._replace(
        log_p=jnp.append(seen.log_p, seen.log_p[:1]), log_q=jnp.append(seen.log_q, -jnp.inf)
    )
    assert float(optimal_acceptance(padded, 4)) == pytest.approx(
        float(optimal_acceptance(seen, 4)), rel=1e-6
    )
    for name, loss in LOSSES.items():
        value, gradient = jax.value_and_grad(
            lambda log_p, loss=loss: loss(padded._replace(log_p=log_p))
        )(padded.log_p)
        assert float(value) == pytest.approx(float(loss(seen)), rel=1e-6), name
        assert np.isfinite(gradient).all(), name


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_minimising_each_loss_recovers_the_teacher(name):
    """Gradient descent on a student's logits reaches an acceptance above 0.99."""
    _, q = distributions(1)
    q = np.append(q[: KNOWN - 1], q[KNOWN - 1 :].sum())  # Every outcome is labelled.
    log_q = jnp.asarray(np.log(q), jnp.float32)

    def objective(logits):
        return LOSSES[name](Place(jax.nn.log_softmax(logits), log_q, jnp.float32(0)))

    step = jax.jit(lambda logits, rate: logits - rate * jax.grad(objective)(logits))
    logits = jnp.zeros(KNOWN)
    for number in range(2_000):
        logits = step(logits, 1.0 / (1 + number / 50))
    assert float(acceptance(Place(jax.nn.log_softmax(logits), log_q, jnp.float32(0)))) > 0.99


@pytest.mark.parametrize("name", ["kl", "reverse_kl"])
def test_divergences_ignore_tokens_outside_a_fully_labelled_head(name):
    """The divergences equal those of q normalised over the head."""
    p, q = distributions(5, KNOWN)
    q_head, p_head = q[:KNOWN] / q[:KNOWN].sum(), p[:KNOWN]
    first, second = (q_head, p_head) if name == "kl" else (p_head, q_head)
    seen = place(p, q)._replace(rest=jnp.float32(0))
    assert float(LOSSES[name](seen)) == pytest.approx(
        (first * np.log(first / second)).sum(), abs=1e-4
    )
