"""Tests published draft heads with their targets: layouts, refused pairs, and a user's path."""

import json
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from helpers import names_in
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.loading.pairs import fitted, load_pair
from spectr_jax.models.formats.hf_llama import save_llama
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError

heads = names_in("tests/references/heads.py")
recorded, written, IDS = heads.recorded, heads.written, heads.IDS
WIDTH, VOCABULARY = 32, heads.VOCABULARY


@pytest.fixture
def layouts(tmp_path):
    """Returns the folders of one head in the layouts of its publishers."""
    return heads.layouts(tmp_path)


def target_of(layers=7, seed=0, **changes):
    shape = {"width": WIDTH, "mlp": 48, "heads": 4, "kv_heads": 2, "head_width": 8}
    config = LlamaConfig(layers=layers, **shape | {"vocab_size": VOCABULARY} | changes, context=128)
    model = Llama(config, rngs=nnx.Rngs(seed))
    return Trained("target", model, types.SimpleNamespace(vocabulary="its own"))


@pytest.mark.slow
def test_layouts_of_one_head_have_the_same_logits_and_tokens(layouts):
    target = target_of()
    target.model.embed.embedding[...] = recorded("llama")[1]["embed_tokens.weight"]
    prompts = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 0, 0]])
    method = get_method("block", draft_length=2)
    found = {}
    for name, folder in layouts.items():
        head = fitted(load(f"eagle3:{folder}", "float32"), target)
        assert head.model.feature_layers == (2, 3, 4)
        assert head.model.context == 128
        made = generate(jax.random.key(0), method, target, head, prompts, np.array([5, 3]), 20)
        found[name] = nnx.state(head.model), np.asarray(made.tokens), np.asarray(made.target_calls)
        if name in ("authors", "specforge"):
            embeds = (model.embed.embedding[...] for model in (head.model, target.model))
            assert len({embed.unsafe_buffer_pointer() for embed in embeds}) == 1
    assert found["authors"][2].max() < 20
    for name in layouts:
        jax.tree.map(np.testing.assert_array_equal, found[name], found["authors"])


def test_heads_of_other_targets_are_refused_before_anything_is_compiled(
    tmp_path, layouts, count_compilations
):
    head, wide = load(f"eagle3:{layouts['authors']}", "float32"), target_of(width=24)
    config, tensors, _ = recorded("llama")
    names = config | {IDS: [2, 4, 9]}
    deep = load(f"eagle3:{written(tmp_path / 'deep', names, tensors)}", "float32")
    narrow_config = config | {"target_hidden_size": 24}
    fused = {"fc.weight": tensors["fc.weight"][:, : 3 * 24]}
    bare = {
        name: array for name, array in (tensors | fused).items() if name != "embed_tokens.weight"
    }
    narrow = load(f"eagle3:{written(tmp_path / 'narrow', narrow_config, bare)}", "float32")
    targets = [wide, target_of(layers=6), target_of(vocab_size=64), target_of(), wide]
    heads = [head, head, head, deep, narrow]
    errors = [
        "reads hidden states of width 32, and those of target 'target' have width 24",
        "needs at least 7 layers and has 6",
        "have 60 and 64 tokens",
        r"sees layers \(2, 4, 9\), but this target has 7",
        "of width 32 without an embedding, and this target has none of that width",
    ]
    with count_compilations() as compiled:
        for target, draft, message in zip(targets, heads, errors, strict=True):
            with pytest.raises(UserError, match=message) as error:
                fitted(draft, target)
            assert "\n" not in str(error.value)
    assert not compiled
    with pytest.raises(UserError, match="takes its embedding from its target; load both with"):
        generate(jax.random.key(0), get_method("block"), target_of(), head, [[1]], [1], 2)
    own = load(f"eagle3:{layouts['angelslim']}", "float32")
    with pytest.raises(UserError, match="takes the layers that it sees from its target"):
        generate(jax.random.key(0), get_method("block"), target_of(), own, [[1]], [1], 2)
    with pytest.raises(UserError, match="no folder '/nowhere'; give eagle3:"):
        load("eagle3:/nowhere")


@pytest.mark.slow
def test_a_head_may_be_narrower_than_its_target(tmp_path):
    config, tensors, _ = recorded("llama")
    fused = {"fc.weight": heads.weight("fc", (WIDTH, 3 * 48))}
    folder = written(tmp_path, config | {"target_hidden_size": 48}, tensors | fused)
    target = target_of(width=48, kv_heads=4)
    head = fitted(load(f"eagle3:{folder}", "float32"), target)
    rows = np.array([[3, 1, 4], [2, 7, 0]]), np.array([3, 2]), 16, Policy(temperature=0.0)
    made, alone = (
        generate(jax.random.key(0), get_method(*method), target, head, *rows).tokens
        for method in (["block"], ["baseline"])
    )
    np.testing.assert_array_equal(made, alone)


TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"


@pytest.fixture
def folders(tmp_path):
    """Returns the folders of a chat model of eight layers, and of its head without an embedding."""
    made = tokenizers.ByteLevelBPETokenizer()
    text = [f"Why is the sky blue? {number}" for number in range(99)]
    made.train_from_iterator(text, vocab_size=280, special_tokens=["<s>", "</s>"])
    size = made.get_vocab_size()
    save_llama(tmp_path / "model", target_of(8, vocab_size=size).model, bos=0, eos=1)
    made.save(str(tmp_path / "model/tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(settings))
    head = heads.layouts(tmp_path)["authors"]
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return tmp_path / "model", head


@pytest.mark.parametrize("dtype", ["float32", None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_pair_of_folders_decodes_greedily_as_its_target_alone(folders, dtype):
    names = f"hf:{folders[0]}", (f"eagle3:{folders[1]}",)
    target, (head,) = load_pair(*names, dtype)
    prompts, lengths = target.tokenizer.prompts(["Why is the sky", "blue?"])
    rows, greedy = (prompts, lengths, 24), Policy(temperature=0.0)
    method = get_method("block", draft_length=2)
    made = generate(jax.random.key(0), method, target, head, *rows, greedy)
    alone = generate(jax.random.key(0), get_method("baseline"), target, None, *rows, greedy)
    np.testing.assert_array_equal(made.tokens, alone.tokens)


@pytest.mark.slow
def test_the_command_of_the_page_chats(folders):
    command = [sys.executable, "-m", "spectr_jax.sample", f"--target=hf:{folders[0]}"]
    command += [f"--draft=eagle3:{folders[1]}", "--chat", "--prompt=Why is the sky blue?"]
    command += ["--max_new_tokens=16", "--compare"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"block: \d+ tokens in \d+ calls", ended.stdout), ended.stdout
