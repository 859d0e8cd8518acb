"""Reads EAGLE-3 heads in the layouts in which they are published.

All have config.json, and safetensors or pytorch_model.bin, with the same tensors:

- EAGLE's authors, AngelSlim and SpecForge: a flat config and `midlayer.*`. The authors declare
  `LlamaForCausalLM`, and some of their configs name the layers of the target, so the number of
  layers is that of the tensors. They leave out the embedding, which is the target's.
- speculators: the layer's fields nested in `transformer_layer_config`, and `layers.0.*`.

What the layouts number differently are the target layers that a head sees, here from 1:

- Not named: `models.eagle3.default_layers`, in all layouts.
- `eagle_aux_hidden_state_layer_ids` of the config (speculators, vLLM): state 0 is the embedding and
  state i the output of layer i, so the numbers are ours.
- The same within `eagle_config` (SpecForge, ModelOpt, SGLang): layers from 0, so one is added.
"""

import functools
import pathlib
import re
from typing import Any

import numpy as np

from spectr_jax.models.eagle3 import Eagle3, Eagle3Config
from spectr_jax.models.formats.folder import Folder, check_fields, check_known, refused
from spectr_jax.models.formats.hf_config import read_shape
from spectr_jax.models.formats.hf_llama import LAYER, NAMES
from spectr_jax.models.formats.parts import fill, llama_arrays
from spectr_jax.models.formats.tensors import INTEGERS, Unread, in_order
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import read_json

ARCHITECTURES = (
    *("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),
)
KNOWN: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": ("eagle3",),
    "quantization_config": (None,),
}
KNOWN_OF_EAGLE: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "return_hidden_post_norm": (False,),
    "parallel_draft_step": (1, None),
}
"""The supported values of fields of config.json, and of those in its `eagle_config`."""
FLAGS = {
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_joined",
    "fc_norm": "norm_each",
    "norm_output": "norm_output",
}
"""Our fields by those of config.json. One that is absent is false, as in speculators, which writes all
of them; only vLLM then takes `norm_before_residual` as true."""
IDS = "eagle_aux_hidden_state_layer_ids"
EMBED, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
FUSE, NORM_FEATURES = "fc.weight", "layers.0.hidden_norm.weight"
UNUSED = r"(model\.)?(t2d|d2t|verifier_(norm|lm_head)\.weight|.*\.rotary_emb\.inv_freq)"
"""Tensors that are ignored: the inverse of the map of tokens, parts of the target, and buffers."""


def load_eagle3(folder: pathlib.Path, dtype: str = "float32") -> Eagle3:
    """Reads a head. `Eagle3.completed` adds the parts that it takes from its target.

    Args:
      folder: has config.json, and model.safetensors or pytorch_model.bin.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.

    Raises:
      UserError: a file is missing or damaged, or the head is not supported; or as `fill`.
    """
    source, given, tensors = str(folder), read_json(folder / "config.json"), Folder(folder)
    names = {re.sub("^midlayer", "layers.0", name.removeprefix("model.")): name for name in tensors}
    if NORM_FEATURES not in names:
        raise UserError(
            f"{source!r} has no {NORM_FEATURES}: heads of EAGLE-1 and EAGLE-2, MTP modules and whole "
            "models are not read as EAGLE-3 heads; give an EAGLE-3 head"
        )

    def tensor(name: str) -> Unread:
        unread = tensors.unread(names[name.removeprefix("model.")])
        return unread.then(lambda rows: np.asarray(rows, np.float32))

    def read(name: str) -> Unread:
        if name not in names:
            raise UserError(f"{source!r} lacks {name!r}, a part of its model; fetch it again")
        return tensor(name)

    head, fuse = read(HEAD), read(FUSE)
    config = _config(folder, given, names, head.shape[0])
    if (inputs := fuse.shape[-1]) != config.fused * config.target_width:
        raise UserError(
            f"{source!r}: {FUSE} has {inputs} inputs, which are not {config.fused} layers of width "
            f"{config.target_width}; correct {IDS} or target_hidden_size, or fetch it again"
        )
    without = {"head"} if config.own_embed else {"head", "embed"}
    parts = {part: name for part, name in NAMES.items() if part not in without}
    arrays: list[tuple[str, Any]] = [
        *llama_arrays(config, tensor, parts, LAYER, source, first=2 * config.width),
        ("blocks/0/norm_features/scale", read(NORM_FEATURES)),
        ("fuse/kernel", fuse),
    ]
    norms = [f"fc_norm.{index}.weight" for index in range(config.fused)] if config.norm_each else []
    norms += ["input_norm.weight"] if config.norm_joined else []
    arrays += [(f"norms_fuse/{index}/scale", read(name)) for index, name in enumerate(norms)]
    if not config.head_tokens:
        arrays.append(("head/kernel", head))
    else:
        tokens = _tokens(source, config, tensors.unread(names[MAP], INTEGERS)[:])
        order = np.argsort(tokens)
        arrays.append(("head/tokens", tokens[order].astype(np.int32)))
        rows = functools.partial(in_order, head, order)
        arrays.append(("head/linear/kernel", Unread(head.shape, rows)))
    model = fill(config, arrays, dtype, source=source)
    tensors.check_all_read(UNUSED)
    return model


