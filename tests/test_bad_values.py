"""Invalid values raise errors of one line before any long computation; unusual ones work."""

import errno
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spectr_jax import check_method, check_model, check_plan, load, transport
from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.decoding import get_method, stream
from spectr_jax.decoding.generate import generate
from spectr_jax.models.formats.gpt2 import load_gpt2
from spectr_jax.models.formats.hf_llama import load_llama, save_llama
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.table import TableModel, exact_pmf, perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.utils.errors import UserError, check_device, explain
from spectr_jax.utils.files import path_in_errors, write_whole

TABLE = random_table(0, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[2**32 + 1]]}, "prompts: 4294967297"),
        ({"prompts": [[2**40]]}, "prompts: 1099511627776"),
        ({"prompts": [[1.0, float("inf")]]}, "prompts: inf"),
        ({"prompt_lengths": [2**32 + 1]}, "prompt_lengths: 4294967297"),
        ({"prompts": None}, "prompts: must be integers, not object"),
        ({"prompts": jax.random.key(0)}, "prompts: is a .*; give tokens"),
        ({"prompts": "text"}, "prompts: must be integers, not <U4"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"max_new_tokens": 2**40}, "exceed the context"),
        ({"observe": 3}, "observe=3"),
        ({"mesh": "cpu"}, "mesh='cpu'"),
        ({"policy": 1.0}, "policy=1.0"),
        ({"draft_policy": {}}, "draft_policy={}"),
        ({"target": "2m"}, "a str is not a model"),
        ({"draft": 7}, "a int is not a model"),
    ],
)
def test_bad_arguments_of_generate_are_refused(change, message):
    model = TableModel(TABLE)
    given = {
        "key": jax.random.key(0),
        "method": get_method("spectr"),
        "target": model,
        "draft": model,
    }
    given |= {"prompts": [[1]], "prompt_lengths": [1], "max_new_tokens": 4, **change}
    with pytest.raises(UserError, match=message):
        generate(**given)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([2**32 + 1], "prompt: 4294967297"),
        (None, "prompt: must be integers, not object"),
        ([[1], [1, 2]], "prompt: the rows have unequal lengths"),
    ],
)
def test_bad_prompts_of_a_stream_are_refused(prompt, message):
    with pytest.raises(UserError, match=message):
        stream(jax.random.key(0), get_method("baseline"), TableModel(TABLE), None, prompt, 4)


def _select(drafts):
    return transport.get("otm").select(jax.random.key(0), [0.5, 0.5], [0.5, 0.5], drafts, [True])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: get_method(None), "unknown method None"),
        (lambda: get_method(["block"]), "unknown method"),
        (lambda: get_method("spectr", num_drafts="8"), "num_drafts='8'"),
        (
            lambda: get_method("spectr", draft_length=2**40),
            "a tree of 8,796,093,022,208 nodes is too large",
        ),
        (lambda: get_method("spectr", gamma="1"), "gamma='1': "),
        (lambda: get_method("spectr", gamma=1e39), r"gamma=1e\+39: "),
        (lambda: load(None), "spec=None: must name a model"),
        (lambda: load(7), "spec=7: must name a model"),
        (lambda: load("2m", dtype=np.float32), "dtype=.*float32.*: must be one of"),
        (lambda: _select([2**32 + 1]), r"drafts=\[4294967297\]"),
        (lambda: _select([0.5]), r"drafts=\[0\.5\]"),
        (lambda: check_plan("otm"), "plan='otm': is not a Plan"),
        (lambda: check_method("block"), "method='block'"),
        (lambda: check_model("2m"), "a str is not a model"),
        (lambda: check_model(TableModel(TABLE), layers="1"), "layers='1'"),
    ],
)
def test_bad_arguments_of_public_functions_are_refused(function, message):
    with pytest.raises(UserError, match=message):
        function()


def test_load_accepts_a_path_object(toy):
    assert load(pathlib.Path(toy.folder / "draft"), "float32").name == "draft"


def test_custom_tokenizers_refuse_prompts_that_are_not_strings():
    class Unchecked(AnyTokenizer):
        bos = 1

        def __init__(self):
            self.vocab_size = 60

        def prompt(self, text):
            return [1, *text]

        encode = decode = prompt

    with pytest.raises(TypeError, match=r"abstract .*piece"):
        Unchecked()

    class Whole(Unchecked):
        piece = Unchecked.prompt

    with pytest.raises(UserError, match="must be a string"):
        Whole().prompts([[2, 3]])


