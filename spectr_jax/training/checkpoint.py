"""Checkpoints of a run: the only file that knows Orbax.

A checkpoint holds three things: `params` and `rest` (optimizer state, step, key) as flat {path:
array} dicts, and `data`, the JSON place in each stream of the data. It is written under a temporary
name and renamed, so a step is whole or not there.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from spectr_jax.models.weights import named_leaves, with_leaves
from spectr_jax.training.runs import BITS
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts
from spectr_jax.utils.errors import UserError

# What Orbax raises for files that are missing, cut short or of another tree.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, ocp.errors.InvalidLayoutError)
# And for a disk that takes no more.
_FAILURES = (*_DAMAGE, RuntimeError)
TEMPORARY = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run, in `directory`; keeps the newest `keep`, and the one with the
    lowest `metric`."""

    def __init__(self, directory: pathlib.Path, keep: int = 3, metric: str = BITS):
        self.directory, self._metric = directory, metric
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: -metrics[metric],
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        )

    def clean(self) -> None:
        """Removes the temporary files of a run that died while writing; only for the run that owns
        the folder."""
        if hosts.is_first():
            for path in self.directory.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Returns the complete steps, oldest first, and one that is being saved."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def latest_step(self) -> int | None:
        """Returns the newest of `steps`, or None."""
        return max(self.steps(), default=None)

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest `metric` and its value, or None if there is none that
        was evaluated."""
        evaluated = [
            (checkpoint.metrics[self._metric], checkpoint.step)
            for checkpoint in self._checkpointer.checkpoints
            if checkpoint.metrics and self._metric in checkpoint.metrics
        ]
        value, step = min(evaluated, default=(0.0, None))
        return None if step is None else (step, value)

    def save(
        self, state: TrainState, positions: list[Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Starts to save the state, the place in the data and `metrics`; the last save is complete
        before this one starts.

        Raises:
          UserError: the last save failed, or this one at its start.
        """
        step = int(state.step)
        if step in self.steps():
            return
        rest = {"step": state.step, "opt_state": state.opt_state, "key": state.key}
        checkpointables = {
            "params": named_leaves(state.params),
            "rest": named_leaves(rest),
            "data": positions,
        }
        with self._explained():
            self._checkpointer.save_checkpointables_async(step, checkpointables, metrics=metrics)

    def wait(self) -> None:
        """Waits until the last save is on disk; raises `UserError` if it failed."""
        with self._explained():
            self._checkpointer.wait()

    def restore(self, like: TrainState) -> tuple[TrainState, list[Any], list[int]]:
        """Returns the newest checkpoint that can be read.

        Checkpoints that cannot be read are moved to another folder, so that the run can write their
        steps again.

        Args:
          like: a state of abstract arrays *with shardings*, which say where the parts go; of any
            number of devices.

        Returns:
          The state, the place in the data, and the steps that could not be read.

        Raises:
          UserError: there is none, or all are damaged or of another model; then nothing is moved.
        """
        rest = {"step": like.step, "opt_state": like.opt_state, "key": like.key}
        wanted = {"params": named_leaves(like.params), "rest": named_leaves(rest), "data": None}
        damaged: list[int] = []
        for step in reversed(self.steps()):
            try:
                loaded = self._load(step, wanted)
            except UserError:
                if not self.steps()[0] < step:
                    raise
                damaged.append(step)
            else:
                break
        else:
            raise self._none()
        self._set_aside(damaged)
        rest = with_leaves(rest, loaded["rest"])
        return (
            TrainState(params=with_leaves(like.params, loaded["params"]), **rest),
            loaded["data"],
            damaged,
        )

    def restore_params(self, like: Any, step: int | None = None) -> Any:
        """Returns the parameters alone of a checkpoint (None: the newest), in the structure of
        `like`.

        Raises:
          UserError: as `restore` does; nothing is moved.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise self._none()
        return with_leaves(like, self._load(step, {"params": named_leaves(like)})["params"])

    def close(self) -> None:
        """Waits for the save under way; its failure is not reported again."""
        with contextlib.suppress(*_FAILURES):
            self._checkpointer.close()

    def _load(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._checkpointer.load_checkpointables(step, wanted)
        except _DAMAGE as error:
            raise UserError(
                f"checkpoint {step} in {str(self.directory)!r} is damaged or of another model "
                f"({_reason(error)}); "
                "remove that step to use an earlier one, or fix the path"
            ) from error

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        if hosts.is_first():
            for step in steps:
                target = self.directory.with_name("damaged") / str(step)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                (self.directory / str(step)).rename(target)
        hosts.wait_for_all("damaged checkpoints are aside")
        self._checkpointer.reload()

    def _none(self) -> UserError:
        return UserError(
            f"no complete checkpoint in {str(self.directory)!r}; train there first, or fix the path"
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Failures to save become `UserError`, but for those of JAX itself, which the run
        explains."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except _FAILURES as error:
            self._checkpointer.reload()  # It counts a step from the start of its save on.
            others = " or see why another process ended" if jax.process_count() > 1 else ""
            raise UserError(
                f"a checkpoint could not be saved in {str(self.directory)!r} ({_reason(error)}); "
                f"make room there{others}, "
                "and give the same command again: the run resumes from step "
                f"{self.latest_step() or 0}, which is whole"
            ) from error


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
