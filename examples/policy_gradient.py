"""Trains a policy by policy gradient: each step samples and updates inside one `jax.jit`.

    python examples/policy_gradient.py    # 10 seconds on two CPU cores

The initial policy is the draft. As training continues, draft and policy agree less, but the samples
stay exact. The log-probabilities come from the calls that verified the tokens, so the importance
ratio of each update is 1.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spectr_jax import Policy, get_method
from spectr_jax.decoding import decode
from spectr_jax.decoding.scoring import scores_of
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.transformer import Transformer, TransformerConfig

SHAPE = TransformerConfig(layers=1, width=32, mlp=64, heads=2, vocab_size=16, context=32)
ROWS, PROMPT, NEW = 64, 4, 12
METHOD = get_method("speculative", draft_length=2)
OPTIMIZER = optax.adam(1e-2)


def reward(tokens: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the share [B] of even numbers among the new tokens."""
    return jnp.sum(jnp.where(new, tokens % 2 == 0, 0), axis=1) / jnp.sum(new, axis=1)


def main(steps: int = 40) -> tuple[float, float, float]:
    """Returns the first and the last reward, and the largest distance of a ratio from 1."""
    graphdef, params = nnx.split(Transformer(SHAPE, rngs=nnx.Rngs(0)))
    prompts, lengths = jnp.ones((ROWS, PROMPT), jnp.int32), jnp.full(ROWS, PROMPT)

    @jax.jit
    def step(key: jax.Array, params: nnx.State, state: optax.OptState, draft: Frozen):
        policy = freeze(nnx.merge(graphdef, params))
        out = decode(key, METHOD, policy, draft, prompts, lengths, NEW, Policy(), logprobs=True)
        places = jnp.arange(PROMPT + NEW)
        new = (places >= PROMPT) & (places < out.lengths[:, None])
        rewards = reward(out.tokens, new)
        advantages = (rewards - rewards.mean())[:, None]

        def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            scores = scores_of(nnx.merge(graphdef, params), out.tokens)
            ratio = jnp.exp(jnp.pad(scores.logprobs, ((0, 0), (1, 0))) - out.logprobs.policy)
            gain = jnp.sum(jnp.where(new, ratio * advantages, 0)) / ROWS
            return -gain, jnp.max(jnp.where(new, jnp.abs(ratio - 1), 0))

        gradients, apart = jax.grad(loss, has_aux=True)(params)
        updates, state = OPTIMIZER.update(gradients, state)
        return optax.apply_updates(params, updates), state, rewards.mean(), apart

    state, draft, seen = OPTIMIZER.init(params), freeze(nnx.merge(graphdef, params)), []
    for number in range(steps):
        key = jax.random.fold_in(jax.random.key(0), number)
        params, state, mean, apart = step(key, params, state, draft)
        seen.append((float(mean), float(apart)))
    print(f"share of even tokens: {seen[0][0]:.2f}, after {steps} steps {seen[-1][0]:.2f}")
    return seen[0][0], seen[-1][0], max(apart for _, apart in seen)


if __name__ == "__main__":
    main()
