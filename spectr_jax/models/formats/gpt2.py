"""Reads GPT-2 checkpoints in Hugging Face's layout."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spectr_jax.models.formats.folder import Folder, check_fields, check_known, refused
from spectr_jax.models.formats.parts import fill
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import read_json

KNOWN: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # Both are `jax.nn.gelu`.
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""The supported values of fields."""
DEFAULTS: dict[str, Any] = {
    "model_type": None,
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


def load_gpt2(
    folder: pathlib.Path, dtype: str = "float32", mesh: Mesh | None = None
) -> Transformer:
    """Reads a GPT-2 checkpoint for decoding.

    Args:
      folder: has config.json and model.safetensors, or its parts and their index.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.
      mesh: as in `fill`.

    Raises:
      UserError: a file is missing or damaged, or the model is not of GPT-2's family; or as `fill`.
    """
    config = read_config(folder)
    try:
        fields = {ours: config[theirs] for ours, theirs in SHAPE.items()}
        shape = TransformerConfig(
            **fields | {"mlp": config["n_inner"] or 4 * config["n_embd"]},
            attention_bias=True,
            learned_positions=True,
        )
        tensors = Folder(folder)
        arrays = _ours(shape, tensors, tied=config["tie_word_embeddings"])
        model = fill(shape, arrays, dtype, source=str(folder), mesh=mesh)
    except KeyError as error:
        raise UserError(
            f"{str(folder)!r} is not a complete GPT-2 checkpoint: it lacks {error}; fetch it again"
        ) from error
    tensors.check_all_read(UNUSED)
    return model


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns a GPT-2's config.json with its defaults.

    Raises:
      UserError: the file is missing or damaged, or the model is of another family.
    """
    given = read_json(folder / "config.json")
    config = DEFAULTS | {name: value for name, value in given.items() if value is not None}
    check_known(str(folder), config, KNOWN)
    check_fields(str(folder), config, FIELDS)
    if {"n_embd", "n_head"} <= config.keys() and config["n_embd"] % config["n_head"]:
        wanted = f"a divisor of n_embd={config['n_embd']}"
        raise refused(str(folder), "n_head", config["n_head"], wanted)
    return config


def _ours(
    shape: TransformerConfig, tensors: Folder, *, tied: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields arrays by our names, for `fill`.

    A tied head is the embedding, even if the file has another. GPT-2's head has no bias.
    """
    names = {name.removeprefix("transformer."): name for name in tensors}  # In some files.

    def read(name: str) -> np.ndarray:
        return tensors[names[name]]

    yield "head/kernel", read("wte.weight" if tied else "lm_head.weight")
    yield "head/bias", np.zeros(shape.vocab_size)
    yield "embed/embedding", read("wte.weight")
    yield "positions", read("wpe.weight")
    yield "norm/scale", read("ln_f.weight")
    yield "norm/bias", read("ln_f.bias")
    for layer in range(shape.layers):
        for theirs, ours in BLOCK.items():
            weight = "scale" if ours.startswith("norm") else "kernel"
            # A kernel of GPT-2 is [inputs, outputs]; a scale has one axis.
            yield f"blocks/{layer}/{ours}/{weight}", read(f"h.{layer}.{theirs}.weight").T
            yield f"blocks/{layer}/{ours}/bias", read(f"h.{layer}.{theirs}.bias")
