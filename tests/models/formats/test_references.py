"""Compares decoders with what transformers computed on the same weights (scripts/dev/references.py)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from helpers import names_in
from spectr_jax import check_model, generate, get_method, load
from spectr_jax.decoding import Policy
from spectr_jax.models.formats import hf_llama
from spectr_jax.models.formats.hf_config import read_shape

SCRIPT = names_in("scripts/dev/references.py")
NAMES, WITH_TOKENIZER = sorted(SCRIPT.MODELS), "gemma3_with_tokenizer"
GREEDY = Policy(temperature=0.0)


def logits(model, tokens) -> np.ndarray:
    """Returns the logits [N, V] of one call on a sequence."""
    N = len(tokens)
    positions, visible = jnp.arange(N)[None], jnp.tri(N, dtype=bool)[None]
    return np.asarray(model.extend(jnp.asarray(tokens)[None], positions, visible)[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    """The prompt is longer than the windows. The files of older and newer versions differ."""
    for field in ("config", "newer_config"):
        recorded = SCRIPT.write(name, tmp_path / field, field)
        model = hf_llama.load_llama(tmp_path / field)
        tokens = SCRIPT.prompt(model.vocab_size)
        np.testing.assert_allclose(logits(model, tokens), recorded["logits"], atol=1e-4, rtol=0)
    greedy = recorded["greedy"]
    found = logits(model, np.concatenate([tokens, greedy[:-1]]))[len(tokens) - 1 :].argmax(-1)
    np.testing.assert_array_equal(found, greedy)
    if name != "gemma4":  # A decoded sequence of one family; the protocol has cached calls of all.
        return
    method = get_method("spectr", num_drafts=2, draft_length=3)
    given = jax.random.key(0), method, model, model, tokens[None], [len(tokens)], 12
    out = generate(*given, policy=GREEDY)
    np.testing.assert_array_equal(out.tokens[0, len(tokens) : len(tokens) + 12], greedy)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma4", "llama_dynamic", "phi3_long")
        ),
    ],
)
def test_models_follow_the_protocol(name, tmp_path):
    """Trees and cached decoding equal whole sequences, which are longer than the windows.

    These are the models whose attention depends on more than positions and masks: on windows, on
    shared layers, or on the length. The others run the code of `tests/models/test_llama.py`.
    """
    SCRIPT.write(name, tmp_path)
    check_model(hf_llama.load_llama(tmp_path), layers=2)


def test_text_and_chats_are_those_of_transformers(tmp_path):
    recorded = SCRIPT.write(WITH_TOKENIZER, tmp_path)
    model = load(f"hf:{tmp_path}", "float32")
    prompts, texts, tokens = (json.loads(str(recorded[x])) for x in ("prompts", "texts", "tokens"))
    assert len(set(texts)) == len(prompts) == 20
    assert [model.tokenizer.prompt(prompt) for prompt in prompts] == tokens
    chat = model.tokenizer.chat([{"role": "user", "content": prompts[0]}])
    assert chat == json.loads(str(recorded["chat"]))
    assert model.tokenizer.eos == (1, 5)
    lengths = [len(each) for each in tokens]
    padded = np.zeros((20, max(lengths)), int)
    for row, each in zip(padded, tokens, strict=True):
        row[: len(each)] = each
    rows = get_method("baseline"), model, None, padded, lengths, 12
    out = generate(jax.random.key(0), *rows, policy=GREEDY)
    for row, length, text in zip(np.asarray(out.tokens), lengths, texts, strict=True):
        assert model.tokenizer.decode(row[length : length + 12]) == text


def test_added_tokens_beyond_the_vocabulary_are_left_out(tmp_path):
    """Tokenizers of text models have the family's tokens for images, such as that of Gemma 3 1B."""
    SCRIPT.write(WITH_TOKENIZER, tmp_path)
    before = load(f"hf:{tmp_path}", "float32")
    file, size = tmp_path / "tokenizer.json", before.model.vocab_size
    content = json.loads(file.read_text())
    image = {"id": size, "content": "<image>", "special": True, "normalized": False}
    options = {"single_word": False, "lstrip": False, "rstrip": False}
    mask = {**image, "id": size - 1, "content": "<mask>"}
    content["added_tokens"] += [{**mask, **options}, {**image, **options}]
    file.write_text(json.dumps(content))
    after = load(f"hf:{tmp_path}", "float32")
    assert after.tokenizer.tokens == [*before.tokenizer.tokens, "<mask>"]
    assert max(after.tokenizer.encode("an <image>")) < size


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        {"rope_parameters": {"full_attention": {**SCRIPT.LINEAR, "rope_theta": 1e6}}},
        {"rope_parameters": {"full_attention": SCRIPT.LINEAR, "sliding_attention": {}}},
    ],
)
def test_windowed_layers_of_gemma_3_have_a_base_of_their_own(rope, tmp_path):
    SCRIPT.write("gemma3", tmp_path)
    wanted = read_shape(tmp_path).config
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        config.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config | rope))
    assert read_shape(tmp_path).config == wanted


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_models_of_text_and_images_load_as_their_text_model(start, tmp_path):
    """Their config.json nests that of the text model, and their vision parts are ignored."""
    recorded = SCRIPT.write("gemma3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outside = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 5]}
    (tmp_path / "config.json").write_text(json.dumps(outside))
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    nested = {start + name.removeprefix("model."): array for name, array in tensors.items()}
    nested["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    safetensors.numpy.save_file(nested, file)
    model = hf_llama.load_llama(tmp_path)
    tokens = SCRIPT.prompt(model.vocab_size)
    np.testing.assert_allclose(logits(model, tokens), recorded["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("int8", 0.15)])
@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
def test_other_precisions_are_near(name, dtype, tolerance, tmp_path):
    recorded = SCRIPT.write(name, tmp_path)
    model = hf_llama.load_llama(tmp_path, dtype)
    tokens, wanted = SCRIPT.prompt(model.vocab_size), recorded["logits"]
    error = logits(model, tokens) - wanted
    assert np.sqrt(np.mean(error**2)) < tolerance * np.std(wanted)
