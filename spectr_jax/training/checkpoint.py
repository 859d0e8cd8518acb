"""Checkpoints of a run: the only file that knows Orbax.

A checkpoint holds three things: `params` and `rest` (optimizer state, step, key) as flat {path: array} dicts, and `data`,
the JSON state of the data iterator.
"""

import pathlib
from typing import Any

from orbax.checkpoint import v1 as ocp

from spectr_jax.errors import UserError
from spectr_jax.models.weights import named_leaves, with_leaves
from spectr_jax.training.step import TrainState

# What Orbax raises for files that are missing, cut short or of another tree.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, ocp.errors.InvalidLayoutError)


class Checkpoints:
    """The checkpoints of one run, in `directory`; keeps the newest `keep`."""

    def __init__(self, directory: pathlib.Path, keep: int = 3):
        self.directory = directory
        self._checkpointer = ocp.training.Checkpointer(
            directory.absolute(),
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    def latest_step(self) -> int | None:
        """The newest complete step, or None."""
        latest = self._checkpointer.latest
        return None if latest is None else latest.step

    def save(self, state: TrainState, data_state: dict) -> None:
        """Saves the state and the data position, and waits until both are on disk."""
        step = int(state.step)
        if step == self.latest_step():
            return
        rest = {"step": state.step, "opt_state": state.opt_state, "key": state.key}
        self._checkpointer.save_checkpointables(
            step, {"params": named_leaves(state.params), "rest": named_leaves(rest), "data": data_state}
        )

    def restore(self, like: TrainState) -> tuple[TrainState, dict]:
        """The newest checkpoint.

        Args:
          like: a state of abstract arrays *with shardings*, which say where the parts go.

        Returns:
          The state and the data position.

        Raises:
          UserError: there is none, or it is damaged or of another model.
        """
        rest = {"step": like.step, "opt_state": like.opt_state, "key": like.key}
        loaded = self._load({"params": named_leaves(like.params), "rest": named_leaves(rest), "data": None})
        rest = with_leaves(rest, loaded["rest"])
        return TrainState(params=with_leaves(like.params, loaded["params"]), **rest), loaded["data"]

    def restore_params(self, like: Any) -> Any:
        """The parameters alone of the newest checkpoint, in the structure of `like`; raises as `restore` does."""
        return with_leaves(like, self._load({"params": named_leaves(like)})["params"])

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        step = self.latest_step()
        if step is None:
            raise UserError(f"no complete checkpoint in {str(self.directory)!r}; train there first, or fix the path")
        try:
            return self._checkpointer.load_checkpointables(step, wanted)
        except _DAMAGE as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(
                f"checkpoint {step} in {str(self.directory)!r} is damaged or of another model ({reason}); "
                "remove that step to use an earlier one, or fix the path"
            ) from error

    def close(self) -> None:
        self._checkpointer.close()
