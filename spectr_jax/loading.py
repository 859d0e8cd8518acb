"""Trained models by name: the embedded ladder, a model file, a training run, a GPT-2; or random weights, to time."""

import dataclasses
import json
import pathlib
import zlib
from typing import NamedTuple

import jax
from flax import nnx

from spectr_jax.data.tokenizer import AnyTokenizer, Tokenizer
from spectr_jax.errors import UserError, unknown
from spectr_jax.files import digest
from spectr_jax.models.gpt2 import load_gpt2, read_config
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import LADDER, Transformer, TransformerConfig, abstract
from spectr_jax.models.weights import load_weights, weight_files
from spectr_jax.training.checkpoint import Checkpoints

EMBEDDED = pathlib.Path(__file__).parent / "embedded"
DTYPES = ("float32", "bfloat16", "int8")
EMBEDDED_PREFIX = "embedded:"
RANDOM_PREFIX = "random:"
HUGGING_FACE_PREFIX = "hf:"
BEST = "@best"
HEAD_SCALE = 1.5
"""Of random weights: sharpens their laws until two models agree as the embedded pair does, in 0.7 of their drafts."""


class Trained(NamedTuple):
    """A model, its tokenizer, and what to call it."""

    name: str
    model: Transformer
    tokenizer: AnyTokenizer


def load_trained(spec: str, dtype: str = "float32") -> Trained:
    """Loads a model for decoding.

    Args:
      spec: `embedded:NAME`, a .safetensors file (or FOLDER/NAME, of one in parts) with its tokenizer.model beside it, or a
        training workdir (its newest checkpoint; with `@best` behind it, the one that did best on held-out sentences);
        `hf:FOLDER` for a GPT-2 of Hugging Face's, or `hf:NAME` for one that its hub has; `random:NAME` for a shape of the
        ladder with weights that were never trained, to measure time with.
      dtype: one of `DTYPES`: of parameters and of the factors of products (`TransformerConfig`), or "int8" for
        `models.quantized`.

    Raises:
      UserError: nothing there, damaged, or with another tokenizer than it was trained with.
    """
    if dtype == "int8":
        trained = load_trained(spec)
        return trained._replace(model=quantize(trained.model))
    if spec.startswith(EMBEDDED_PREFIX):
        name = spec.removeprefix(EMBEDDED_PREFIX)
        known = [path.stem for path in EMBEDDED.glob("*.safetensors")]
        if name not in known:
            raise unknown("embedded model", name, known)
        return _from_file(EMBEDDED / f"{name}.safetensors", dtype)
    if spec.startswith(RANDOM_PREFIX):
        return _random(spec, dtype)
    if spec.startswith(HUGGING_FACE_PREFIX):
        return _from_hugging_face(spec.removeprefix(HUGGING_FACE_PREFIX), dtype)
    path = pathlib.Path(spec.removesuffix(BEST)).expanduser()
    if spec and (path.is_file() or weight_files(path)):
        return _from_file(path, dtype)
    if (path / "config.json").is_file():
        return load_run(path, dtype, best=spec.endswith(BEST))
    raise UserError(
        f"no model at {spec!r}; give embedded:NAME, random:NAME, hf:FOLDER, a .safetensors file or the workdir of a run"
    )


def load_pair(target: str, drafts: tuple[str, ...], dtype: str) -> tuple[Trained, list[Trained]]:
    """Loads a target and its drafts; raises `UserError` unless all share one tokenizer."""
    loaded_target = load_trained(target, dtype)
    loaded = [load_trained(draft, dtype) for draft in drafts]
    for spec, draft in zip(drafts, loaded, strict=True):
        if draft.tokenizer.vocabulary != loaded_target.tokenizer.vocabulary:
            raise UserError(
                f"draft {spec!r} and target {target!r} have different vocabularies; give models that share one, such as two "
                "that were trained with one data.tokenizer"
            )
    return loaded_target, loaded


