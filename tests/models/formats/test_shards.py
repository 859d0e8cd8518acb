"""Models that are loaded straight into shards on a mesh: their arrays, bytes, reads, logits and tokens.

One process of eight devices and two processes of four load the same files.
"""

import dataclasses
import re

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from helpers import answers, free_port, names_in, started
from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.models import parallel
from spectr_jax.models.formats import hf_llama
from spectr_jax.models.formats.weights import save_weights
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import memory, sharding
from spectr_jax.utils.errors import UserError

# Two processes are started once for all tests.
pytestmark = [pytest.mark.xdist_group("shards"), pytest.mark.slow]

write_gguf = names_in("tests/models/formats/test_gguf.py").write

LLAMA = LlamaConfig(
    layers=2, width=32, mlp=48, heads=8, kv_heads=2, head_width=6, vocab_size=304, context=64
)
MODELS = {
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied=True, kv_heads=8),
    "ours": TransformerConfig(layers=2, width=32, mlp=48, heads=8, vocab_size=304, context=64),
    "student": dataclasses.replace(LLAMA, embed_rank=4, head_tokens=20),
}
PROGRAM = """
import json, pathlib, sys
folder, *flags = sys.argv[1:]
folder = pathlib.Path(folder)
from spectr_jax.utils import hosts, sharding
if flags:
    hosts.connect(flags[0], 2, int(flags[1]))
import jax
import numpy as np
from spectr_jax import Policy, generate, get_method, load
from spectr_jax.models import parallel
from spectr_jax.models.formats.gguf import GGUF, load_gguf
from spectr_jax.models.formats.hf_llama import load_llama
from spectr_jax.models.frozen import digest, freeze
from spectr_jax.models.quantized import quantize
from spectr_jax.models.formats.weights import load_weights, named_leaves
from spectr_jax.sampling import session
from spectr_jax.utils.errors import UserError

def ours(name):
    def read(dtype, mesh=None):
        model = load_weights(folder / name, "float32" if dtype == "int8" and mesh is None else dtype, mesh)[0]
        return quantize(model) if dtype == "int8" and mesh is None else model
    return read

readers = {
    "qwen3": lambda *given: load_llama(folder / "qwen3", *given),
    "qwen2": lambda *given: load_llama(folder / "qwen2", *given),
    "gguf": lambda *given: load_gguf(GGUF(folder / "model.gguf"), *given),
    "ours": ours("ours"),
    "student": ours("student"),
}

def shards(frozen):
    leaves = named_leaves(jax.tree.unflatten(frozen.structure, frozen.leaves)).items()
    every = [(name, shard) for name, leaf in leaves for shard in leaf.addressable_shards]
    return {(name, shard.device.id): np.asarray(shard.data) for name, shard in every}

def same(loaded, placed):
    ours, theirs = shards(loaded), shards(placed)
    return ours.keys() == theirs.keys() and all(
        part.dtype == theirs[name].dtype and np.array_equal(part, theirs[name]) for name, part in ours.items()
    )

def positions(logits):
    return np.broadcast_to(np.arange(logits), (1, logits))

@jax.jit
def scored(frozen, tokens):
    return frozen.merge().extend(tokens, positions(tokens.shape[1]), np.tri(tokens.shape[1], dtype=bool)[None])[0]

found = {"differ": [], "replaced": [], "bytes": {}, "read": {}, "logits": {}}
counted, fromfile = [], np.fromfile
def count(file, dtype, items, **options):
    counted.append(items * np.dtype(dtype).itemsize)
    return fromfile(file, dtype, items, **options)
np.fromfile = count
tokens = np.arange(1, 13)[None] * 7
for kind, read in readers.items():
    for dtype in ("float32", "bfloat16", "int8"):
        whole = read(dtype)
        for model in (8,) if flags else (8, 4, 2) if dtype == "float32" else (4,):
            mesh, label = sharding.make_mesh(model=model), f"{kind} {dtype} {model}"
            counted.clear()
            loaded = freeze(read(dtype, mesh))
            found["read"][label] = sum(counted)
            if not same(loaded, parallel.on_mesh(mesh, whole)):
                found["differ"].append(label)
            if parallel.on_mesh(mesh, loaded) is not loaded:
                found["replaced"].append(label)
            held = {}
            for (_, device), part in shards(loaded).items():
                held[device] = held.get(device, 0) + part.nbytes
            found["bytes"][label] = sorted(held.values())
            if dtype == "float32" and kind in ("qwen3", "ours") and not flags:
                error = np.max(np.abs(np.asarray(scored(loaded, tokens)) - np.asarray(scored(freeze(whole), tokens))))
                found["logits"][label] = float(error)
if not flags:
    found["tokens"] = []
    spec, prompts = f"hf:{folder / 'qwen3'}", np.arange(1, 25).reshape(4, 6)
    lengths, method = np.array([6, 4, 5, 1]), get_method("baseline")
    assert load("random:draft_6m", "bfloat16", sharding.make_mesh(model=4)).model.config.shards == 4
    for given, dtype, model in ((spec, "float32", 8), ("6m", "int8", 4)):
        mesh = sharding.make_mesh(model=model)
        models = [(None, load(given, dtype)), (mesh, load(given, dtype, mesh))]
        for policy in (Policy(), Policy(0.0)):
            rest = None, prompts, lengths, 8, policy
            runs = [generate(jax.random.key(0), method, model, *rest, mesh=where) for where, model in models]
            found["tokens"].append([np.asarray(run.tokens).tolist() for run in runs])
    opened = session.open_session(None, "6m", "2m", "float32", 6, Policy(), mesh=mesh)
    models = opened.target_model, opened.draft_model
    placed = parallel.on_mesh(mesh, models[0]), parallel.draft_on_mesh(mesh, models[1])
    found["session"] = [there is each for there, each in zip(placed, models, strict=True)]
    found["session"] += [each.merge().config.shards for each in models]
    found["refused"] = {}
    three = sharding.make_mesh(model=3, devices=jax.devices()[:3])
    for label, mesh in {"flat": jax.make_mesh((8,), ("model",)), "three": three, "one": 1}.items():
        counted.clear()
        try:
            load(spec, "float32", mesh)
        except UserError as error:
            found["refused"][label] = str(error), sum(counted)
else:
    found["digest"] = digest(readers["qwen3"]("float32", sharding.make_mesh(model=8)))
print(json.dumps(found))
"""


