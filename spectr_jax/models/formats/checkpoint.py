"""Checkpoints of a run. Only this file uses Orbax.

A checkpoint holds `params` and `rest` (optimizer state, step, key) as flat {path: array} dicts.
Those of versions up to 0.3.0 also have `data`, which is not read. The state of a run is a dataclass
whose field `params` is the former, and whose other fields are the latter. A checkpoint is written
under a temporary name and then renamed, so a step is complete or absent.
"""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from spectr_jax.models.formats.runs import BITS
from spectr_jax.models.leaves import named_leaves, with_leaves
from spectr_jax.utils import hosts
from spectr_jax.utils.errors import UserError, first_line

# Raised by Orbax for files that are missing, truncated or of another tree.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, ocp.errors.InvalidLayoutError)
# Raised for a full disk.
_FAILURES = (*_DAMAGE, RuntimeError)
TEMPORARY = ".orbax-checkpoint-tmp"
State = TypeVar("State", bound=Any)


class Checkpoints:
    """The checkpoints of one run in `directory`: the newest `keep`, and the one with the lowest
    `metric`."""

    def __init__(self, directory: pathlib.Path, keep: int = 3, metric: str = BITS):
        self.directory, self._metric = directory, metric
        keeping, saving = ocp.training.preservation_policies, ocp.training.save_decision_policies
        best = keeping.BestN(
            get_metric_fn=lambda metrics: -metrics[metric],
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=saving.FixedIntervalPolicy(1),
            preservation_policy=keeping.AnyPreservationPolicy([keeping.LatestN(keep), best]),
        )

    def clean(self) -> None:
        """Removes temporary files of a run that died while writing. Only the run that owns the
        folder may call it."""
        if hosts.is_first():
            for path in self.directory.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Returns the complete steps, oldest first, and the one being saved."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    def latest_step(self) -> int | None:
        """Returns the newest of `steps`, or None."""
        return max(self.steps(), default=None)

    def best(self) -> tuple[int, float] | None:
        """Returns the step with the lowest `metric` and its value, or None if no step was
        evaluated."""
        evaluated = [
            (checkpoint.metrics[self._metric], checkpoint.step)
            for checkpoint in self._checkpointer.checkpoints
            if checkpoint.metrics and self._metric in checkpoint.metrics
        ]
        if not evaluated:
            return None
        value, step = min(evaluated)
        return step, value

    def would_be_best(self, metrics: dict[str, float]) -> bool:
        """Returns whether a checkpoint with these metrics would be the `best`."""
        best = self.best()
        return best is None or metrics[self._metric] < best[1]

    def save(self, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Starts to save the state and `metrics`, after the previous save.

        Raises:
          UserError: the previous save failed, or this one could not start.
        """
        step = int(state.step)
        if step in self.steps():
            return
        arrays = {"params": named_leaves(state.params), "rest": named_leaves(_rest(state))}
        with self._explained():
            self._checkpointer.save_checkpointables_async(step, arrays, metrics=metrics)

    def wait(self) -> None:
        """Waits until the last save is on disk; raises `UserError` if it failed."""
        with self._explained():
            self._checkpointer.wait()

    def restore(self, like: State) -> tuple[State, list[int]]:
        """Returns the state of the newest readable checkpoint, and the unreadable steps, which are
        moved to another folder, so that the run can write them again.

        `like` is a state of abstract arrays with shardings, for any number of devices.

        Raises:
          UserError: there is no readable checkpoint of this model; then nothing is moved.
        """
        rest = _rest(like)
        wanted = {"params": named_leaves(like.params), "rest": named_leaves(rest)}
        # All hosts must take the same step, so a step that one of them cannot read is damaged.
        steps = sorted(set.intersection(*map(set, hosts.gather(self.steps()))))
        damaged: list[int] = []
        for step in reversed(steps):
            loaded, reason = self._try(step, wanted)
            reasons = list(filter(None, hosts.gather(reason)))
            if not reasons:
                break
            if step == steps[0]:
                raise UserError(reasons[0])
            damaged.append(step)
        else:
            raise self._none()
        self._set_aside(damaged)
        params = with_leaves(like.params, loaded["params"])
        state = dataclasses.replace(like, params=params, **with_leaves(rest, loaded["rest"]))
        return state, damaged

    def restore_params(self, like: Any, step: int | None = None) -> Any:
        """Returns only the parameters of a checkpoint, in the structure of `like`. A `step` of None
        means the newest.

        Raises:
          UserError: as `restore`; nothing is moved.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise self._none()
        return with_leaves(like, self._load(step, {"params": named_leaves(like)})["params"])

    def close(self) -> None:
        """Waits for the current save, whose failure is not reported again."""
        with contextlib.suppress(*_FAILURES):
            self._checkpointer.close()

    def _load(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._checkpointer.load_checkpointables(step, wanted)
        except _DAMAGE as error:
            raise UserError(
                f"checkpoint {step} in {str(self.directory)!r} is damaged or of another model "
                f"({first_line(error)}); remove that step to use an earlier one, or fix the path"
            ) from error

    def _try(self, step: int, wanted: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Returns what `_load` does, or no values and the message of its error."""
        try:
            return self._load(step, wanted), ""
        except UserError as error:
            return {}, str(error)

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
        """A context that turns failures to save into `UserError`, except JAX's own errors, which
        the run explains."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except _FAILURES as error:
            self._checkpointer.reload()  # Orbax lists a step as soon as its save starts.
            others = " or see why another process ended" if jax.process_count() > 1 else ""
            reason, step = first_line(error), self.latest_step() or 0
            raise UserError(
                f"a checkpoint could not be saved in {str(self.directory)!r} ({reason}); make room "
                f"there{others}, and give the same command again: the run resumes from step "
                f"{step}, which is whole"
            ) from error


def _rest(state: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(state) if field.name != "params"]
    return {name: getattr(state, name) for name in names}
