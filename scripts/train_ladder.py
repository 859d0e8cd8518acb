"""The paper's experiment at its own size: trains the ladder of models and makes its tables and figure.

    scripts/train_ladder.sh --workdir=runs/lm1b      # on LM1B, prepared by scripts/prepare_lm1b.sh
    scripts/train_ladder.sh --workdir=runs/open --data='corpus/train-*.txt.xz' --heldout='corpus/heldout-*'
    scripts/train_ladder.sh --workdir=runs/lm1b --only=train_2m,train_6m \\
        --stage_flags='train: --config.steps=20000'

For one accelerator. Stop it at any time: the same command resumes. What is done is skipped, and a
stage that fails does not stop those that do not need it. The stages, and where each leaves its work
under --workdir:

    pack        the text tokenised once (packed); only with --data
    train_2m train_6m train_20m train_97m
                a training each (draft_2m, ..., target_97m); its weights go to ladder at once, in
                bfloat16
    table2      SpecTr's Tables 2 and 4 (results/table2, and so on)
    latency     SpecTr's Tables 1 and 3, and where the time of a call goes
    quality     bits per character on held-out sentences, in float32, bfloat16 and int8
    auto_1 auto_32
                which method is fastest, with one sequence at a time and with 32
    trees       all methods at equal numbers of drafted tokens, ERSD's Figures 3 and 4
    figures     SpecTr's Figure 5

The recipe is configs/lm1b for LM1B and configs/open_text.py for --data. --stage_flags changes
anything else, such as 'train: --config.batch_size=128', 'export: --dtype=int8' (of the weights in
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
    "data", None, "Text to train on: a file, a folder or a glob; or packed:FOLDER. LM1B without it."
)
_HELDOUT = flags.DEFINE_string(
    "heldout", None, "Held-out text, for --data: evaluated on, and its sentences are prompts."
)
_TFDS = flags.DEFINE_string("tfds_dir", "", "Where TFDS keeps LM1B, if not in its default folder.")
_ONLY = flags.DEFINE_list("only", [], "The stages to run; all if none is given.")
_STAGE_FLAGS = flags.DEFINE_multi_string(
    "stage_flags", [], "STAGE,...: FLAG ..., more flags of stages; may be repeated."
)

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
PACKED = "packed:"
LM1B_HELDOUT = "tfds:lm1b:test"
MODELS = {
    "train_2m": "draft_2m",
    "train_6m": "draft_6m",
    "train_20m": "draft_20m",
    "train_97m": "target_97m",
}
ALL, PAIR = tuple(MODELS), ("train_6m", "train_97m")
Flags = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A step of the experiment.

    Attributes:
      makes: a glob under the workdir; something matches it once the stage is done.
      commands: the programs to run, each a module and its flags.
      needs: the stages whose work it reads.
    """

    makes: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()


def trainings(
    work: pathlib.Path, data: str, heldout: str, tfds_dir: str, more: Flags
) -> dict[str, Stage]:
    """The text packed, if need be, and the models trained and exported; without `data` on LM1B."""
    stages: dict[str, Stage] = {}
    packed = data.removeprefix(PACKED) if data.startswith(PACKED) else f"{work}/packed"
    if data and not data.startswith(PACKED):
        pack = (
            "spectr_jax.pack",
            f"--data={data}",
            f"--out={packed}",
            f"--tfds_dir={tfds_dir}",
            *more["pack"],
        )
        stages["pack"] = Stage("packed/packed.json", (pack,))
    needs = tuple(stages)
    source = (f"--config.data.train={PACKED}{packed}",) if data else ()
    tfds = f"--config.data.tfds_dir={tfds_dir}"  # Of the held-out sentences too.
    tokenizer = f"--config.data.tokenizer={packed if data else work}/tokenizer.model"
    for name, model in MODELS.items():
        config = f"--config={CONFIGS}/" + (f"open_text.py:{model}" if data else f"lm1b/{model}.py")
        corpus = (*source, tfds, f"--config.data.heldout={heldout}", tokenizer)
        train = (
            "spectr_jax.train",
            config,
            f"--workdir={work}/{model}",
            *corpus,
            *more["train"],
            *more[name],
        )
        export = (
            "spectr_jax.export",
            f"--model={work}/{model}",
            f"--out={work}/ladder",
            *more["export"],
        )
        stages[name] = Stage(f"ladder/{model}*.safetensors", (train, export), needs)
    return stages


def evaluations(work: pathlib.Path, heldout: str, tfds_dir: str, more: Flags) -> dict[str, Stage]:
    """The tables and figures, of the weights in `work`/ladder."""
    draft_2m, draft_6m, draft_20m, target = (f"{work}/ladder/{model}" for model in MODELS.values())
    bfloat16, tfds = "--config.dtype=bfloat16", f"--config.tfds_dir={tfds_dir}"
    decoding = (f"--config.target={target}", f"--config.prompts={heldout}", tfds, bfloat16)
    draft = f"--config.draft={draft_6m}"
    models = f"--config.models={(target, draft_20m, draft_6m, draft_2m)}"
    drafts = f"--config.drafts={(draft_2m, draft_6m, draft_20m)}"

    def evaluate(
        stage: str, config: str, table: str, needs: tuple[str, ...], *settings: str
    ) -> tuple[str, Stage]:
        places = (f"--config={CONFIGS}/{config}.py", f"--workdir={work}/results/{stage}")
        command = ("spectr_jax.eval", *places, *settings, *more[stage])
        return stage, Stage(f"results/{stage}/{table}.json", (command,), needs)

    def batch(size: int, prompts: int) -> tuple[str, str]:
        return f"--config.batch_size={size}", f"--config.num_prompts={prompts}"

    figure_5 = "--config.only=('spectr_figure_5',)"
    pair = f"--config.target={target}", f"--config.draft={draft_6m}"
    return dict(
        [
            evaluate(
                "table2", "table2", "tokens_per_call", ALL, *decoding, drafts, *batch(256, 1_000)
            ),
            evaluate("latency", "latency", "latency", ALL, models, draft, bfloat16),
            evaluate(
                "quality", "quality", "quality", ALL, models, f"--config.heldout={heldout}", tfds
            ),
            evaluate("auto_1", "auto", "auto", PAIR, *decoding, draft, *batch(1, 16)),
            evaluate("auto_32", "auto", "auto", PAIR, *decoding, draft, *batch(32, 32)),
            evaluate("trees", "trees", "trees", PAIR, *decoding, draft, *batch(32, 256)),
            evaluate("figures", "figures", "spectr_figure_5", PAIR, figure_5, *pair),
        ]
    )


