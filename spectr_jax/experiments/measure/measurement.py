"""What the tables share: checks of their configs, models, prompts, and the totals of a method."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import PAD, AnyTokenizer
from spectr_jax.decoding import Method, Policy
from spectr_jax.decoding.policy import check_policy
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.loading.by_name import Trained, check_dtype
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.formats.published import EMBEDDED
from spectr_jax.models.frozen import check_context
from spectr_jax.utils import sharding
from spectr_jax.utils.config import check_positive
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest


class Prompts(NamedTuple):
    """Prompts in batches of one shape; those after the first `real` are padding."""

    tokens: np.ndarray  # [batches, B, T] int32
    lengths: np.ndarray  # [batches, B] int32
    real: int  # Number of prompts that count.

    def digest(self) -> str:
        """Returns a digest of the prompts."""
        return digest(self.tokens.tobytes() + self.lengths.tobytes())[:16]


class Contender(NamedTuple):
    """A method with its draft model, and an `observe` for `generate`."""

    method: Method
    draft: Trained | None
    observe: Callable | None = None


class Measurement(NamedTuple):
    """The totals of one method over all prompts, for one seed."""

    tokens: int  # Emitted tokens.
    calls: int  # Target calls.
    seconds: float  # Time of all generations.
    observed: dict[str, np.ndarray]  # Results of `observe`, summed over calls.

    @property
    def per_call(self) -> float:
        """Returns the tokens per call."""
        return self.tokens / self.calls

    @property
    def per_second(self) -> float:
        """Returns the tokens per second."""
        return self.tokens / self.seconds


def tokens_per_call(runs: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the tokens per call of one method as fields of a row: mean, standard deviation over
    seeds, and the value of each seed."""
    values = [run.per_call for run in runs]
    return {
        "tokens_per_call": float(np.mean(values)),
        "tokens_per_call_std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
        "tokens_per_call_by_seed": values,
    }


def check_decoding(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` if a field of `decoding_config` has an invalid value."""
    check_positive(config, "prompt_tokens", "num_prompts", "batch_size", "max_new_tokens")
    check_positive(config, "model_parallel")
    check_dtype(config.dtype)
    check_batch_size(config)
    policy, draft_policy = policies_of(config, -1)
    check_policy(policy)
    check_policy(draft_policy, owner="draft_")


def check_batch_size(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` unless each device, or group of `model_parallel`, gets as many rows."""
    mesh = mesh_of(config)
    groups = 1 if mesh is None else sharding.groups_of(mesh)
    if config.batch_size % groups:
        kind = "devices" if config.get("model_parallel", 1) == 1 else "groups of devices"
        raise UserError(
            f"batch_size={config.batch_size}: must be a multiple of the {groups} {kind}; change "
            "it, or hide devices"
        )


def mesh_of(config: ml_collections.ConfigDict) -> Mesh | None:
    """Returns the mesh of all devices on which a config decodes; None for one device.

    Raises:
      UserError: `model_parallel` does not divide the number of devices.
    """
    model = config.get("model_parallel", 1)
    return sharding.make_mesh(model=model) if max(jax.device_count(), model) > 1 else None


def policies_of(
    config: ml_collections.ConfigDict, eos: int | tuple[int, ...]
) -> tuple[Policy, Policy]:
    """Returns the sampling policies of target and drafts; `eos` ends a sequence."""
    policy = Policy(config.temperature, config.top_k, config.top_p, eos)
    if config.draft_temperature is None:
        return policy, policy
    return policy, dataclasses.replace(policy, temperature=config.draft_temperature)


def read_prompts(config: ml_collections.ConfigDict, tokenizer: AnyTokenizer) -> Prompts:
    """Returns the first `num_prompts` prompts in full batches.

    A prompt is the first `prompt_tokens` + 1 tokens of a sentence, BOS included if there is one.

    Raises:
      UserError: there are fewer prompts.
    """
    spec = str(EMBEDDED / "prompts.txt") if config.prompts == "embedded" else config.prompts
    sentences = open_sentences(spec, config.tfds_dir or None)
    if len(sentences) < config.num_prompts:
        raise UserError(
            f"num_prompts={config.num_prompts}: {spec!r} has {len(sentences)} prompts; lower it"
        )
    batches = -(-config.num_prompts // config.batch_size)
    shape = (batches * config.batch_size, config.prompt_tokens + 1)
    tokens, lengths = np.full(shape, PAD, np.int32), np.ones(shape[0], np.int32)
    tokens[:, 0] = tokenizer.bos  # Rows that only fill the last batch are BOS alone.
    for index in range(config.num_prompts):
        prompt = tokenizer.prompt(sentences[index])[: config.prompt_tokens + 1]
        tokens[index, : len(prompt)] = prompt
        lengths[index] = len(prompt)
    split = (batches, config.batch_size)
    return Prompts(tokens.reshape(*split, -1), lengths.reshape(split), config.num_prompts)


def open_table(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, name: str, drafts: tuple[str, ...]
) -> tuple[Trained, list[Trained], Prompts]:
    """Returns the target, the drafts and the prompts of the table `name`.

    Raises:
      UserError: a model, the prompts or the workdir cannot be used.
    """
    check_table(config, workdir, name)
    mesh = mesh_of(config) if config.model_parallel > 1 else None
    target, loaded = load_pair(config.target, drafts, config.dtype, mesh)
    prompts = read_prompts(config, target.tokenizer)
    for trained in (target, *loaded):
        asked = f"prompt_tokens={config.prompt_tokens}, max_new_tokens={config.max_new_tokens}, BOS"
        tokens = prompts.tokens.shape[-1] + config.max_new_tokens
        check_context(asked, tokens, trained, "lower one of them")
    return target, loaded, prompts
