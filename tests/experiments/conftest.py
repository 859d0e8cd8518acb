"""Small models with random weights and a tokenizer trained here."""

import pathlib
from typing import NamedTuple

import pytest
from flax import nnx

from spectr_jax.data.tokenizer import train_tokenizer
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.weights import save_weights


class Toy(NamedTuple):
    """A folder with target.safetensors, draft.safetensors and prompts.txt, and what they were made of."""

    folder: pathlib.Path
    shape: TransformerConfig
    prompts: list[str]


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    shape = TransformerConfig(layers=1, width=16, mlp=32, heads=2, vocab_size=283, context=32)
    prompts = [f"draft target token {index} law" for index in range(9)]
    folder = tmp_path_factory.mktemp("models")
    (folder / "prompts.txt").write_text("\n".join(prompts))
    proto = train_tokenizer(prompts * 20, folder / "tokenizer.model", 283).proto
    for seed, name in enumerate(("target", "draft")):
        save_weights(folder / name, Transformer(shape, rngs=nnx.Rngs(seed)), proto, {})
    return Toy(folder, shape, prompts)
