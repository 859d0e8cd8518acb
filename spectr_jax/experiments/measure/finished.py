"""Whether a workdir holds a finished table or figure, of the same config, weights and inputs."""

import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections
from flax.traverse_util import flatten_dict

from spectr_jax.utils import hosts
from spectr_jax.utils.config import config_hash, to_json
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import parse_json, read_text


class Finished(Exception):
    """The workdir holds the result already, so nothing is measured. The message is one line."""


def check_table(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    name: str,
    weights: Sequence[str] | None = None,
    again: bool = False,
    inputs: str = "",
) -> None:
    """Checks whether `workdir` may get the table or figure `name`. Every process must call it.

    Args:
      config: config of the table.
      workdir: folder of the table.
      name: name of the table.
      weights: the weights that are measured (`report.weights`); None checks the config only, before
        models are loaded.
      again: whether to measure a finished table again, also with other weights or inputs.
      inputs: as in `Journal`. Tables of versions up to 0.3.0 have none and pass.

    Raises:
      Finished: the table is there, of this config, these weights and these inputs.
      UserError: the table is of another config, other weights or other inputs, or damaged.
    """
    path = workdir / f"{name}.json"
    try:
        text = hosts.gather(read_text(path) if path.exists() else None)[0]
        if text is None:
            return
        table = parse_json(text)
        theirs = table["config_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r}: is not a table of this version of spectr_jax; choose a new --workdir"
        ) from error
    if theirs != config_hash(config):
        raise UserError(
            f"workdir={str(workdir)!r}: holds the table of another config "
            f"({_difference(table, to_json(config))}); choose a new --workdir"
        )
    if weights is None or again:
        return
    if table.get("weights") != list(weights):
        raise UserError(
            f"{str(path)!r}: is a table of other weights ({table.get('weights')}, this run: "
            f"{list(weights)}); choose a new --workdir, or replace it with --again"
        )
    if table.get("inputs", inputs) != inputs:
        raise UserError(
            f"{str(path)!r}: is a table of other prompts, questions or sentences than those that "
            "the config names now; choose a new --workdir, or replace it with --again"
        )
    raise Finished(
        f"{path} is finished: commit {table.get('commit', 'unknown'):.12}, "
        f"{table.get('hardware', 'unknown hardware')}; --again measures it again"
    )


def _difference(table: dict[str, Any], ours: dict[str, Any]) -> str:
    """Returns the first field that differs between the config of a table and this run's."""
    theirs = flatten_dict(table.get("config") or table.get("settings") or {}, sep=".")
    for name, value in flatten_dict(ours, sep=".").items():
        if name not in theirs or theirs[name] != value:
            return f"its {name} is {theirs.get(name)!r:.60}, not {value!r:.60}"
    return "it has other fields"