def stage_flags(given: list[str]) -> Flags:
    """The flags that `--stage_flags` has for each stage; raises `UserError` if it cannot be
    read."""
    more: Flags = collections.defaultdict(list)
    for entry in given:
        names, colon, values = entry.partition(":")
        try:
            parts = shlex.split(values)
        except ValueError as error:
            raise UserError(
                f"--stage_flags={entry!r} cannot be read ({error}); fix its quotes"
            ) from error
        if not colon or not parts:
            raise UserError(
                f"--stage_flags={entry!r} is not STAGE: FLAG ..., such as 'train: "
                "--config.steps=20000'"
            )
        for name in names.split(","):
            more[name.strip()] += parts
    return more


class Runner:
    """Runs one program at a time; SIGINT and SIGTERM are passed on to it as SIGTERM, and no other
    one is started then."""

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
        """Whether the command succeeded; raises `Interrupted` if it was stopped before its end."""
        status = cli.INTERRUPTED
        if not self._stopped:
            self._process = subprocess.Popen([sys.executable, "-m", *command])
            if self._stopped:  # While it was started.
                self._process.terminate()
            status = self._process.wait()
        if status == cli.INTERRUPTED or (status and self._stopped):
            raise Interrupted(f"stopped at stage {stage}; the same command resumes")
        return status == 0


def run(work: pathlib.Path, stages: dict[str, Stage], chosen: list[str]) -> None:
    """Runs the chosen stages that are not done; raises `UserError` if some failed, or lack the work
    of others."""
    runner, failed, waiting = Runner(), [], []
    (work / "done").mkdir(parents=True, exist_ok=True)
    for name in chosen:
        stage, mark, wanted = stages[name], work / "done" / name, _script(stages, name)
        if any(work.glob(stage.makes)) and mark.exists() and mark.read_text() == wanted:
            print(f"== {name} is done", flush=True)
            continue
        missing = [
            need
            for need in stage.needs
            if need in failed + waiting or not any(work.glob(stages[need].makes))
        ]
        if missing:
            print(f"== {name} needs {', '.join(missing)}", flush=True)
            waiting.append(name)
            continue
        print(f"== {name}", flush=True)
        if all(runner(name, command) for command in stage.commands):
            mark.write_text(wanted)
        else:
            failed.append(name)
    if failed or waiting:
        told = [
            f"{word}: {', '.join(names)}"
            for word, names in (("failed", failed), ("not run", waiting))
            if names
        ]
        raise UserError(
            f"{'; '.join(told)}; see the messages above, fix that, and give the same command again"
        )


def _script(stages: dict[str, Stage], name: str) -> str:
    """The commands of a stage and of the stages that it needs: what is done is
    done by these."""
    before = "".join(_script(stages, need) for need in stages[name].needs if need in stages)
    return before + "".join(shlex.join(command) + "\n" for command in stages[name].commands)


def main():
    from spectr_jax.data.corpus import (  # Once flags are parsed: `--help` need not wait for JAX.
        open_sentences,
        text_files,
    )
    from spectr_jax.data.packed import INDEX
    from spectr_jax.utils.files import expanded

    work, data, heldout = (
        expanded(_WORKDIR.value),
        _DATA.value or "",
        _HELDOUT.value or LM1B_HELDOUT,
    )
    if bool(_DATA.value) != bool(_HELDOUT.value):
        raise UserError("--data and --heldout belong together; give both, or neither for LM1B")
    more = stage_flags(_STAGE_FLAGS.value)
    stages = trainings(work, data, heldout, _TFDS.value, more) | evaluations(
        work, heldout, _TFDS.value, more
    )
    for name in [*_ONLY.value, *(more.keys() - {"train", "export"})]:
        if name not in stages:
            raise unknown("stage", name, stages)
    chosen = [name for name in stages if not _ONLY.value or name in _ONLY.value]
    if any(
        f"={heldout}" in argument
        for name in chosen
        for command in stages[name].commands
        for argument in command
    ):
        open_sentences(
            heldout, _TFDS.value or None
        )  # Told now if it is not there, and not after hours.
    if "pack" in chosen and not data.startswith("tfds:"):
        text_files(data)
    if data.startswith(PACKED) and not pathlib.Path(data.removeprefix(PACKED), INDEX).exists():
        raise UserError(
            f"--data={data}: there is no {INDEX}; pack it again with python -m spectr_jax.pack"
        )
    run(work, stages, chosen)


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