def load_run(workdir: pathlib.Path, dtype: str = "float32", best: bool = False) -> Trained:
    """The newest checkpoint of a training run, or the one that did best on held-out sentences.

    Raises:
      UserError: `workdir` is not that of a training run, or has no checkpoint that can be read.
    """
    try:
        config = json.loads((workdir / "config.json").read_text())
        shape = TransformerConfig(**{**config["model"], "dtype": dtype, "dropout": 0.0})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(workdir)!r} is not the workdir of a training run ({error}); fix the path") from error
    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"no checkpoints in {str(workdir)!r}; train there first, or fix the path")
    tokenizer = Tokenizer(workdir / "tokenizer.model")
    graphdef, state = abstract(shape)
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        found = checkpoints.best() if best else None
        if best and found is None:
            raise UserError(f"no checkpoint in {str(workdir)!r} was evaluated; leave {BEST} out for the newest one")
        params = checkpoints.restore_params(like, found[0] if found else None)
    finally:
        checkpoints.close()
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)  # Checkpoints hold float32.
    return Trained(workdir.name, nnx.merge(graphdef, params), tokenizer)


def _from_file(path: pathlib.Path, dtype: str) -> Trained:
    model, tokenizer_digest = load_weights(path, dtype)
    tokenizer = Tokenizer(path.with_name("tokenizer.model"))
    if digest(tokenizer.proto) != tokenizer_digest:
        raise UserError(f"{str(path)!r} was trained with another tokenizer than the one beside it; put its own there")
    return Trained(path.stem, model, tokenizer)


def _from_hugging_face(source: str, dtype: str) -> Trained:
    from spectr_jax.data.hugging_face import HuggingFaceTokenizer  # Its libraries are needed here alone.

    folder = pathlib.Path(source).expanduser()
    if not folder.is_dir():
        if len(pathlib.PurePath(source).parts) > 2 or source.startswith((".", "/", "~")):
            raise UserError(f"no folder {source!r}; give hf: and the folder of a GPT-2, or its name on Hugging Face's hub")
        folder = _fetched(source)
    model, config = load_gpt2(folder, dtype), read_config(folder)
    bos, eos = config["bos_token_id"], config["eos_token_id"]
    for name, token in (("bos", bos), ("eos", eos)):
        if not isinstance(token, int) or not 0 <= token < model.vocab_size:  # Some models have a list of them.
            raise UserError(f"{str(folder)!r} has {name}_token_id={token}, no token of its vocabulary; mend config.json")
    tokenizer = HuggingFaceTokenizer(folder, bos, eos)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {str(folder)!r} has {tokenizer.vocab_size} tokens and its model {model.vocab_size}; put the "
            "model's own there"
        )
    return Trained(pathlib.PurePath(source).name, model, tokenizer)


def _fetched(name: str) -> pathlib.Path:
    """The folder with a model of Hugging Face's hub, which keeps what it has fetched in the user's cache."""
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.safetensors"]))
    except (OSError, ValueError) as error:  # No network, no such model, no such cache: the library has an error for each.
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no folder {name!r}, and the hub gave none ({reason}); give hf: and a GPT-2's folder") from error


def _random(spec: str, dtype: str) -> Trained:
    name = spec.removeprefix(RANDOM_PREFIX)
    if name not in LADDER:
        raise unknown("shape", name, LADDER)
    shape = dataclasses.replace(LADDER[name], dtype=dtype)
    model = Transformer(shape, rngs=nnx.Rngs(zlib.crc32(name.encode())))
    model.head.kernel[...] *= HEAD_SCALE
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(dtype), nnx.state(model)))
    return Trained(spec, model, Tokenizer(EMBEDDED / "tokenizer.model"))


def shape_name(config: TransformerConfig) -> str:
    """The parameters of a shape in words, such as `6M`, from the ladder's table; else its layers and width."""
    for name, shape in LADDER.items():
        if dataclasses.replace(config, dropout=shape.dropout, dtype=shape.dtype) == shape:
            return name.split("_")[1].upper()
    return f"{config.layers}x{config.width}"
