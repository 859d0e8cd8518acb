"""A table at work: its programs are compiled ahead and run on the prompts, its journal is written, its bar moves."""

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
    """What the rows of a table have in common.

    Attributes:
      config: of the table.
      target: whose calls count.
      drafts: the draft models.
      prompts: that are continued.
      journal: of what was measured so far.
      bar: moves with each program that is compiled and each batch that is run; without it compiling has one of its own.
    """

    config: ml_collections.ConfigDict
    target: Trained
    drafts: list[Trained]
    prompts: Prompts
    journal: Journal
    bar: tqdm.tqdm | None = None

    def compile(self, programs: Mapping[str, Program]) -> None:
        """Compiles programs, by what the bar calls them, ahead of `run`; JAX keeps them."""
        bar = self.bar or progress(len(programs), "program", leave=False)

        def one(label: str, program: Program) -> None:
            bar.set_description(f"compiling {label}")
            measurement.compile_program(program, self.target, self.prompts, self.config)
            bar.update()

        list(side_by_side([functools.partial(one, *entry) for entry in programs.items()]))
        if bar is not self.bar:
            bar.close()

    def run(self, program: Program, seed: int, batches: int | None = None) -> Measurement:
        """Decodes all prompts, or the first `batches` of them: `measurement.measure`."""
        method, draft, observe = program
        done = None if self.bar is None else self.bar.update
        return measurement.measure(
            method,
            self.target,
            draft,
            self.prompts,
            self.config,
            seed,
            batches=batches,
            observe=observe,
            done=done,
        )

    def measured(
        self, name: str, program: Program, seed: int, batches: int | None = None
    ) -> Measurement:
        """Returns what `run` returns, from the journal's entry `name` or written to it."""
        if self.bar is not None:
            self.bar.set_description(name)
            if name in self.journal:
                self.bar.update(len(self.prompts.tokens))
        return self.journal.measurement(name, functools.partial(self.run, program, seed, batches))


def progress(total: int, unit: str, leave: bool = True) -> tqdm.tqdm:
    """Returns a bar of the first process."""
    return tqdm.tqdm(
        total=total, unit=unit, leave=leave, dynamic_ncols=True, disable=not hosts.is_first()
    )
