"""Eight-bit products for decoding: a call reads a quarter of the bytes.

Weights have a scale for each output, activations one for each token (vector-wise quantisation: Dettmers et al., 2022,
arXiv 2208.07339, section 2), and products are summed in int32. The output follows the distribution of the quantised
model exactly, whatever the method; `configs/quality.py` measures how far that is from the original model.

Models of the Llama family have channels far larger than the rest (the same paper, section 3), beside which eight bits leave
little. Their activations are two int8 rows: the second is what the first rounds off. A single token needs a second row on a
CPU anyway (`dense.pair_lone_row`), so that this costs nothing there.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.errors import UserError
from spectr_jax.models.layers.dense import pair_lone_row
from spectr_jax.models.llama import Llama
from spectr_jax.models.transformer import Transformer
from spectr_jax.models.vocabulary import NarrowEmbed, PartialHead

LARGEST = 127
Decoder = TypeVar("Decoder", Transformer, Llama)


class Int8Linear(nnx.Module):
    """A linear layer with an int8 kernel [outputs, inputs] and activations of one int8 row a token, or two if `fine`.

    Raises `UserError` if the kernel of `linear` is of integers.
    """

    def __init__(self, linear: Any, *, fine: bool = False):
        if not jnp.issubdtype(linear.kernel.dtype, jnp.floating):
            raise UserError(f"a kernel of {linear.kernel.dtype} cannot be quantized; give a model in float32 or bfloat16")
        kernel = jnp.asarray(linear.kernel[...], jnp.float32)
        whole, scale = quantized(kernel.T)
        self.fine = fine
        self.kernel, self.scale = nnx.Param(whole), nnx.Param(scale[:, 0])
        self.bias = None if linear.bias is None else nnx.Param(jnp.asarray(linear.bias[...], jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Float32 [..., outputs] of float32 [..., inputs]."""
        result = _product(x, self.kernel[...], self.scale[...], self.fine)
        return result if self.bias is None else result + self.bias[...]


class Int8Embed(nnx.Module):
    """An embedding that is the head too: int8 rows [V, E] with a scale for each token."""

    def __init__(self, embed: nnx.Embed):
        whole, scale = quantized(jnp.asarray(embed.embedding[...], jnp.float32))
        self.kernel, self.scale = nnx.Param(whole), nnx.Param(scale[:, 0])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 [..., E] of tokens [...]."""
        return self.kernel[...][tokens].astype(jnp.float32) * self.scale[...][tokens][..., None]

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] of float32 [..., E]."""
        return _product(x, self.kernel[...], self.scale[...], fine=True)


def _product(x: jax.Array, kernel: jax.Array, scale: jax.Array, fine: bool) -> jax.Array:
    """Float32 [..., outputs] of float32 `x` [..., inputs], an int8 kernel [outputs, inputs] and its scales [outputs]."""
    rows = x.reshape(-1, x.shape[-1])
    if jax.default_backend() == "gpu":  # XLA (jax 0.11) fails there on a transpose fused with a conversion to int8.
        rows = jax.lax.optimization_barrier(rows)
    whole, row_scale = quantized(rows)
    if fine:  # What is rounded off is at most half a scale: 127 parts of it.
        rest = jnp.round((rows - whole.astype(jnp.float32) * row_scale) / row_scale * (2 * LARGEST)).astype(jnp.int8)
        factors = jnp.concatenate([whole, rest])
    else:
        factors = pair_lone_row(whole)
    product = jax.lax.dot_general(factors, kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    summed = product[: len(whole)].astype(jnp.float32)
    if fine:
        summed += product[len(whole) :].astype(jnp.float32) / (2 * LARGEST)
    result = summed * row_scale * scale
    return result.reshape(*x.shape[:-1], -1)


def quantized(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [R, C] and float32 scales [R, 1], whose product is nearest to `rows` [R, C]."""
    scale = jnp.maximum(jnp.max(jnp.abs(rows), axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny) / LARGEST
    return jnp.round(rows / scale).astype(jnp.int8), scale


def quantize(model: Decoder) -> Decoder:
    """A copy of a float32 model with int8 products; norms, the cache, and an embedding that is not the head stay float32.

    Raises:
      UserError: the model is quantized already, or no decoder of ours.
    """
    if not isinstance(model, (Transformer, Llama)):
        raise UserError(f"a {type(model).__name__} has no int8 products; give float32 or bfloat16")
    copy: Any = nnx.clone(model)
    ends: list[Any] = [end for end in (copy.embed, copy.head) if isinstance(end, NarrowEmbed | PartialHead)]
    for module in (copy, *copy.blocks, *ends):
        for name, part in list(vars(module).items()):
            if isinstance(part, (nnx.Linear, Int8Linear)):
                setattr(module, name, Int8Linear(part, fine=isinstance(model, Llama)))
    if copy.head is None:
        copy.embed = Int8Embed(copy.embed)
    return copy