def _random(config):
    model = (Llama if isinstance(config, LlamaConfig) else Transformer)(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def noisy(leaf):
        floats = np.issubdtype(leaf.dtype, np.floating)
        return leaf + rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype) if floats else leaf

    nnx.update(model, jax.tree.map(noisy, nnx.state(model)))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["again"], vocab_size=300, special_tokens=["<s>"], show_progress=False)
    read = tokenizers.Tokenizer.from_str(made.to_str())
    for kind in ("qwen3", "qwen2"):
        hf_llama.save_llama(folder / kind, _random(MODELS[kind]), 0, 0)
        HuggingFaceTokenizer(read, 0, 0).save(folder / kind, 64)
    in_gguf = _random(dataclasses.replace(LLAMA, mlp=64, head_width=8))
    tokens = [f"<{number}>" for number in range(LLAMA.vocab_size)]
    of_tokens = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(folder / "model.gguf", in_gguf, "llama", kind, **of_tokens)
    save_weights(folder / "ours", _random(MODELS["ours"]), b"pieces", {}, part_bytes=40_000)
    save_weights(folder / "student", _random(MODELS["student"]), b"pieces", {}, dtype="int8")
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """Returns what a process with eight devices found."""
    return answers(started(8, "-c", PROGRAM, folder))[0]


@pytest.fixture(scope="module")
def two(folder):
    """Returns what two processes with four devices each found."""
    port = f"localhost:{free_port()}"
    return answers(*(started(4, "-c", PROGRAM, folder, port, str(index)) for index in range(2)))


def _values(config: LlamaConfig, devices: int) -> tuple[int, int]:
    """Returns the numbers of values that `devices` devices hold together: split, and each."""
    E, D, kv_heads = config.width, config.head_width, max(config.kv_heads, devices)
    qkv = (config.heads + 2 * kv_heads) * D
    layer = (qkv + config.heads * D + 3 * config.mlp) * E + qkv * config.qkv_bias
    split = config.layers * layer + (2 - config.tied) * config.vocab_size * E
    return split, config.layers * (2 * E + 2 * D * config.qk_norm) + E


