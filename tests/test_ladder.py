"""Tests the commands of scripts/train_ladder.sh, with a program in the place of Python."""

import json
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = f"""#!{sys.executable}
import json, pathlib, sys
print(json.dumps(sys.argv[1:]))
if "--config=configs/latency.py" in sys.argv:
    sys.exit(75)
"""


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """Returns a function that runs the script: (exit status, commands, stderr)."""
    for name, text in (("scripts/setup.sh", "#!/bin/sh\n"), (".venv/bin/python", PYTHON)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/train_ladder.sh", tmp_path / "scripts")

    def run(*arguments, **environment):
        for name in ("DATA", "HELDOUT", "FLAGS", "TFDS_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = [tmp_path / "scripts/train_ladder.sh", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True)
        commands = [json.loads(line)[1:] for line in ended.stdout.splitlines()]
        return ended.returncode, commands, ended.stderr

    return run


REST = ("quality", "auto_1", "auto_32", "trees", "figures")


def test_all_flags_and_config_fields_exist(ladder):
    _, until, _ = ladder("work")
    status, rest, _ = ladder("work", *REST)
    assert status == 0
    modules = [command[0].removeprefix("spectr_jax.") for command in until + rest]
    assert modules == ["pack", *["train", "export"] * 4, *["eval"] * (2 + len(REST))]
    for module, *flags in until + rest:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        config = None
        if "config" in given:
            path, *argument = given["config"].split(":")
            config = runpy.run_path(str(ROOT / path))["get_config"](*argument)
        for name in given:
            if name.startswith("config."):
                place = config
                for part in name.split(".")[1:]:
                    place = place[part]
            else:
                assert re.search(rf'DEFINE_\w+\(\s*"{name}"', source), (module, name)


def test_a_program_that_stops_ends_the_script_with_its_status(ladder):
    status, commands, _ = ladder("work")
    assert status == 75 and "--config=configs/latency.py" in commands[-1]


def test_stages_take_flags_and_other_text(ladder):
    flags = {"DATA": "text/*", "HELDOUT": "heldout/*", "FLAGS": "--config.steps=9 --import=a"}
    status, commands, _ = ladder("work", "pack", "train_6m", **flags)
    assert status == 0 and [command[0] for command in commands] == [
        *("spectr_jax.pack", "spectr_jax.train", "spectr_jax.export")
    ]
    pack, train, export = commands
    assert "--data=text/*" in pack and "--out=work/packed" in pack
    assert {"--config=configs/open_text.py:draft_6m", "--config.data.heldout=heldout/*"} <= {*train}
    assert train[-2:] == ["--config.steps=9", "--import=a"]
    assert export[1:] == ["--model=work/draft_6m", "--out=work/ladder"]
    _, commands, _ = ladder("work", "pack", "train_6m", **flags | {"DATA": "packed:there"})
    assert len(commands) == 2 and "--config.data.train=packed:there" in commands[0]


def test_unknown_stages_and_missing_text_are_refused(ladder):
    assert ladder("work", "train_3m")[::2] == (
        2,
        "no stage is named train_3m; the stages: pack train_2m train_6m train_20m train_97m table2 "
        "latency quality auto_1 auto_32 trees figures\n",
    )
    assert ladder("work", DATA="text")[::2] == (2, "DATA needs HELDOUT, held-out text\n")
