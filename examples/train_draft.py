"""Trains a small draft for a target, on the target's own samples, and measures tokens per call.

    python examples/train_draft.py    # 15 seconds on two CPU cores

The loss is KL(q, p) at each place. For real drafts use `label` and `train` (docs/drafts.md): they
keep labels on disk.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spectr_jax import generate, get_method
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.transformer import Transformer, TransformerConfig

ROWS, NEW = 64, 28
DRAFTED = get_method("block", draft_length=3)


def sampled(key: jax.Array, target: Frozen) -> jax.Array:
    """Returns samples [ROWS, T] of the target; consumes `key`."""
    out = generate(key, get_method("baseline"), target, None, [[1]] * ROWS, [1] * ROWS, NEW)
    return out.tokens[:, : 1 + NEW]


def log_pmf(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Returns the model's log-probabilities [B, T, V] of the token after each."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    visible = jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T))
    return jax.nn.log_softmax(model.extend(tokens, positions, visible)[0])


def tokens_per_call(target: Frozen, draft: Transformer) -> float:
    """Returns the tokens per call of the target with three drafts of `draft`."""
    out = generate(jax.random.key(9), DRAFTED, target, draft, [[1]] * ROWS, [1] * ROWS, NEW)
    return float(jnp.sum(out.lengths - 1) / jnp.sum(out.target_calls))


def main(steps: int = 150) -> tuple[float, float]:
    """Returns the tokens per call before and after the training."""
    shape = TransformerConfig(layers=2, width=64, mlp=128, heads=4, vocab_size=64, context=64)
    model = Transformer(shape, rngs=nnx.Rngs(0))
    model.head.kernel[...] *= 4  # An untrained target is nearly uniform, too easy to predict.
    target = freeze(model)
    draft = Transformer(dataclasses.replace(shape, layers=1, width=32), rngs=nnx.Rngs(1))
    graphdef, params = nnx.split(draft)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, target: Frozen, tokens: jax.Array):
        log_q = log_pmf(target.merge(), tokens)

        def loss(params: nnx.State) -> jax.Array:
            log_p = log_pmf(nnx.merge(graphdef, params), tokens)
            return jnp.mean(jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1))

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    state, before = optimizer.init(params), tokens_per_call(target, draft)
    for number in range(steps):
        tokens = sampled(jax.random.fold_in(jax.random.key(0), number), target)
        params, state, divergence = step(params, state, target, tokens)
    after = tokens_per_call(target, nnx.merge(graphdef, params))
    print(
        f"KL {float(divergence):.3f} after {steps} steps; tokens per call {before:.2f} before, "
        f"{after:.2f} after"
    )
    return before, after


if __name__ == "__main__":
    main()
