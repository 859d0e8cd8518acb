"""Trains the papers' ladder of models and makes its tables and figure, in resumable stages.

    scripts/train_ladder.sh --workdir=runs/lm1b    # on LM1B, after scripts/prepare_lm1b.sh
    scripts/train_ladder.sh --workdir=runs/open --data='my_text/train-*' --heldout='my_text/held*'
    scripts/train_ladder.sh --workdir=runs/lm1b --only=train_2m,train_6m \\
        --stage_flags='train: --config.steps=20000'

For one accelerator. You can stop it at any time: the same command resumes and skips what is done. A
stage that fails does not stop stages that do not need it. The stages and their results under
--workdir are:

    pack        the tokenized text (packed); only with --data
    train_2m, train_6m, train_20m, train_97m
                a training run each (draft_2m, ..., target_97m); its weights are exported to ladder
                in bfloat16
    table2      SpecTr's Tables 2 and 4 (results/table2, and so on)
    latency     SpecTr's Tables 1 and 3, and the time of each phase of a call
    quality     bits per character on held-out sentences, in float32, bfloat16 and int8
    auto_1, auto_32
                the fastest method for one sequence and for 32
    trees       all methods at equal numbers of drafted tokens, ERSD's Figures 3 and 4
    figures     SpecTr's Figure 5

The recipe is configs/lm1b for LM1B and configs/open_text.py for --data. --stage_flags changes
anything else, as in 'train: --config.batch_size=128', 'export: --dtype=int8' (the weights in
ladder) or 'table2,trees: --config.num_prompts=100'.
"""

import collections
import dataclasses
import pathlib
import shlex
import signal
import subprocess
import sys

from absl import flags

from spectr_jax.utils import cli
from spectr_jax.utils.errors import Interrupted, UserError, unknown

