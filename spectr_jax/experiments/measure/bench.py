"""Compiles and runs the programs of a table, and updates its journal and progress bar."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_collections
import tqdm

from spectr_jax.experiments.measure import measurement
from spectr_jax.experiments.measure.compilation import side_by_side
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Measurement, Program, Prompts
from spectr_jax.loading.by_name import Trained
from spectr_jax.utils import hosts


class Bench(NamedTuple):
    """The inputs that the rows of a table share.

    Attributes:
      config: the config of the table.
      target: the target model.
      drafts: the draft models.
      prompts: the prompts to continue.
      journal: the measurements so far.
      bar: a progress bar, updated after each compiled program and each batch. Without one,
        `compile` and `measure_all` show their own.
    """

    config: ml_collections.ConfigDict
    target: Trained
    drafts: list[Trained]
    prompts: Prompts
    journal: Journal
    bar: tqdm.tqdm | None = None

    def compile(self, programs: Mapping[str, Program]) -> None:
        """Compiles programs ahead of `run`; the keys are their labels on the progress bar."""
        bar = self.bar or progress(len(programs), "program", leave=False)

        def one(label: str, program: Program) -> None:
            bar.set_description(f"compiling {label}")
            measurement.compile_program(program, self.target, self.prompts, self.config)
            bar.update()

        list(side_by_side([functools.partial(one, *entry) for entry in programs.items()]))
        if bar is not self.bar:
            bar.close()

    def run(self, program: Program, seed: int, batches: int | None = None) -> Measurement:
        """Returns `measurement.measure` of the program."""
        done = None if self.bar is None else self.bar.update
        inputs = program, self.target, self.prompts, self.config, seed
        return measurement.measure(*inputs, batches=batches, done=done)

    def measured(
        self, name: str, program: Program, seed: int, batches: int | None = None
    ) -> Measurement:
        """Returns the journal's entry `name`; if there is none, runs the program and stores it."""
        if self.bar is not None:
            self.bar.set_description(name)
            if name in self.journal:
                self.bar.update(len(self.prompts.tokens))
        return self.journal.measurement(name, functools.partial(self.run, program, seed, batches))

    def measure_all(
        self, programs: Mapping[str, Program], seeds: Sequence[int], warm_up: bool = False
    ) -> dict[str, list[Measurement]]:
        """Returns the measurements of each program, one per seed.

        The programs take turns on each seed. Those that the journal lacks are compiled first.

        Args:
          programs: the programs by label, which names them on the bar and in the journal.
          seeds: the seeds to measure.
          warm_up: whether to run one batch of each program before the timed runs.
        """
        turns = [(f"{label}, seed {seed}", label, seed) for seed in seeds for label in programs]
        missing = {label: programs[label] for name, label, _ in turns if name not in self.journal}
        self.compile(missing)
        for program in missing.values() if warm_up else ():
            self.run(program, seeds[0], batches=1)
        if self.bar is not None:  # For programs that an earlier start measured.
            self.bar.update((1 + warm_up) * (len(programs) - len(missing)))
        found: dict[str, list[Measurement]] = {label: [] for label in programs}
        bar = tqdm.tqdm(turns, unit="run", dynamic_ncols=True, disable=self.bar is not None)
        for name, label, seed in bar:
            found[label].append(self.measured(name, programs[label], seed))
        return found


def progress(total: int, unit: str, leave: bool = True) -> tqdm.tqdm:
    """Returns a progress bar that only the first process shows."""
    return tqdm.tqdm(
        total=total, unit=unit, leave=leave, dynamic_ncols=True, disable=not hosts.is_first()
    )
