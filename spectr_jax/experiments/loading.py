"""Trained models by name: the embedded ladder, a model file, the workdir of a training run; or random weights, to time."""

import dataclasses
import json
import pathlib
import zlib
from typing import NamedTuple

import jax
from flax import nnx

from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.errors import UserError, unknown
from spectr_jax.files import digest
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import LADDER, Transformer, TransformerConfig, abstract
from spectr_jax.models.weights import load_weights, weight_files
from spectr_jax.training.checkpoint import Checkpoints

EMBEDDED = pathlib.Path(__file__).parent.parent / "embedded"
DTYPES = ("float32", "bfloat16", "int8")
EMBEDDED_PREFIX = "embedded:"
RANDOM_PREFIX = "random:"
BEST = "@best"
HEAD_SCALE = 1.5
"""Of random weights: sharpens their laws until two models agree as the embedded pair does, in 0.7 of their drafts."""


class Trained(NamedTuple):
    """A model, its tokenizer, and what to call it."""

    name: str
    model: Transformer
    tokenizer: Tokenizer


def load_trained(spec: str, dtype: str = "float32") -> Trained:
    """Loads a model for decoding.

    Args:
      spec: `embedded:NAME`, a .safetensors file (or FOLDER/NAME, of one in parts) with its tokenizer.model beside it, or a
        training workdir (its newest checkpoint; with `@best` behind it, the one that did best on held-out sentences);
        `random:NAME` for a shape of the ladder with weights that were never trained, to measure time with.
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
    path = pathlib.Path(spec.removesuffix(BEST)).expanduser()
    if path.is_file() or weight_files(path):
        return _from_file(path, dtype)
    if (path / "config.json").is_file():
        return load_run(path, dtype, best=spec.endswith(BEST))
    raise UserError(
        f"no model at {spec!r}; give embedded:NAME, random:NAME, a .safetensors file or the workdir of a training run"
    )


def load_pair(target: str, drafts: tuple[str, ...], dtype: str) -> tuple[Trained, list[Trained]]:
    """Loads a target and its drafts; raises `UserError` unless all share one tokenizer."""
    loaded_target = load_trained(target, dtype)
    loaded = [load_trained(draft, dtype) for draft in drafts]
    for spec, draft in zip(drafts, loaded, strict=True):
        if draft.tokenizer.proto != loaded_target.tokenizer.proto:
            raise UserError(
                f"draft {spec!r} and target {target!r} have different vocabularies; train both with one data.tokenizer"
            )
    return loaded_target, loaded


def load_run(workdir: pathlib.Path, dtype: str = "float32", best: bool = False) -> Trained:
    """The newest checkpoint of a training run, or the one that did best on held-out sentences."""
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