_WORKDIR = flags.DEFINE_string("workdir", None, "The folder that gets everything.", required=True)
_DATA = flags.DEFINE_string(
    "data", None, "Training text: a file, a folder, a glob or packed:FOLDER; LM1B by default."
)
_HELDOUT = flags.DEFINE_string(
    "heldout", None, "Held-out text, with --data: for evaluation, and as prompts."
)
_TFDS = flags.DEFINE_string("tfds_dir", "", "Where TFDS keeps LM1B, if not in its default folder.")
_ONLY = flags.DEFINE_list("only", [], "The stages to run; all by default.")
_STAGE_FLAGS = flags.DEFINE_multi_string(
    "stage_flags", [], "Extra flags for stages, as STAGE,...: FLAG ...; may be repeated."
)

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
PACKED = "packed:"
MODELS = {f"train_{size}": f"draft_{size}" for size in ("2m", "6m", "20m")}
MODELS["train_97m"] = "target_97m"
ALL, PAIR = tuple(MODELS), ("train_6m", "train_97m")
Flags = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step of the experiment.

    Attributes:
      makes: a glob under the workdir that has a match once the stage is done.
      commands: the programs to run, each a module and its flags.
      needs: the stages whose results it reads.
    """

    makes: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()


def trainings(
    work: pathlib.Path, data: str, heldout: str, tfds: str, more: Flags
) -> dict[str, Stage]:
    """Returns the stages that pack the text and train the models; on LM1B without `data`."""
    stages: dict[str, Stage] = {}
    packed = data.removeprefix(PACKED) if data.startswith(PACKED) else f"{work}/packed"
    if data and not data.startswith(PACKED):
        places = f"--data={data}", f"--out={packed}", f"--tfds_dir={tfds}"
        stages["pack"] = Stage("packed/packed.json", (("spectr_jax.pack", *places, *more["pack"]),))
    needs = tuple(stages)
    corpus = [f"--config.data.train={PACKED}{packed}"] if data else []
    corpus += [f"--config.data.tfds_dir={tfds}", f"--config.data.heldout={heldout}"]
    corpus += [f"--config.data.tokenizer={packed if data else work}/tokenizer.model"]
    for name, model in MODELS.items():
        config = f"--config={CONFIGS}/" + (f"open_text.py:{model}" if data else f"lm1b/{model}.py")
        train = "spectr_jax.train", config, f"--workdir={work}/{model}", *corpus
        export = "spectr_jax.export", f"--model={work}/{model}", f"--out={work}/ladder"
        commands = (*train, *more["train"], *more[name]), (*export, *more["export"])
        stages[name] = Stage(f"ladder/{model}*.safetensors", commands, needs)
    return stages


def evaluations(work: pathlib.Path, heldout: str, tfds: str, more: Flags) -> dict[str, Stage]:
    """Returns the stages that make tables and figures from the weights in `work`/ladder."""
    draft_2m, draft_6m, draft_20m, target = (f"{work}/ladder/{model}" for model in MODELS.values())
    bfloat16, tfds_dir = "--config.dtype=bfloat16", f"--config.tfds_dir={tfds}"
    pair = f"--config.target={target}", f"--config.draft={draft_6m}"
    decoding = pair[0], f"--config.prompts={heldout}", tfds_dir, bfloat16
    models = f"--config.models={(target, draft_20m, draft_6m, draft_2m)}"
    drafts = f"--config.drafts={(draft_2m, draft_6m, draft_20m)}"
    figure_5 = "--config.only=('spectr_figure_5',)"

    def batch(size: int, prompts: int) -> tuple[str, str]:
        return f"--config.batch_size={size}", f"--config.num_prompts={prompts}"

    tables = {  # Stage: (config, table, needs, settings).
        "table2": ("table2", "tokens_per_call", ALL, (*decoding, drafts, *batch(256, 1_000))),
        "latency": ("latency", "latency", ALL, (models, pair[1], bfloat16)),
        "quality": ("quality", "quality", ALL, (models, f"--config.heldout={heldout}", tfds_dir)),
        "auto_1": ("auto", "auto", PAIR, (*decoding, pair[1], *batch(1, 16))),
        "auto_32": ("auto", "auto", PAIR, (*decoding, pair[1], *batch(32, 32))),
        "trees": ("trees", "trees", PAIR, (*decoding, pair[1], *batch(32, 256))),
        "figures": ("figures", "spectr_figure_5", PAIR, (figure_5, *pair)),
    }
    stages = {}
    for name, (config, table, needs, settings) in tables.items():
        places = f"--config={CONFIGS}/{config}.py", f"--workdir={work}/results/{name}"
        command = "spectr_jax.eval", *places, *settings, *more[name]
        stages[name] = Stage(f"results/{name}/{table}.json", (command,), needs)
    return stages


def stage_flags(given: list[str]) -> Flags:
    """Returns the flags that `--stage_flags` has for each stage.

    Raises:
      UserError: an entry is not STAGE: FLAG ...
    """
    more: Flags = collections.defaultdict(list)
    for entry in given:
        names, colon, values = entry.partition(":")
        try:
            parts = shlex.split(values)
        except ValueError as error:
            raise UserError(f"--stage_flags={entry!r}: {error}; fix its quotes") from error
        if not colon or not parts:
            example = "'train: --config.steps=20000'"
            raise UserError(f"--stage_flags={entry!r}: must be STAGE: FLAG ..., such as {example}")
        for name in names.split(","):
            more[name.strip()] += parts
    return more


class Runner:
    """Runs one program at a time. SIGINT and SIGTERM end it with SIGTERM, and no other starts."""

    def __init__(self):
        self._stopped = False
        self._process: subprocess.Popen | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *_) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.terminate()

    def __call__(self, stage: str, command: tuple[str, ...]) -> bool:
        """Returns whether the command succeeded; raises `Interrupted` if it was stopped."""
        status = cli.INTERRUPTED
        if not self._stopped:
            self._process = subprocess.Popen([sys.executable, "-m", *command])
            if self._stopped:  # The signal came while the program started.
                self._process.terminate()
            status = self._process.wait()
        if status == cli.INTERRUPTED or (status and self._stopped):
            raise Interrupted(f"stopped at stage {stage}; the same command resumes")
        return status == 0


def run(work: pathlib.Path, stages: dict[str, Stage], chosen: list[str]) -> None:
    """Runs the chosen stages that are not done.

    Raises:
      UserError: stages failed, or were not run because the results of others are missing.
    """
    runner, failed, waiting = Runner(), [], []
    (work / "done").mkdir(parents=True, exist_ok=True)
    for name in chosen:
        stage, mark, wanted = stages[name], work / "done" / name, _script(stages, name)
        if any(work.glob(stage.makes)) and mark.exists() and mark.read_text() == wanted:
            print(f"== {name} is done", flush=True)
            continue
        made = {need for need in stage.needs if any(work.glob(stages[need].makes))}
        ready = made - {*failed, *waiting}
        if missing := [need for need in stage.needs if need not in ready]:
            print(f"== {name} needs {', '.join(missing)}", flush=True)
            waiting.append(name)
            continue
        print(f"== {name}", flush=True)
        if all(runner(name, command) for command in stage.commands):
            mark.write_text(wanted)
        else:
            failed.append(name)
    ended = {"failed": failed, "not run": waiting}
    if found := [f"{what}: {', '.join(names)}" for what, names in ended.items() if names]:
        raise UserError(f"{'; '.join(found)}; fix the errors above and run the same command again")


def _script(stages: dict[str, Stage], name: str) -> str:
    """Returns the commands of a stage and of those that it needs. If they change, it runs again."""
    before = "".join(_script(stages, need) for need in stages[name].needs if need in stages)
    return before + "".join(shlex.join(command) + "\n" for command in stages[name].commands)


def main():
    # Imported here so that --help does not wait for JAX.
    from spectr_jax.data.corpus import open_sentences, text_files
    from spectr_jax.data.packed import INDEX
    from spectr_jax.utils.files import expanded

    if bool(_DATA.value) != bool(_HELDOUT.value):
        raise UserError("--data and --heldout belong together; give both, or neither for LM1B")
    work, data, heldout = expanded(_WORKDIR.value), _DATA.value or "", _HELDOUT.value
    heldout, tfds = heldout or "tfds:lm1b:test", _TFDS.value
    more = stage_flags(_STAGE_FLAGS.value)
    stages = trainings(work, data, heldout, tfds, more) | evaluations(work, heldout, tfds, more)
    for name in [*_ONLY.value, *(more.keys() - {"train", "export"})]:
        if name not in stages:
            raise unknown("stage", name, stages)
    chosen = [name for name in stages if not _ONLY.value or name in _ONLY.value]
    # Missing text is reported now, not after hours of training.
    commands = [command for name in chosen for command in stages[name].commands]
    if any(f"={heldout}" in argument for command in commands for argument in command):
        open_sentences(heldout, tfds or None)
    if "pack" in chosen and not data.startswith("tfds:"):
        text_files(data)
    if data.startswith(PACKED) and not pathlib.Path(data.removeprefix(PACKED), INDEX).exists():
        raise UserError(f"--data={data}: has no {INDEX}; pack it with python -m spectr_jax.pack")
    run(work, stages, chosen)


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