def _config(
    folder: pathlib.Path, given: dict[str, Any], names: dict[str, str], scored: int
) -> Eagle3Config:
    """Returns the shape of a head with these tensors, whose head scores `scored` tokens."""
    source = str(folder)
    nested, eagle = (given.get(name) for name in ("transformer_layer_config", "eagle_config"))
    for name, value in (("transformer_layer_config", nested), ("eagle_config", eagle)):
        if not isinstance(value, dict | None):
            raise refused(source, name, value, "an object")
    layer, eagle = given if nested is None else nested, eagle or {}
    check_known(source, given, KNOWN)
    check_known(source, eagle, KNOWN_OF_EAGLE)
    declared = given.get("architectures") or []
    if not all(name in ARCHITECTURES for name in declared):
        raise refused(source, "architectures", declared, f"one of {', '.join(ARCHITECTURES)}")
    sizes = ("draft_vocab_size", "target_hidden_size")
    check_fields(source, given, {"true or false": tuple(FLAGS), "a positive integer": sizes})
    check_known(source, layer, {"use_sliding_window": (False, None)})
    if kinds := set(layer.get("layer_types") or ()) - {"full_attention"}:
        raise refused(source, "layer_types", sorted(kinds), "full_attention")
    # Only a nested config says which layers it has; all others have those of Llama.
    kind = "llama" if nested is None else layer.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise refused(source, "model_type", kind, "'llama' or 'qwen3'")
    indices = [re.match(r"layers\.(\d+)\.", name) for name in names]
    layers = 1 + max(int(index[1]) for index in indices if index)
    # `layer_types`, all full, may be the target's.
    fields = {name: value for name, value in layer.items() if name != "layer_types"}
    fields |= {"num_hidden_layers": layers, "tie_word_embeddings": False}
    shape = read_shape(folder, fields | {"model_type": kind}).config
    flags: dict[str, Any] = {ours: bool(given.get(name)) for name, ours in FLAGS.items()}
    if flags["norm_joined"] and flags["norm_each"]:
        raise refused(source, "fc_norm", True, "false with norm_before_fc")
    scored = given.get("draft_vocab_size") or scored
    if scored != shape.vocab_size and MAP not in names:
        raise UserError(
            f"{source!r} scores {scored} of {shape.vocab_size} tokens and lacks {MAP!r}, which says "
            "which; fetch it again"
        )
    return Eagle3Config(
        **vars(shape) | {"head_tokens": 0 if scored == shape.vocab_size else scored},
        target_width=given.get("target_hidden_size") or shape.width,
        target_layers=_layers(source, given, eagle),
        own_embed=EMBED in names,
        **flags,
    )


def _layers(source: str, given: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...]:
    """Returns the target layers, from 1, that a head names; empty if it names none."""
    ids = given.get(IDS) or eagle.get(IDS) or []
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
        raise refused(source, IDS, ids, "a list of layers")
    layers = tuple(index + (not given.get(IDS)) for index in ids)
    if len({*layers}) < len(layers) or min(layers, default=1) < 1:
        raise refused(source, IDS, ids, "distinct layers of the target")
    return layers


def _tokens(source: str, config: Eagle3Config, offsets: np.ndarray) -> np.ndarray:
    """Returns the tokens that a head scores; `offsets` say how far each is from its index."""
    tokens = np.arange(len(offsets)) + offsets
    within = len(tokens) and tokens.min() >= 0 and tokens.max() < config.vocab_size
    if not within or len(np.unique(tokens)) < len(tokens) or len(tokens) != config.head_tokens:
        raise UserError(
            f"{source!r}: {MAP!r} must name {config.head_tokens} different tokens of "
            f"{config.vocab_size}; fetch it again"
        )
    return tokens
