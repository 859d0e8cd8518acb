"""Provides sentences, and a Llama teacher with random weights and a chat template."""

import pathlib
import random
import runpy

import pytest
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.distillation import labels
from spectr_jax.loading.by_name import LOADERS, Trained
from spectr_jax.models.llama import Llama, LlamaConfig

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
WORDS = ["draft", "target", "token", "plan", "tree", "chain", "model", "prefix", "accepts", "emits"]
LENGTH = 24
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
get_config = runpy.run_path(str(CONFIGS / "distil.py"))["get_config"]


def about(teacher, /, **more):
    """Returns the fields that identify labels of `teacher`, as `claim_folder` takes them."""
    size = teacher.model.vocab_size
    found = {"vocabulary": teacher.tokenizer.vocabulary, "vocab_size": size, "context": 64}
    found |= {"length": LENGTH, "features": 0, "labelled": True, "shard": 512}
    found |= dict.fromkeys(("dtype", "weights", "text", "corpus", "content"), "")
    return {**found, "teacher": "school:teacher", "sentences": 0, **more}


@pytest.fixture(scope="session")
def sentences():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(200)]


@pytest.fixture(scope="session")
def teacher(sentences):
    """Returns the teacher. Tests with `all_labels` can load it as "school:teacher"."""
    made = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        sentences, vocab_size=300, special_tokens=controls, show_progress=False
    )
    tokenizer = HuggingFaceTokenizer(made._tokenizer, 1, (2, 0), adds_bos=False, template=TEMPLATE)
    shape = LlamaConfig(
        layers=1,
        width=24,
        mlp=32,
        heads=2,
        kv_heads=1,
        head_width=12,
        vocab_size=tokenizer.vocab_size + 4,
        context=64,
    )
    model = Llama(shape, rngs=nnx.Rngs(0))
    model.head.kernel[...] *= 3
    return Trained("teacher", model, tokenizer)


@pytest.fixture
def all_labels(monkeypatch, teacher):
    """Makes labels cover the whole vocabulary, so that losses and scores are exact."""
    monkeypatch.setattr(labels, "TOP", teacher.model.vocab_size)
    monkeypatch.setitem(LOADERS, "school", lambda name, dtype: teacher)
