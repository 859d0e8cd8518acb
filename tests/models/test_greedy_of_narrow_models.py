"""An int8 model is one model in every call shape: greedy decoding equals the baseline, token for token, on real models."""

import importlib.metadata
import pathlib

import jax
import numpy as np
import pytest

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.loading import EMBEDDED, SMOLLM2_PACKAGE
from spectr_jax.models.frozen import freeze

RESULTS = pathlib.Path(__file__).parents[2] / "results"
PAIRS = {
    "embedded": ("embedded:20m", "embedded:2m"),
    "97m": (str(RESULTS / "target_97m" / "target_97m"), "embedded:6m"),
    "smollm2": ("smollm2", str(RESULTS / "smollm2" / "eagle" / "smollm2_eagle")),
}
METHODS = {
    "block": {"draft_length": 8},
    "spectr": {"num_drafts": 2, "draft_length": 3},
    "otm_layer": {"tree": "2,1,1"},
    "traversal": {"tree": "2,2"},
    "ersd": {"tree": "3,1"},
}
"""One of each way to verify, in calls on four to nine tokens of eight sequences."""


def _installed(package: str) -> bool:
    return any(found.name == package for found in importlib.metadata.distributions())


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_decoding_in_int8_equals_the_baseline(pair):
    if pair == "smollm2" and not _installed(SMOLLM2_PACKAGE):
        pytest.skip(f"{SMOLLM2_PACKAGE} is not installed")
    target, draft = (load(name, "int8") for name in PAIRS[pair])
    models = freeze(target.model), freeze(draft.model)
    prompts, lengths = target.tokenizer.prompts((EMBEDDED / "prompts.txt").read_text().splitlines()[:8])
    new_tokens = min(100, target.model.context - prompts.shape[1])

    def tokens(method, *pair):
        out = generate(jax.random.key(0), method, *pair, prompts, lengths, new_tokens, Policy(temperature=0.0))
        return [row[:length].tolist() for row, length in zip(np.asarray(out.tokens), out.lengths, strict=True)]

    expected = tokens(get_method("baseline"), models[0], None)
    found = {name: tokens(get_method(name, **options), *models) for name, options in METHODS.items()}
    assert [name for name in found if found[name] != expected] == []
