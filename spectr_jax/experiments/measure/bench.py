"""Compiles and runs the programs of a table, and updates its journal and progress bar."""

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.decoding.generate import Generation, generate, lower
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import (
    Contender,
    Measurement,
    Prompts,
    mesh_of,
    policies_of,
)
from spectr_jax.loading.by_name import Trained
from spectr_jax.models import parallel
from spectr_jax.models.frozen import freeze
from spectr_jax.utils import backend, hosts
from spectr_jax.utils.progress import progress

CORES_OF_A_PROGRAM = 4
"""Cores that XLA uses to compile one program for a CPU; 1 for an accelerator."""


class Bench(NamedTuple):
    """The inputs that the rows of a table share."""

    config: ml_collections.ConfigDict
    target: Trained
    drafts: list[Trained]
    prompts: Prompts
    journal: Journal
    # Updated after each compiled program and each batch. Without this bar, `compile` and
    # `measure_all` show their own.
    bar: tqdm.tqdm | None = None

    def compile(self, contenders: Mapping[str, Contender]) -> None:
        """Compiles the contenders' programs ahead of `run`; the keys name them on the bar."""
        bar = self.bar or progress(len(contenders), "program", leave=False)

        def one(label: str, contender: Contender) -> None:
            bar.set_description(f"compiling {label}")
            self._on_batch(lower, contender, seed=0)(0).compile()  # JAX caches it.
            bar.update()

        list(compiled_in_parallel([functools.partial(one, *entry) for entry in contenders.items()]))
        if bar is not self.bar:
            bar.close()

    def run(self, contender: Contender, seed: int, batches: int | None = None) -> Measurement:
        """Decodes all prompts, or the first `batches` batches, on all devices. Returns the totals.

        The key of a prompt depends only on `seed` and its index, not on the batch size.
        """
        tokens = calls = 0
        observed: dict[str, np.ndarray] = {}
        decode = self._on_batch(generate, contender, seed)
        started = time.monotonic()
        for batch, lengths in enumerate(self.prompts.lengths[:batches]):
            generation: Generation = hosts.fetch(decode(batch))
            real = self._indices(batch) < self.prompts.real
            tokens += int(np.sum((np.asarray(generation.lengths) - lengths)[real]))
            calls += int(np.sum(np.asarray(generation.target_calls)[real]))
            for name, values in (generation.observed or {}).items():
                total = np.sum(np.asarray(values, np.float64)[real], axis=0)
                observed[name] = observed.get(name, 0.0) + total
            if self.bar is not None:
                self.bar.update()
        return Measurement(tokens, calls, time.monotonic() - started, observed)

    def _on_batch(self, function: Any, contender: Contender, seed: int) -> Callable[[int], Any]:
        """Returns `generate` or `lower` of a contender on all devices, as a function of a batch
        index."""
        config, prompts = self.config, self.prompts
        mesh = mesh_of(config)
        models = freeze(self.target), freeze(contender.draft) if contender.draft else None
        if mesh is not None:  # Once for all batches.
            models = parallel.pair_on_mesh(mesh, *models)
        policy, draft_policy = policies_of(config, self.target.tokenizer.eos)
        options = {"draft_policy": draft_policy, "observe": contender.observe, "mesh": mesh}

        def on_batch(batch: int):
            fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
            keys = fold(jax.random.key(seed), self._indices(batch))
            arguments = prompts.tokens[batch], prompts.lengths[batch], config.max_new_tokens, policy
            return function(keys, contender.method, *models, *arguments, **options)

        return on_batch

    def _indices(self, batch: int) -> np.ndarray:
        """Returns the indices of a batch's prompts."""
        rows = self.config.batch_size
        return np.arange(batch * rows, (batch + 1) * rows)

    def measured(
        self, name: str, contender: Contender, seed: int, batches: int | None = None
    ) -> Measurement:
        """Returns the journal's entry `name`; if there is none, runs the contender."""
        if self.bar is not None:
            self.bar.set_description(name)
            if name in self.journal:
                self.bar.update(len(self.prompts.tokens))
        return self.journal.measurement(name, functools.partial(self.run, contender, seed, batches))

    def measure_all(
        self, contenders: Mapping[str, Contender], seeds: Sequence[int], warm_up: bool = False
    ) -> dict[str, list[Measurement]]:
        """Returns the measurements of each contender, one per seed.

        The contenders take turns on each seed. Those that the journal lacks are compiled first.

        Args:
          contenders: the contenders by label, which names them on the bar and in the journal.
          seeds: the seeds to measure.
          warm_up: whether to run one batch of each contender before the timed runs.
        """
        turns = [(f"{label}, seed {seed}", label, seed) for seed in seeds for label in contenders]
        missing = {label: contenders[label] for name, label, _ in turns if name not in self.journal}
        self.compile(missing)
        for contender in missing.values() if warm_up else ():
            self.run(contender, seeds[0], batches=1)
        if self.bar is not None:  # For contenders that an earlier start measured.
            self.bar.update((1 + warm_up) * (len(contenders) - len(missing)))
        runs: dict[str, list[Measurement]] = {label: [] for label in contenders}
        bar = tqdm.tqdm(turns, unit="run", dynamic_ncols=True, disable=self.bar is not None)
        for name, label, seed in bar:
            runs[label].append(self.measured(name, contenders[label], seed))
        return runs


def compiled_in_parallel(tasks: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """Yields the results of tasks that compile programs, in order. The number of cores limits how
    many run at once.

    With several processes one task runs at a time, because all processes must run them in the same
    order.
    """
    cores = (os.cpu_count() or 1) // (CORES_OF_A_PROGRAM if backend.on_cpu() else 1)
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else max(1, cores)) as pool:
        yield from pool.map(lambda task: task(), tasks)
