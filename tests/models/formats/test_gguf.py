"""Tests GGUF files of the Llama family: weights, metadata, tokenizers, and refused files."""

import dataclasses
import re

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from helpers import names_in
from spectr_jax.loading.by_name import load
from spectr_jax.models.formats.gguf import GGUF, NAMES, load_gguf
from spectr_jax.models.formats.hf_llama import NAMES as HF_NAMES
from spectr_jax.models.formats.hf_llama import llama_tensors
from spectr_jax.models.llama import Llama
from spectr_jax.models.quantized import Int8Linear, quantize
from spectr_jax.utils.errors import UserError

tokenizers = names_in("tests/data/test_gguf_tokenizer.py")
byte_pairs, metadata = tokenizers.byte_pairs, tokenizers.metadata
LITTLE, BIG = gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG


def write(
    path, model: Llama, kind: str, quantization=None, more=None, order=LITTLE, **changes
) -> None:
    """Writes a GGUF file as llama.cpp's converter does, with adjacent rotary pairs for `llama`.

    `more` are additional tensors, and `changes` overwrite the metadata.
    """
    config, arch = model.config, "llama" if kind == "tied" else kind
    values = {
        f"{arch}.context_length": config.context,
        f"{arch}.embedding_length": config.width,
        f"{arch}.block_count": config.layers,
        f"{arch}.feed_forward_length": config.mlp,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_epsilon,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.attention.key_length": config.head_width,
        **metadata(byte_pairs(), "gpt-2"),
    }
    values = {name: value for name, value in {**values, **changes}.items() if value is not None}
    writer = gguf.GGUFWriter(path, changes.get("arch", arch), endianess=order)
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif name != "arch":
            put = {
                str: writer.add_string,
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
            }
            put[type(value)](name, value)
    theirs = {theirs: NAMES[ours] for ours, theirs in HF_NAMES.items()}
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    for name, array in llama_tensors(model).items():
        layer, found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name).groups()
        if arch == "llama" and found in (HF_NAMES["q"], HF_NAMES["k"]):
            heads = array.reshape(-1, 2, config.head_width // 2, config.width)
            array = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(array.shape)
        full = theirs[found] if layer is None else f"blk.{layer}.{theirs[found]}"
        if quantization is not None and array.ndim == 2:
            writer.add_tensor(full, gguf.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(full, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen3"])
def test_a_written_gguf_file_loads_as_the_same_model(llamas, kind, tmp_path):
    write(tmp_path / "model.gguf", llamas[kind], kind)
    read = load_gguf(GGUF(tmp_path / "model.gguf"))
    epsilon, theta = np.float32(read.config.norm_epsilon), np.float32(read.config.rope_theta)
    assert (epsilon, theta) == (
        np.float32(llamas[kind].config.norm_epsilon),
        np.float32(llamas[kind].config.rope_theta),
    )
    assert dataclasses.replace(read.config, norm_epsilon=0.0) == dataclasses.replace(
        llamas[kind].config, norm_epsilon=0.0
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(llamas[kind]))


@pytest.mark.parametrize(
    "quantization", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1]
)
def test_quantized_gguf_files_load_as_their_dequantized_values(llamas, quantization, tmp_path):
    write(tmp_path / "model.gguf", llamas["tied"], "tied", quantization)
    file = GGUF(tmp_path / "model.gguf")
    read, exact = load_gguf(file), llamas["tied"]
    down, whole = read.blocks[1].down.kernel[...], np.asarray(exact.blocks[1].down.kernel[...])
    rounded = gguf.dequantize(
        gguf.quantize(np.ascontiguousarray(whole.T), quantization), quantization
    ).T
    np.testing.assert_array_equal(down, rounded)
    assert 0 < np.abs(down - whole).max() < 0.15
    small = load_gguf(file, "int8")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(small), nnx.state(quantize(read)))


def test_load_reads_gguf_files_with_their_chat_template(llamas, tmp_path):
    write(
        tmp_path / "small.gguf",
        llamas["llama"],
        "llama",
        **{"tokenizer.chat_template": "{{ messages[0].content }}!"},
    )
    for dtype in ("float32", "bfloat16", "int8"):
        trained = load(f"gguf:{tmp_path / 'small.gguf'}", dtype)
        down = trained.model.blocks[0].down
        assert trained.name == "small" and (
            isinstance(down, Int8Linear) if dtype == "int8" else down.kernel.dtype == dtype
        )
    tokenizer = trained.tokenizer
    assert (tokenizer.bos, tokenizer.eos) == (1, (2, 0)) and tokenizer.prompt("again")[0] != 1
    assert tokenizer.chat([{"role": "user", "content": "again"}]) == tokenizer.encode("again!")


def test_rotary_scaling_is_read_from_gguf_files(llamas, tmp_path):
    """Llama 3.1 stores a tensor of divisors, and linear scaling stores a factor."""
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write(tmp_path / "linear.gguf", llamas["llama"], "llama", **scaling)
    assert load_gguf(GGUF(tmp_path / "linear.gguf")).config.rope_divisors == (4.0,) * 4
    divisors = {"rope_freqs.weight": np.array([1, 1.5, 8, 8], np.float32)}
    for scaling, more, expected in (
        ({}, divisors, (1.0, 1.5, 8.0, 8.0)),
        (
            {"llama.rope.scaling.factor": 4.0},
            None,
            (4.0,) * 4,
        ),  # As in llama.cpp, a factor without a type is linear.
        ({"llama.rope.scale_linear": 4.0}, None, (4.0,) * 4),  # The old name of the factor.
        ({"llama.rope.scaling.factor": 2.0}, divisors, (2.0, 3.0, 16.0, 16.0)),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, None, ()),
        ({"llama.rope.freq_base": None}, None, ()),
    ):
        write(tmp_path / "own.gguf", llamas["llama"], "llama", more=more, **scaling)
        config = load_gguf(GGUF(tmp_path / "own.gguf")).config
        assert config.rope_divisors == expected and config.rope_theta == 10_000.0


