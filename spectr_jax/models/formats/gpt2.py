"""GPT-2 checkpoints in Hugging Face's layout: reads them, and writes our decoders as such.

A decoder of the ladder differs from a GPT-2 in three ways. In a checkpoint its sinusoidal positions
become an embedding, its attention gets biases of zero, and the bias of its head, which GPT-2 lacks,
becomes one more channel per head (`_with_bias_channel`).
"""

import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from spectr_jax.models.formats.folder import Folder, check_fields, read_json, refuse, save
from spectr_jax.models.formats.parts import fill
from spectr_jax.models.transformer import Transformer, TransformerConfig, sinusoidal_table
from spectr_jax.models.weights import named_leaves
from spectr_jax.utils.errors import UserError

PREFIX = "transformer."
EXPECTED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # Both are `jax.nn.gelu`.
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
DEFAULTS: dict[str, Any] = {
    name: values[0] for name, values in EXPECTED.items() if name != "model_type"
} | {
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
"""Values of fields that config.json may leave out."""
SHAPE = {
    "layers": "n_layer",
    "width": "n_embd",
    "mlp": "n_inner",
    "heads": "n_head",
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
}
"""Fields of config.json by those of `TransformerConfig`."""
FIELDS = {
    "a positive integer": tuple(SHAPE.values())[:-1],
    "a non-negative number": ("layer_norm_epsilon",),
    "true or false": ("tie_word_embeddings",),
}
BLOCK = {
    "ln_1": "norm_attention",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "ln_2": "norm_mlp",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}
"""Our names of the parts of a layer, by GPT-2's."""
UNUSED = r"lm_head\.weight|.*\.attn\.(masked_)?bias"
"""Tensors that are ignored: a head that is tied, and masks of older versions of transformers."""
Tensors = dict[str, np.ndarray]


def load_gpt2(folder: pathlib.Path, dtype: str = "float32") -> Transformer:
    """Reads a GPT-2 checkpoint for decoding.

    Args:
      folder: has config.json and model.safetensors, or its parts and their index.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.

    Raises:
      UserError: a file is missing or damaged, or the model is not of GPT-2's family.
    """
    config = read_config(folder)
    try:
        fields = {ours: config[theirs] for ours, theirs in SHAPE.items()}
        shape = TransformerConfig(
            **fields | {"mlp": config["n_inner"] or 4 * config["n_embd"]},
            dtype="float32" if dtype == "int8" else dtype,
            attention_bias=True,
            learned_positions=True,
        )
        tensors = Folder(folder)
        arrays = _ours(shape, tensors, tied=config["tie_word_embeddings"])
        model = fill(shape, arrays, int8=dtype == "int8", source=str(folder))
    except KeyError as error:
        raise UserError(
            f"{str(folder)!r} is not a complete GPT-2 checkpoint: it lacks {error}; fetch it again"
        ) from error
    tensors.check_all_read(UNUSED)
    return model


def save_gpt2(
    folder: pathlib.Path, model: Transformer, bos: int | None = None, eos: int | None = None
) -> None:
    """Writes a GPT-2 checkpoint in float32: config.json and model.safetensors, each atomically.

    Args:
      folder: made if it does not exist.
      model: the decoder; if its head has a bias, the checkpoint is a channel a head wider.
      bos: id of BOS, for the config.
      eos: id of EOS, for the config.
    """
    config, tensors = gpt2_config(model.config), gpt2_tensors(model)
    if np.any(bias := tensors.pop("lm_head.bias")):
        config, tensors = _with_bias_channel(config, tensors, bias)
    save(folder, {**config, "bos_token_id": bos, "eos_token_id": eos}, tensors)


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns a GPT-2's config.json with its defaults.

    Raises:
      UserError: the file is missing or damaged, or the model is of another family.
    """
    config = DEFAULTS | read_json(folder)
    for name, known in EXPECTED.items():
        if config.get(name) not in known:
            raise UserError(
                f"{str(folder)!r} has {name}={config.get(name)!r}; only models of GPT-2's family "
                f"with {known[0]!r} are read"
            )
    check_fields(folder, config, FIELDS)
    if {"n_embd", "n_head"} <= config.keys() and config["n_embd"] % config["n_head"]:
        refuse(folder, config, "n_head", f"a divisor of n_embd={config['n_embd']}")
    return config


def gpt2_config(config: TransformerConfig) -> dict[str, Any]:
    """Returns Hugging Face's config of a decoder of this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE.items()},
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "dtype": "float32",
    }


