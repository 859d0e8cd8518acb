"""How logits become probabilities (temperature, top-k, top-p), and where a sequence ends."""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.errors import UserError
from spectr_jax.models.layers import cpu
from spectr_jax.transport.types import FloatScalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """The sampling policy, applied to draft and target alike unless the draft has its own.

    Attributes:
      temperature: traced; 0 is greedy (all mass on the most probable token).
      top_k: keep the k most probable tokens (and ties of the last); 0 keeps all. Static.
      top_p: then keep the fewest most probable tokens that hold this mass (and ties); 1 keeps all. Static.
      eos: the token that ends a sequence, or several of them; -1 for none. Traced.
    """

    temperature: float | FloatScalar = 1.0
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    top_p: float = dataclasses.field(default=1.0, metadata={"static": True})
    eos: int | tuple[int, ...] | Int[Array, "*several"] = -1


def check_policy(policy: Policy, owner: str = "") -> None:
    """Raises `UserError` for a value out of range; `owner`, such as "draft_", stands before the field that it names."""
    if not float(policy.temperature) >= 0.0 or float(policy.temperature) == float("inf"):
        raise UserError(f"{owner}temperature={policy.temperature} is not a finite number of at least 0; 0 is greedy")
    if not isinstance(policy.top_k, numbers.Integral) or policy.top_k < 0:
        raise UserError(f"{owner}top_k={policy.top_k} is no number of tokens; give a whole one, or 0 for all")
    if not 0.0 < policy.top_p <= 1.0:
        raise UserError(f"{owner}top_p={policy.top_p} is not in (0, 1]; give a probability mass, or 1 for all")
    eos = np.asarray(policy.eos)
    if eos.ndim > 1 or not eos.size or eos.dtype.kind not in "iu" or np.any((eos < -1) | (eos >= 2**31)):
        raise UserError(
            f"{owner}eos={policy.eos!r} is no token; give its number, such as tokenizer.eos, several, or -1 for none"
        )


def ends(tokens: Int[Array, "*shape"], policy: Policy) -> Bool[Array, "*shape"]:
    """Returns which of the tokens end a sequence; -1, where the target had no distribution, always does."""
    return jnp.any(tokens[..., None] == jnp.ravel(jnp.asarray(policy.eos)), axis=-1) | (tokens < 0)


@jax.jit
def probabilities(logits: Float[Array, "*batch vocab"], policy: Policy) -> Float[Array, "*batch vocab"]:
    """Returns the distribution, in float32, that `policy` makes of `logits`."""
    temperature = jnp.asarray(policy.temperature, jnp.float32)
    if cpu.on_cpu():
        pmf: Array = jax.lax.cond(temperature > 0, lambda: _softened(logits, temperature, policy), lambda: _greedy(logits))
        return pmf
    # A conditional would make the host of an accelerator wait for the temperature.
    return jnp.where(temperature > 0, _softened(logits, temperature, policy), _greedy(logits))


def _softened(
    logits: Float[Array, "*batch vocab"], temperature: FloatScalar, policy: Policy
) -> Float[Array, "*batch vocab"]:
    """Returns the distribution at a positive temperature."""
    # Relative to the largest, or a tiny temperature leaves nothing but rounding errors of huge numbers.
    relative = logits.astype(jnp.float32) - jnp.max(logits, axis=-1, keepdims=True).astype(jnp.float32)
    scaled = relative / jnp.where(temperature > 0, temperature, 1.0)
    limited = 0 < policy.top_k < logits.shape[-1]
    if policy.top_p < 1.0:
        ordered = -jnp.sort(-scaled, axis=-1)
        if limited:
            ordered = jnp.where(ordered >= ordered[..., policy.top_k - 1, None], ordered, -jnp.inf)
        mass = jax.nn.softmax(ordered, axis=-1)
        kept = jnp.cumsum(mass, axis=-1) - mass < policy.top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled >= least, scaled, -jnp.inf)
    elif limited:
        scaled = jnp.where(scaled >= jax.lax.top_k(scaled, policy.top_k)[0][..., -1:], scaled, -jnp.inf)
    weights = jnp.exp(scaled)  # No softmax: the largest of `scaled` is 0.
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _greedy(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
    """Returns all mass on the first of the largest logits; NaN where one of them is NaN."""
    tokens = jnp.arange(logits.shape[-1])
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # A minimum, and not argmax, which on a CPU takes thirty times as long.
    best = jnp.min(jnp.where(logits == largest, tokens, len(tokens)), axis=-1, keepdims=True)
    return jnp.where(jnp.isnan(largest), jnp.nan, tokens == best).astype(jnp.float32)