def test_query_and_key_biases_are_reordered_like_weights(llamas, tmp_path):
    model = Llama(dataclasses.replace(llamas["llama"].config, qkv_bias=True), rngs=nnx.Rngs(0))
    for block in model.blocks:
        block.qkv.bias[...] = np.arange(64, dtype=np.float32)
    write(tmp_path / "model.gguf", model, "llama")  # `write` does not reorder biases.
    read = np.asarray(load_gguf(GGUF(tmp_path / "model.gguf")).blocks[1].qkv.bias[...])
    heads, values = read[:48].reshape(6, 8), read[48:]
    np.testing.assert_array_equal(
        heads - 8 * np.arange(6)[:, None], np.tile([0, 2, 4, 6, 1, 3, 5, 7], (6, 1))
    )
    np.testing.assert_array_equal(values, np.arange(48, 64))


@pytest.mark.parametrize(
    "name", ["blk.0.attn_output.bias", "blk.1.ffn_down.bias", "blk.1.attn_q.bias", "extra.weight"]
)
def test_files_with_unsupported_tensors_are_refused(llamas, name, tmp_path):
    write(tmp_path / "model.gguf", llamas["llama"], "llama", more={name: np.ones(32, np.float32)})
    with pytest.raises(UserError, match=rf"has an unsupported part '{name}'"):
        load_gguf(GGUF(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arch": "gemma3n"},
            "has general.architecture='gemma3n': must be 'llama' or 'qwen2' or 'qwen3' or 'phi3' or",
        ),
        ({"split.count": 2}, "is one of 2 parts; merge them with llama-gguf-split"),
        ({"llama.expert_count": 8}, "has llama.expert_count=8: must be 0"),
        (
            {"llama.attention.sliding_window": [8, 9]},
            "has llama.attention.sliding_window=[8, 9]: must be a number of tokens",
        ),
        (
            {"llama.attention.head_count_kv": [2, 1]},
            "has llama.attention.head_count_kv=[2, 1]: must be a positive integer, or one for each",
        ),
        (
            {"llama.attention.head_count_kv": "2"},
            "has llama.attention.head_count_kv='2': must be a positive integer, or one for each",
        ),
        ({"llama.attention.value_length": 16}, "has llama.attention.value_length=16: must be 8"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            "rope.scaling.yarn_log_multiplier=0.10000000149011612: must be 0.0",
        ),
        (
            {"llama.attention.shared_kv_layers": 1},
            "has llama.attention.shared_kv_layers=1: must be 0",
        ),
        (
            {"llama.feed_forward_length": [64, 64]},
            "has llama.feed_forward_length=[64, 64]: must be a positive integer",
        ),
        (
            {"llama.attention.head_count": 0},
            "has llama.attention.head_count=0: must be a positive integer",
        ),
        ({"llama.context_length": "x"}, "has llama.context_length='x': must be a positive integer"),
        (
            {"llama.rope.scaling.type": "ntk"},
            "has llama.rope.scaling.type='ntk': must be 'linear' or 'none' or 'yarn' or 'longrope'",
        ),
        ({"llama.rope.dimension_count": 4}, "has llama.rope.dimension_count=4: must be 8"),
        ({"llama.attention.key_length": 6}, "0.q is"),
        (
            {"llama.rope.freq_base": -1.0},
            "has llama.rope.freq_base=-1.0: must be a positive number",
        ),
        (
            {"llama.attention.layer_norm_rms_epsilon": float("nan")},
            "layer_norm_rms_epsilon=nan: must be a non-negative number",
        ),
        (
            {"llama.rope.scaling.factor": -2.0},
            "has llama.rope.scaling.factor=-2.0: must be a non-negative number",
        ),
        ({"llama.block_count": None}, "lacks 'llama.block_count' in its metadata"),
        ({"llama.block_count": 3}, "lacks 'blk.2.attn_norm.weight', a part of its model"),
        ({"llama.block_count": 10**9}, "lacks 'blk.999999999.attn_norm.weight'"),
        (
            {"llama.feed_forward_length": 65},
            "0.gate is [64, 32] where its configuration gives [65, 32]",
        ),
    ],
)
def test_unsupported_or_invalid_metadata_is_refused(llamas, changes, message, tmp_path):
    write(tmp_path / "model.gguf", llamas["llama"], "llama", **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        load_gguf(GGUF(tmp_path / "model.gguf"))


def test_damaged_or_missing_gguf_files_are_refused(llamas, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, llamas["llama"], "llama")
    whole = path.read_bytes()
    for length in (0, 3, 100, 5_000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"is not a GGUF file that can be read"):
            load(f"gguf:{path}")
    path.write_bytes(b"{}" * 1000)
    with pytest.raises(UserError, match=r"is not a GGUF file that can be read"):
        GGUF(path)
    write(path, llamas["llama"], "llama", order=BIG)
    with pytest.raises(UserError, match=r"'.*model\.gguf' is a big-endian GGUF file; convert it"):
        load(f"gguf:{path}")
    with pytest.raises(
        UserError, match=r"no file '.*nothing.gguf'; give gguf: and the path of a GGUF file"
    ):
        load(f"gguf:{tmp_path / 'nothing.gguf'}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_gguf_files_with_weights_that_are_not_finite_are_refused(llamas, dtype, tmp_path):
    model = nnx.clone(llamas["llama"])
    for value in (np.inf, np.nan):
        kernel = model.blocks[1].down.kernel
        kernel[...] = kernel[...].at[3, 5].set(value)
        write(tmp_path / "model.gguf", model, "llama")
        with pytest.raises(UserError, match=r"blocks/1/down/kernel has values that are not finite"):
            load_gguf(GGUF(tmp_path / "model.gguf"), dtype)


def test_metadata_are_those_that_the_library_reads(tmp_path):
    """Our reader reads lists in one pass. A list may be empty or of any kind of value."""
    path = tmp_path / "lists.gguf"
    lists = {"strings": ["a b", "", "é" * 300], "numbers": [3, -1, 5], "floats": [0.5, -2.0]}
    lists |= {"booleans": [True, False, True], "lists": [[1, 2], [3, 4]]}
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in lists.items():
        writer.add_array(name, values)
    writer.add_uint32("number", 7)
    writer.add_string("string", "text")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GGUF(path), gguf.GGUFReader(path)
    for name in (*lists, "number", "string", "general.architecture"):
        assert ours.get(name) == theirs.fields[name].contents(), name
    assert ours.get("strings") == lists["strings"] and ours.get("number") == 7
    whole = path.read_bytes()
    count = whole.index(b"strings") + len(b"strings") + 8  # After the types of list and strings.
    assert whole[count : count + 8] == len(lists["strings"]).to_bytes(8, "little")
    path.write_bytes(whole[:count] + (2**20).to_bytes(8, "little") + whole[count + 8 :])
    with pytest.raises(UserError, match="its list of strings is cut"):
        GGUF(path)
