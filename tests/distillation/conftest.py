"""A teacher of the Llama family with random weights and a chat template, and sentences for it."""

import random

import pytest
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.distillation import labels
from spectr_jax.loading import LOADERS, Trained, register_loader
from spectr_jax.models.llama import Llama, LlamaConfig

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
WORDS = ["draft", "target", "token", "plan", "tree", "chain", "model", "prefix", "accepts", "emits"]
LENGTH = 24


@pytest.fixture(scope="session")
def sentences():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(200)]


@pytest.fixture(scope="session")
def teacher(sentences):
    """`load("school:teacher")`."""
    made = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(sentences, vocab_size=300, special_tokens=controls, show_progress=False)
    tokenizer = HuggingFaceTokenizer(made._tokenizer, 1, (2, 0), adds_bos=False, template=TEMPLATE)
    shape = LlamaConfig(
        layers=1, width=24, mlp=32, heads=2, kv_heads=1, head_width=12, vocab_size=tokenizer.vocab_size + 4, context=64
    )
    found = {}
    for seed, name in enumerate(("teacher", "other")):
        model = Llama(shape, rngs=nnx.Rngs(seed))
        model.head.kernel[...] *= 3
        found[name] = Trained(name, model, tokenizer)
    if "school" not in LOADERS:
        register_loader("school", lambda name, dtype: found[name])
    return found["teacher"]


@pytest.fixture
def all_labels(monkeypatch, teacher):
    """Labels of the whole vocabulary, so that what is told of them is exact."""
    monkeypatch.setattr(labels, "TOP", teacher.model.vocab_size)