def gpt2_tensors(model: Transformer) -> Tensors:
    """Returns float32 tensors by Hugging Face's names, and `lm_head.bias`, which GPT-2 lacks."""
    leaves = named_leaves(nnx.state(model))
    config, tensors = model.config, {}
    for theirs, ours in _names(config.layers):
        leaf = leaves.get(f"{ours}/value")
        if leaf is None and ours == "positions":
            leaf = sinusoidal_table(config.context, config.width)
        elif leaf is None:  # A bias.
            leaf = np.zeros(leaves[f"{ours.removesuffix('bias')}kernel/value"].shape[-1])
        tensors[PREFIX + theirs] = np.asarray(leaf, np.float32)
    head = np.asarray(leaves["head/kernel/value"], np.float32)
    tensors["lm_head.weight"] = np.ascontiguousarray(head.T)
    return tensors | {"lm_head.bias": np.asarray(leaves["head/bias/value"], np.float32)}


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """Yields GPT-2's names and ours, except for the head. A Conv1D is [in, out], as our kernels."""
    yield from (("wte.weight", "embed/embedding"), ("wpe.weight", "positions"))
    yield from (("ln_f.weight", "norm/scale"), ("ln_f.bias", "norm/bias"))
    for layer in range(layers):
        for theirs, ours in BLOCK.items():
            weight = "scale" if ours.startswith("norm") else "kernel"
            yield f"h.{layer}.{theirs}.weight", f"blocks/{layer}/{ours}/{weight}"
            yield f"h.{layer}.{theirs}.bias", f"blocks/{layer}/{ours}/bias"


def _with_bias_channel(
    config: dict[str, Any], tensors: Tensors, bias: np.ndarray
) -> tuple[dict[str, Any], Tensors]:
    """Returns the same decoder with one more channel per head, and `bias` [V] in its output head.

    The last norm gives 1 in the first new channel, whose weights in the head are the bias; no other
    part reads or writes a new channel. The old channels are centred, which changes nothing since
    norms subtract their mean. The new ones then change only the number that a norm divides by, for
    which its epsilon and scale compensate. Queries compensate for the root of the wider head, by
    which GPT-2 divides.
    """
    E, H = config["n_embd"], config["n_head"]
    D, wide, ratio = E // H, E + H, E / (E + H)

    def pad(array, *widths):
        return np.pad(array, [(0, width) for width in widths])

    def pad_last(array):
        return pad(array, *[0] * (array.ndim - 1), H)

    def by_head(array):  # [..., 3 E] of queries, keys and values
        split = array.reshape(*array.shape[:-1], 3, H, D).copy()
        split[..., 0, :, :] *= math.sqrt((D + 1) / D)
        return pad(split, *[0] * (split.ndim - 1), 1).reshape(*array.shape[:-1], 3 * wide)

    def rewritten(name, array):
        *_, module, kind = name.split(".")
        if module == "c_attn":
            array = by_head(array)
        if module in ("c_attn", "c_fc"):  # They read the residual stream.
            return pad(array, H, 0) if kind == "weight" else array
        if module in ("wte", "wpe", "c_proj"):  # They write it.
            array = array - array.mean(-1, keepdims=True)
        if name.endswith("attn.c_proj.weight"):
            array = pad(array.reshape(H, D, E), 0, 1, 0).reshape(wide, E)
        if module.startswith("ln_") and kind == "weight":
            array = array * math.sqrt(ratio)
        return pad_last(array)

    made = {
        name: np.ascontiguousarray(rewritten(name, array), np.float32)
        for name, array in tensors.items()
    }
    made[f"{PREFIX}ln_f.bias"][E] = 1
    made["lm_head.weight"][:, E] = bias
    epsilon = config["layer_norm_epsilon"] * ratio
    return {**config, "n_embd": wide, "layer_norm_epsilon": epsilon}, made


def _ours(
    shape: TransformerConfig, tensors: Folder, *, tied: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields arrays by our names, for `fill`.

    A tied head is the embedding, even if the file has another. GPT-2's head has no bias.
    """
    names = {name.removeprefix(PREFIX): name for name in tensors}  # Some files have no prefix.
    yield "head/kernel", tensors[names["wte.weight" if tied else "lm_head.weight"]]
    yield "head/bias", np.zeros(shape.vocab_size)
    for theirs, ours in _names(shape.layers):
        array = tensors[names[theirs]]
        yield ours, array.T if ours.endswith("kernel") else array