def test_shards_are_those_of_a_model_that_is_placed_after_loading(one):
    """All formats in all dtypes, on meshes of 2x4 and, in float32, 1x8 and 4x2 devices."""
    assert len(one["bytes"]) == 5 * (3 + 1 + 1) and not one["differ"]
    assert not one["replaced"], "generate would place the arrays again"


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("devices", [8, 4, 2])
def test_each_device_holds_its_share(one, kind, devices):
    split, each = _values(MODELS[kind], devices)
    assert one["bytes"][f"{kind} float32 {devices}"] == [4 * (split // devices + each)] * 8
    if devices == 4:
        assert one["bytes"][f"{kind} bfloat16 4"] == [2 * (split // 4) + 4 * each] * 8


def test_logits_and_tokens_are_those_of_one_device(one):
    assert len(one["logits"]) == 6 and max(one["logits"].values()) < 1e-5
    assert len(one["tokens"]) == 4
    for whole, split in one["tokens"]:
        assert whole == split


def test_a_session_places_its_models_once(one):
    """The target is split over four devices, and the small draft is on each of them."""
    assert one["session"] == [True, True, 4, 1]


def test_replicas_share_a_read(one):
    """On 4x2 devices, four groups need the same rows. On 2x4, each of two heads is read twice."""
    config, read = MODELS["qwen3"], one["read"]
    assert read["qwen3 float32 2"] == 4 * sum(_values(config, 2))
    for dtype in ("float32", "bfloat16", "int8"):
        assert read[f"qwen3 {dtype} 4"] == 4 * sum(_values(config, 4))


@pytest.mark.slow
def test_each_process_loads_its_own_shards(two):
    """A process reads the rows of its devices, and whole matrices where they are split by inputs."""
    config = MODELS["qwen3"]
    by_inputs = config.layers * (config.heads * config.head_width + config.mlp) * config.width
    split, each = _values(config, 8)
    for found in two:
        assert len(found["bytes"]) == 5 * 3 and not found["differ"] and not found["replaced"]
        assert found["bytes"]["qwen3 float32 8"] == [4 * (split // 8 + each)] * 4
        assert found["read"]["qwen3 float32 8"] == 4 * ((split - by_inputs) // 2 + by_inputs + each)
    assert two[0]["digest"] == two[1]["digest"]


def test_wrong_meshes_are_refused_before_anything_is_read(one):
    for label, problem in {
        "flat": r"mesh: has axes \('model',\) .*; give one from `sharding.make_mesh`",
        "three": "model=3: must divide heads=8; choose another number of devices, of make_mesh or "
        "--model_parallel",
        "one": "mesh=1: must be a mesh or None; give one from `sharding.make_mesh`",
    }.items():
        message, read = one["refused"][label]
        assert re.fullmatch(problem, message) and not read


def test_a_mesh_of_another_size_is_refused():
    split = dataclasses.replace(LLAMA, shards=2)
    with pytest.raises(UserError, match="model=4: the decoder is split for model=2; load it again"):
        parallel.laid_out(split, 4)


@pytest.mark.parametrize("place", ["host", "device"])
def test_too_little_memory_is_reported_before_anything_is_read(
    folder, monkeypatch, tmp_path, place
):
    """Both numbers are named: what the weights need, and what is free."""
    needed = 4 * sum(_values(MODELS["qwen3"], 2))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(np, "fromfile", None)
    if place == "host":
        (tmp_path / "meminfo").write_text(
            "MemTotal: 9 kB\nMemAvailable:   100 kB\nSwapFree: 9 kB\n"
        )
    else:
        monkeypatch.setattr(memory, "free_of", lambda devices: 102_400)
    numbers = (
        rf"needs {needed / 1e9:.4g} GB on a device, where 0.0001024 GB are free; use more devices"
    )
    for given in (None, mesh):
        with pytest.raises(UserError, match=numbers):
            hf_llama.load_llama(folder / "qwen3", "float32", given)


def test_free_memory_is_unknown_without_reports(monkeypatch, tmp_path):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    known = Device({"bytes_limit": 10, "bytes_in_use": 3}), Device({"bytes_limit": 9})
    assert memory.free_of(known) == 7
    assert memory.free_of([*known, Device(None)]) is None
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    assert memory.free_on_host() is None
