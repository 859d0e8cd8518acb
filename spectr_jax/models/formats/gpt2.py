"""GPT-2 checkpoints in Hugging Face's layout: those of its family are read, and our decoders are
written as such.

A decoder of the ladder differs from a GPT-2 in three things. Its sinusoidal positions become an
embedding, attention gets biases of zero, and the bias of its head, which GPT-2 lacks, becomes one
more channel per head (`_with_bias_channel`).
"""

import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from spectr_jax.models.formats.folder import Folder, check_sizes, read_json, refuse, save
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import Transformer, TransformerConfig, sinusoidal_table
from spectr_jax.models.weights import from_arrays
from spectr_jax.utils.errors import UserError

PREFIX = "transformer."
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")  # Which is JAX's gelu.
EXPECTED = {
    "model_type": ("gpt2",),
    "activation_function": TANH_GELU,
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
DEFAULTS = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
"""What config.json may leave out."""
SIZES = ("n_layer", "n_embd", "n_head", "n_inner", "vocab_size", "n_positions")
OURS_TO_THEIRS = {
    "norm_attention": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_mlp": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}

UNUSED = r"lm_head\.weight|.*\.attn\.(masked_)?bias"
"""Tensors that may be there unread: a head that is tied, and the masks that older versions of
transformers saved."""

Tensors = dict[str, np.ndarray]


def load_gpt2(folder: pathlib.Path, dtype: str = "float32") -> Transformer:
    """Reads a GPT-2 checkpoint for decoding.

    Args:
      folder: with config.json and model.safetensors, or its parts and their index.
      dtype: "float32" or "bfloat16", of parameters and factors, or "int8", whatever the files hold.

    Raises:
      UserError: a file is missing or damaged, or the model is not of GPT-2's family.
    """
    config = read_config(folder)
    try:
        shape = TransformerConfig(
            layers=config["n_layer"],
            width=config["n_embd"],
            mlp=config["n_inner"] or 4 * config["n_embd"],
            heads=config["n_head"],
            vocab_size=config["vocab_size"],
            context=config["n_positions"],
            dtype="float32" if dtype == "int8" else dtype,
            norm_epsilon=config["layer_norm_epsilon"],
            attention_bias=True,
            learned_positions=True,
        )
        tensors = Folder(folder)
        if not config["tie_word_embeddings"] and "lm_head.weight" not in tensors:
            raise UserError(
                f"{str(folder)!r} has tie_word_embeddings=False and no 'lm_head.weight'; fetch it "
                "again with its head"
            )
        arrays = dict(_ours(shape, tensors, tied=config["tie_word_embeddings"]))
        tensors.check_all_read(UNUSED)
    except KeyError as error:
        raise UserError(
            f"{str(folder)!r} is not a complete GPT-2 checkpoint: it lacks {error}; save or fetch it "
            "again"
        ) from error
    except UserError:
        raise
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{str(folder)!r} has weights that cannot be read ({error}); save or fetch it again"
        ) from error
    model = from_arrays(shape, arrays, str(folder))
    return quantize(model) if dtype == "int8" else model


def save_gpt2(
    folder: pathlib.Path, model: Transformer, bos: int | None = None, eos: int | None = None
) -> None:
    """Writes a GPT-2 checkpoint in float32, config.json and model.safetensors, each whole or not at
    all.

    Args:
      folder: made if it is not there.
      model: what to write; with a head bias that is not zero the checkpoint is a channel a head
        wider than the model.
      bos: id of BOS, for the config.
      eos: id of EOS, for the config.
    """
    config, tensors = gpt2_config(model.config), gpt2_tensors(model)
    if np.any(bias := tensors.pop("lm_head.bias")):
        config, tensors = _with_bias_channel(config, tensors, bias)
    save(folder, {**config, "bos_token_id": bos, "eos_token_id": eos}, tensors)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns a GPT-2's config.json with its defaults; raises `UserError` if it is not there,
    damaged, or of another family."""
    given = read_json(folder)
    config = {**DEFAULTS, **given}
    for name, known in EXPECTED.items():
        if config.get(name) not in known:
            raise UserError(
                f"{str(folder)!r} has {name}={config.get(name)!r}; only models of GPT-2's family "
                f"with {known[0]!r} are read"
            )
    _check_fields(folder, config)
    return config


def _check_fields(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Raises `UserError` for a value that is not of its field's kind; what is missing is found when
    it is read."""

    check_sizes(folder, config, SIZES)
    epsilon = config["layer_norm_epsilon"]
    if type(epsilon) not in (int, float) or not 0 <= epsilon < math.inf:
        refuse(folder, config, "layer_norm_epsilon", "a number from 0 on")
    if type(config["tie_word_embeddings"]) is not bool:
        refuse(folder, config, "tie_word_embeddings", "true or false")
    if {"n_embd", "n_head"} <= config.keys() and config["n_embd"] % config["n_head"]:
        refuse(folder, config, "n_head", f"a divisor of n_embd={config['n_embd']}")


def gpt2_config(config: TransformerConfig) -> dict[str, Any]:
    """Returns Hugging Face's config of a decoder of this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "activation_function": TANH_GELU[0],
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": False,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "dtype": "float32",
    }


def gpt2_tensors(model: Transformer) -> Tensors:
    """Returns float32 tensors by Hugging Face's names, and `lm_head.bias`, which GPT-2 does not
    have."""
    config = model.config
    positions = (
        model.positions[...]
        if config.learned_positions
        else sinusoidal_table(config.context, config.width)
    )
    tensors = {
        f"{PREFIX}wte.weight": _float32(model.embed.embedding[...]),
        f"{PREFIX}wpe.weight": _float32(positions),
    }
    head, head_bias = _weight_and_bias(model, "head")
    tensors |= {"lm_head.weight": np.ascontiguousarray(head.T), "lm_head.bias": head_bias}
    norm, norm_bias = _weight_and_bias(model, "norm")
    tensors |= {f"{PREFIX}ln_f.weight": norm, f"{PREFIX}ln_f.bias": norm_bias}
    for layer, block in enumerate(model.blocks):
        for ours, theirs in OURS_TO_THEIRS.items():
            weight, bias = _weight_and_bias(block, ours)
            tensors |= {
                f"{PREFIX}h.{layer}.{theirs}.weight": weight,
                f"{PREFIX}h.{layer}.{theirs}.bias": bias,
            }
    return tensors


def _weight_and_bias(block: nnx.Module, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tensors of a Conv1D of Hugging Face: its weight is [in, out], as ours is, and it
    always has a bias."""
    part = getattr(block, name)
    weight = _float32((part.scale if name.startswith("norm") else part.kernel)[...])
    return weight, np.zeros(weight.shape[-1], np.float32) if part.bias is None else _float32(
        part.bias[...]
    )


def _with_bias_channel(
    config: dict[str, Any], tensors: Tensors, bias: np.ndarray
) -> tuple[dict[str, Any], Tensors]:
    """Returns the same decoder, wider by a channel a head, with `bias` [V] in its head.

    The last norm holds the first new channel at 1, and the head's weights from there are the bias;
    all other parts read and write nothing there. The old channels are kept at a mean of 0, which
    norms take off anyway, so that the new ones change nothing but the number that a norm divides
    by: its epsilon and its scale take account of that. Queries take account of the wider head, by
    whose root GPT-2 divides.
    """
    E, H = config["n_embd"], config["n_head"]
    wide, ratio = E + H, E / (E + H)

    def pad(array, *widths):
        return np.pad(array, [(0, width) for width in widths])

    def heads(array):  # [..., 3 E] of queries, keys and values
        split = array.reshape(*array.shape[:-1], 3, H, E // H).copy()
        split[..., 0, :, :] *= math.sqrt((E // H + 1) / (E // H))
        return pad(split, *[0] * (split.ndim - 1), 1).reshape(*array.shape[:-1], 3 * wide)

    def rewritten(name, array):
        kind = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        matrix = name.endswith("weight") and not kind.startswith("ln_")
        if kind in ("wte", "wpe") or name.endswith("mlp.c_proj.weight"):
            return pad(_centred(array), 0, H)
        if name.endswith("attn.c_proj.weight"):
            by_head = pad(_centred(array).reshape(H, E // H, E), 0, 1, 0)
            return pad(by_head.reshape(wide, E), 0, H)
        if kind == "c_proj":
            return pad(_centred(array), H)
        if kind == "c_attn":
            return pad(heads(array), H, 0) if matrix else heads(array)
        if kind == "c_fc":
            return pad(array, H, 0) if matrix else array
        if kind.startswith("ln_"):
            return pad(array * math.sqrt(ratio) if name.endswith("weight") else array, H)
        return pad(array, 0, H)  # The head's [V, E].

    made = {
        name: np.ascontiguousarray(rewritten(name, array), np.float32)
        for name, array in tensors.items()
    }
    made[f"{PREFIX}ln_f.bias"][E] = 1
    made["lm_head.weight"][:, E] = bias
    return {
        **config,
        "n_embd": wide,
        "layer_norm_epsilon": config["layer_norm_epsilon"] * ratio,
    }, made


def _centred(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(-1, keepdims=True)


def _ours(
    shape: TransformerConfig, tensors: Folder, *, tied: bool
) -> Iterator[tuple[str, jax.Array]]:
    """Arrays by our names, in the model's dtype before the next is read.

    The head is the embedding where they are tied, whatever the file has, and has no bias.
    """
    names = {name.removeprefix(PREFIX): name for name in tensors}  # Some files have none.

    def read(ours: str, theirs: str, transposed: bool = False) -> tuple[str, jax.Array]:
        array = tensors[names[theirs]]
        made = jnp.asarray(array.T if transposed else array, shape.dtype)
        return f"{ours}/value", jax.block_until_ready(
            made
        )  # Else arrays that are still to be copied stay in memory.

    yield read("embed/embedding", "wte.weight")
    yield read("positions", "wpe.weight")
    yield read("norm/scale", "ln_f.weight")
    yield read("norm/bias", "ln_f.bias")
    yield read("head/kernel", "wte.weight" if tied else "lm_head.weight", transposed=True)
    yield "head/bias/value", jnp.zeros(shape.vocab_size)
    for layer in range(shape.layers):
        for ours, theirs in OURS_TO_THEIRS.items():
            weight = "scale" if ours.startswith("norm") else "kernel"
            yield read(f"blocks/{layer}/{ours}/{weight}", f"h.{layer}.{theirs}.weight")
            yield read(f"blocks/{layer}/{ours}/bias", f"h.{layer}.{theirs}.bias")


def _float32(array) -> np.ndarray:
    return np.asarray(array, np.float32)
