"""The bench of a table: compiles its programs, runs them, and updates its journal and bar."""

import functools
from collections.abc import Mapping
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
        `compile` shows its own.
    """

    config: ml_collections.ConfigDict
    target: Trained
    drafts: list[Trained]
    prompts: Prompts
    journal: Journal
    bar: tqdm.tqdm | None = None

    def compile(self, programs: Mapping[str, Program]) -> None:
        """Compiles programs ahead of `run`; the keys are their labels on the bar."""
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
        method, draft, observe = program
        done = None if self.bar is None else self.bar.update
        decode = functools.partial(measurement.measure, batches=batches, observe=observe, done=done)
        return decode(method, self.target, draft, self.prompts, self.config, seed)

    def measured(
        self, name: str, program: Program, seed: int, batches: int | None = None
    ) -> Measurement:
        """Returns the journal's entry `name`; if there is none, `run`s the program for it."""
        if self.bar is not None:
            self.bar.set_description(name)
            if name in self.journal:
                self.bar.update(len(self.prompts.tokens))
        return self.journal.measurement(name, functools.partial(self.run, program, seed, batches))


def progress(total: int, unit: str, leave: bool = True) -> tqdm.tqdm:
    """Returns a progress bar that only the first process shows."""
    return tqdm.tqdm(
        total=total, unit=unit, leave=leave, dynamic_ncols=True, disable=not hosts.is_first()
    )
