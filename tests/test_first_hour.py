"""Tests that the commands of docs/first_hour.md fit together, and that their configs are valid."""

import re

import pytest

from helpers import ROOT, names_in
from spectr_jax.distillation.training import check_distil_config
from spectr_jax.experiments.tokens_per_call import check_eval_config
from spectr_jax.training.preparation import check_train_config
from spectr_jax.utils.errors import UserError

PAGE = (ROOT / "docs/first_hour.md").read_text()
get_config = names_in("configs/small.py").get_config


def _workdirs():
    """Returns the workdir of each part of the config, as the page's commands name it."""
    return dict(re.findall(r"--config=configs/small\.py:(\w+) --workdir=(\S+)", PAGE))


def test_the_parts_of_the_config_are_valid_and_all_are_on_the_page():
    checks = {"target": check_train_config, "draft": check_train_config}
    checks |= {"table": check_eval_config, "student": check_distil_config}
    assert _workdirs().keys() == checks.keys()
    for part, check in checks.items():
        check(get_config(part))
    with pytest.raises(UserError, match="unknown part of the small ladder 'x'"):
        get_config("x")


def test_the_commands_read_what_earlier_commands_wrote():
    workdirs, table, student = _workdirs(), get_config("table"), get_config("student")
    target, draft = get_config("target"), get_config("draft")
    assert (table.target, table.drafts) == (workdirs["target"], (workdirs["draft"],))
    assert target.data == draft.data and target.model.vocab_size == draft.model.vocab_size
    assert f"--text={target.data.train} " in PAGE and f"--text={table.prompts} " in PAGE
    written = re.findall(r"--out=(labels/\S+)", PAGE)
    assert [student.data.train, *student.data.heldout] == written
    assert set(re.findall(r"--(?:target|draft)=(runs/\S+)", PAGE)) <= set(workdirs.values())
