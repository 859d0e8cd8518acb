"""Sets strict JAX for all tests, and defines fixtures for toy data, models and compilations."""

import gc
import importlib.metadata
import json
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

XLA_DEFAULTS = os.environ.get("XLA_DEFAULTS") == "1"
"""Whether the tests run with users' compiler settings. Without them XLA optimizes little, because
compilation takes most of the tests' time. Tests marked `optimized` are always optimized, because
their computation takes longer than their compilation."""

# JAX reads these variables when it is imported.
if not XLA_DEFAULTS:
    flags = ["--xla_backend_optimization_level=1"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # jaxlib 0.11 lacks these flags.
        flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_experimental_ynn_fusion_type="]
        flags += ["--xla_llvm_disable_expensive_passes=true", "--xla_cpu_prefer_vector_width=128"]
        flags += ["--xla_cpu_parallel_codegen_split_count=1"]
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("NPROC", "1")  # One thread per program; the workers use all cores.
# The workers and the programs that they start share one cache of compiled programs. It is temporary
# unless JAX_COMPILATION_CACHE_DIR names a folder, which then makes the next run faster. Writing
# small programs takes longer than compiling them.
if "PYTEST_XDIST_WORKER" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="spectr_jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
import numpy as np
import pytest

jax.config.update("jax_debug_key_reuse", True)
gc.freeze()
gc.set_threshold(200_000, 50, 50)  # Tracing makes many lasting objects; do not scan them often.


def pytest_runtest_setup(item):
    if not XLA_DEFAULTS:
        optimized = item.get_closest_marker("optimized") is not None
        jax.config.update("jax_disable_most_optimizations", not optimized)


LONGEST = ("test_ladder.py", "test_scale.py", "test_lm1b.py", "test_figures.py")
"""Files with tests of half a minute or more. They run first, so that workers finish together."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


_TESTS_BETWEEN_CLEARANCES = 100
_tests_done = 0


@pytest.fixture(autouse=True)
def _programs_are_freed():
    """Clears JAX's caches regularly. Each program that XLA compiles for the CPU maps memory, and
    Linux limits a process to 65,530 maps."""
    yield
    global _tests_done
    _tests_done += 1
    if _tests_done % _TESTS_BETWEEN_CLEARANCES == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def count_compilations():
    """Returns a context manager that yields a list, with one entry per program compiled in it."""
    from spectr_jax.testing import count_compilations

    return count_compilations


@pytest.fixture(scope="session")
def array_records():
    """Returns a function that writes sentences as TFDS stores lm1b. It uses TFDS's own writer of
    array records, which needs no TensorFlow."""

    def write(folder, train, test=("held out",), shards=1):
        import tensorflow_datasets as tfds

        place = folder / "lm1b" / "1.1.0"
        place.mkdir(parents=True)
        identity = tfds.core.dataset_info.DatasetIdentity(
            "lm1b", tfds.core.Version("1.1.0"), str(place), "lm1b"
        )
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        info = tfds.core.DatasetInfo(builder=identity, features=features, description="sentences")
        writer = tfds.core.SequentialWriter(
            info, -(-len(train) // shards), file_format="array_record"
        )
        writer.initialize_splits(["train", "test"])
        writer.add_examples(
            {"train": [{"text": line} for line in train], "test": [{"text": line} for line in test]}
        )
        writer.close_all()
        return sorted(place.glob("lm1b-train*"))

    return write


class Toy(NamedTuple):
    """A folder with target.safetensors, draft.safetensors and prompts.txt, the shape of its models,
    and its prompts."""

    folder: pathlib.Path
    shape: Any
    prompts: list[str]


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """Returns small models with random weights, and a tokenizer trained on their prompts."""
    from flax import nnx

    from spectr_jax.data.tokenizer import train_tokenizer
    from spectr_jax.models.transformer import Transformer, TransformerConfig
    from spectr_jax.models.weights import save_weights

    shape = TransformerConfig(layers=1, width=16, mlp=32, heads=2, vocab_size=283, context=32)
    prompts = [f"draft target token {index} law" for index in range(9)]
    folder = tmp_path_factory.mktemp("models")
    (folder / "prompts.txt").write_text("\n".join(prompts))
    proto = train_tokenizer(prompts * 20, folder / "tokenizer.model", 283).proto
    for seed, name in enumerate(("target", "draft")):
        save_weights(folder / name, Transformer(shape, rngs=nnx.Rngs(seed)), proto, {})
    return Toy(folder, shape, prompts)


@pytest.fixture(scope="session")
def write_gpt2():
    """Returns a function that writes a GPT-2 in Hugging Face's format, with a tied head, learned
    positions, biases, and the attention masks that old files contain."""
    import safetensors.numpy

    def write(folder, vocab_size=29, *, layers=2, E=16, T=64, prefix="transformer.", seed=0):
        rng = np.random.default_rng(seed)
        shapes = {"wte": (vocab_size, E), "wpe": (T, E), "ln_f": (E,)}
        kernels = {"attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E)}
        kernels |= {"mlp.c_fc": (E, 4 * E), "mlp.c_proj": (4 * E, E), "ln_1": (E,), "ln_2": (E,)}
        for layer in range(layers):
            shapes |= {f"h.{layer}.{name}": shape for name, shape in kernels.items()}
        tensors = {f"{prefix}h.{layer}.attn.bias": np.ones((1, 1, T, T)) for layer in range(layers)}
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = 0.5 * rng.standard_normal(shape)
            if name not in ("wte", "wpe"):
                tensors[f"{prefix}{name}.bias"] = 0.5 * rng.standard_normal(shape[-1])
        tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
        folder.mkdir(parents=True)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {"vocab_size": vocab_size, "n_embd": E, "n_layer": layers, "n_positions": T}
        config |= {"model_type": "gpt2", "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture(scope="session")
def in_hugging_face():
    """Returns a function that converts our tokenizer to a Hugging Face tokenizer with the same
    tokens."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    from spectr_jax.data.tokenizer import EOS, SPACE, UNK

    def convert(tokenizer):
        proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.proto)
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        made = Tokenizer(models.Unigram(pieces, UNK, byte_fallback=True))
        rules = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
        spaces = normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")
        made.normalizer = normalizers.Sequence([rules, *spaces])
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
        spelled = decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
        made.decoder = decoders.Sequence([*spelled, decoders.Strip(" ", 1, 0)])
        made.add_special_tokens([name for name, _ in pieces[: EOS + 1]])
        return made

    return convert
