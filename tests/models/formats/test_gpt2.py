"""Compares GPT-2 with Hugging Face's class, on checkpoints with random weights."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers

from spectr_jax import check_model
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.models.formats.gpt2 import load_gpt2
from spectr_jax.models.layers.attention import causal
from spectr_jax.utils.errors import UserError

pytestmark = [
    pytest.mark.xdist_group("gpt2"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 12))


class _HuggingFace(transformers.FlaxGPT2LMHeadModel):
    """Starts from zeros to save time; the checkpoint overwrites them."""

    def init_weights(self, *args, **kwargs):
        shapes = jax.eval_shape(functools.partial(super().init_weights, *args, **kwargs))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _theirs(folder, tokens_BxN):
    """Returns the logits of Hugging Face's class."""
    return np.asarray(_HuggingFace.from_pretrained(folder)(tokens_BxN).logits)


def _ours(model, tokens_BxN):
    positions = jnp.broadcast_to(jnp.arange(tokens_BxN.shape[1]), tokens_BxN.shape)
    return model.extend(jnp.asarray(tokens_BxN), positions, causal(jnp.zeros(tokens_BxN.shape)))[0]


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_logits_equal_those_of_hugging_face(write_gpt2, prefix, tmp_path):
    folder = write_gpt2(tmp_path / "gpt2", prefix=prefix)
    np.testing.assert_allclose(_ours(load_gpt2(folder), TOKENS), _theirs(folder, TOKENS), atol=1e-4)


def test_a_gpt2_follows_the_model_protocol(write_gpt2, tmp_path):
    check_model(load_gpt2(write_gpt2(tmp_path / "gpt2")), tolerance=5e-5)


def _change(folder, config=None, tensors=None):
    """Overwrites fields of config.json, and adds tensors."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    safetensors.numpy.save_file(
        {**safetensors.numpy.load_file(weights), **(tensors or {})}, weights, {"format": "pt"}
    )


@pytest.mark.parametrize(
    "tied", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}]
)
def test_tie_word_embeddings_decides_which_head_is_used(write_gpt2, tied, tmp_path):
    """A checkpoint may also contain a head that is not used."""
    folder = write_gpt2(tmp_path / "gpt2")
    before = _ours(load_gpt2(folder), TOKENS)
    _change(
        folder,
        tied,
        {"lm_head.weight": np.float32(np.random.default_rng(1).standard_normal((29, 16)))},
    )
    ours = _ours(load_gpt2(folder), TOKENS)
    np.testing.assert_allclose(ours, _theirs(folder, TOKENS), atol=1e-4)
    assert np.array_equal(ours, before) == tied.get("tie_word_embeddings", True)


def test_a_gpt2_in_several_files_loads(write_gpt2, tmp_path):
    folder = write_gpt2(tmp_path / "gpt2")
    whole = _ours(load_gpt2(folder), TOKENS)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for part, names in enumerate((sorted(tensors)[:9], sorted(tensors)[9:])):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        safetensors.numpy.save_file(
            {name: tensors[name] for name in names}, folder / file, {"format": "pt"}
        )
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    np.testing.assert_array_equal(_ours(load_gpt2(folder), TOKENS), whole)


def test_greedy_decoding_of_a_gpt2_matches_hugging_face(write_gpt2, tmp_path):
    """With a draft tree and a cache, each token is the most likely one of Hugging Face's class."""
    target, draft = (
        write_gpt2(tmp_path / name, seed=seed) for seed, name in enumerate(("target", "draft"))
    )
    method = get_method("otm", tree="2,1")
    prompts, lengths = np.array([[3, 4, 5], [6, 7, 0]]), np.array([3, 2])
    out = generate(
        jax.random.key(0),
        method,
        load_gpt2(target),
        load_gpt2(draft),
        prompts,
        lengths,
        9,
        Policy(temperature=0),
    )
    best = _theirs(target, np.asarray(out.tokens)[:, :12]).argmax(-1)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(
            out.tokens[row, length : length + 9], best[row, length - 1 : length + 8]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "has model_type='llama': must be 'gpt2'; give another model"),
        ({"activation_function": "relu"}, "has activation_function='relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx=True"),
        ({"n_layer": 3}, "lacks 'h.2.ln_1.weight'"),
        ({"n_embd": 32}, "head/kernel is .* where its configuration gives"),
        ({"tie_word_embeddings": False}, "lacks 'lm_head.weight'"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings='no': must be true or false"),
        ({"n_head": 0}, "has n_head=0: must be a positive integer; give another model"),
        ({"n_head": 3}, "has n_head=3: must be a divisor of n_embd=16"),
        ({"n_layer": "2"}, "has n_layer='2': must be a positive integer"),
        ({"n_inner": 64.0}, "has n_inner=64.0: must be a positive integer"),
        ({"vocab_size": True}, "has vocab_size=True: must be a positive integer"),
        (
            {"layer_norm_epsilon": "1e-5"},
            "has layer_norm_epsilon='1e-5': must be a non-negative number",
        ),
    ],
)
def test_unsupported_or_invalid_configs_are_refused(write_gpt2, change, message, tmp_path):
    folder = write_gpt2(tmp_path / "gpt2")
    _change(folder, change)
    with pytest.raises(UserError, match=message):
        load_gpt2(folder)


def test_damaged_folders_are_refused(write_gpt2, tmp_path):
    folder = write_gpt2(tmp_path / "gpt2")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="has weights that cannot be read"):
        load_gpt2(folder)
    weights.unlink()
    with pytest.raises(
        UserError, match=r"has no model\.safetensors; write it with save_pretrained"
    ):
        load_gpt2(folder)
    for index in ("{}", '{"weight_map": {"wte.weight": 3}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(
            UserError, match=r"^'[^']*index\.json' has no weight_map of tensors to files"
        ):
            load_gpt2(folder)
    for config in ("[]", "null", "3"):
        (folder / "config.json").write_text(config)
        with pytest.raises(UserError, match="is not a JSON object"):
            load_gpt2(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json' cannot be read"):
        load_gpt2(folder)
