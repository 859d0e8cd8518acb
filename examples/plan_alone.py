"""Uses a transport plan alone: k drafts from p go in, one token of distribution q comes out.

    python examples/plan_alone.py    # 6 seconds on two CPU cores

Prints how often the token is one of the drafts, compared with the exact probability, and how far
its frequencies are from q.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import transport

VOCAB, DRAFTS, DRAWS = 20, 4, 40_000


@functools.partial(jax.jit, static_argnames="plan")
def choose(key: jax.Array, plan: transport.Plan, p: jax.Array, q: jax.Array) -> transport.Choice:
    """Draws the drafts, and lets the plan choose among them; consumes `key`."""
    draft_key, choice_key = jax.random.split(key)
    drafts = jax.random.categorical(draft_key, jnp.log(p), shape=(DRAFTS,))
    return plan.select(choice_key, p, q, drafts, jnp.ones(DRAFTS, bool))


def main(name: str = "otm") -> tuple[float, float, float]:
    """Returns the measured and the exact acceptance, and the largest error of a frequency."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(VOCAB)), rng.dirichlet(np.ones(VOCAB))
    plan = transport.get(name)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    choose_all = jax.vmap(choose, in_axes=(0, None, None, None))
    chosen = choose_all(keys, plan, jnp.float32(p), jnp.float32(q))
    accepted, exact = float(jnp.mean(chosen.accepted)), plan.acceptance(p, q, DRAFTS)
    error = float(np.abs(np.bincount(chosen.token, minlength=VOCAB) / DRAWS - q).max())
    best = transport.optimal_acceptance(p, q, DRAFTS)
    print(
        f"{name}: {accepted:.3f} accepted, exactly {exact:.3f}; any plan at most {best:.3f}; "
        f"frequencies within {error:.4f}"
    )
    return accepted, exact, error


if __name__ == "__main__":
    for each in ("maximal", "kseq", "otm"):
        main(each)