def test_tokenizers_refuse_invalid_text_tokens_and_lengths(toy):
    tokenizer = load(toy.folder / "draft", "float32").tokenizer
    for wrong, message in (("a\ud800b", "is not valid Unicode"), (b"a", "must be a string")):
        with pytest.raises(UserError, match=message):
            tokenizer.prompts([wrong])
    with pytest.raises(UserError, match="is not valid Unicode"):
        tokenizer.encode("a\ud800b")
    for tokens, lengths, message in (
        ([[5, 10**6]], [2], "token 1000000 is outside 0..282"),
        ([[5, 6]], [3], r"lengths \[3\] are not within 0..2"),
        ([5, 6], [2], "tokens and lengths must be integers of shapes"),
        ([[5.5]], [1], "tokens and lengths must be integers of shapes"),
        ([[5], [5, 6]], [1, 2], "tokens and lengths must be integers of shapes"),
    ):
        with pytest.raises(UserError, match=message):
            tokenizer.texts(tokens, lengths)


def test_a_missing_device_is_reported_with_its_platform(monkeypatch):
    def fails():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fails)
    check_device()  # Without JAX_PLATFORMS, JAX always finds a device.
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(UserError, match="JAX_PLATFORMS=cuda: JAX does not find this device"):
            check_device()
    finally:
        jax.config.update("jax_platforms", None)


def test_padding_of_prompts_does_not_count_towards_the_context():
    model, prompts = TableModel(TABLE, context=16), np.ones((1, 64), np.int32)
    out = generate(jax.random.key(0), get_method("baseline"), model, None, prompts, [10], 6)
    assert int(out.lengths[0]) == 16
    with pytest.raises(
        UserError,
        match="prompts of 10 tokens, max_new_tokens=7: 17 tokens exceed the context 16 of",
    ):
        generate(jax.random.key(0), get_method("baseline"), model, None, prompts, [10], 7)


@pytest.mark.slow
def test_a_draft_with_a_shorter_context_keeps_outputs_exact():
    rows, length, prompt = 6000, 4, (1, 2)
    target, draft = TableModel(TABLE), TableModel(perturbed(TABLE, 1, 0.5), context=3)
    method, prompts = get_method("otm_block", tree="2,1"), np.tile(prompt, (rows, 1))
    arguments = method, target, draft, prompts, np.full(rows, 2), length
    counts, digits = np.zeros(4**length), 4 ** np.arange(length)
    for seed in range(3):
        out = generate(jax.random.split(jax.random.key(seed), rows), *arguments)
        counts += np.bincount(
            np.asarray(out.tokens)[:, 2 : 2 + length] @ digits, minlength=4**length
        )
    expected = np.zeros(4**length)
    for tokens, probability in exact_pmf(TABLE, prompt, length).items():
        expected[np.array(tokens) @ digits] = probability
    assert chi_square.p_value(counts, expected) > 1e-4
    emitted = np.asarray(out.emitted_per_call).sum(axis=0)
    # The draft reaches positions 0..2, so the first call drafts both levels.
    assert emitted[3] > 0
    late = generate(jax.random.key(0), method, target, draft, [[1, 2, 1, 2]], [4], length)
    assert int(late.target_calls[0]) == length


def _folders(tmp_path, write_gpt2):
    shape = {
        "width": 16,
        "mlp": 32,
        "heads": 2,
        "kv_heads": 2,
        "head_width": 8,
        "vocab_size": 13,
        "context": 8,
    }
    save_llama(tmp_path / "llama", Llama(LlamaConfig(layers=2, **shape), rngs=nnx.Rngs(0)))
    return (write_gpt2(tmp_path / "gpt2"), load_gpt2, "n_layer"), (
        tmp_path / "llama",
        load_llama,
        "num_hidden_layers",
    )


def test_weights_of_layers_that_config_json_omits_are_refused(tmp_path, write_gpt2):
    """Buffers that older programs saved are ignored."""
    for folder, loads, name in _folders(tmp_path, write_gpt2):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        if loads is load_llama:  # The GPT-2 already has such buffers: the masks.
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        loads(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {name: 1}))
        with pytest.raises(
            UserError, match=r"has .*\.1\..*, which its config.json does not mention"
        ):
            loads(folder)


def test_errors_of_a_full_disk_name_the_file(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(tmp_path / "page.html", "text")
    assert f"'{tmp_path / 'page.html'}' cannot be written (No space" in explain(raised.value)
    with pytest.raises(OSError, match="No space left"), path_in_errors(tmp_path / "figure.png"):
        raise full
    assert "figure.png" in explain(full)
