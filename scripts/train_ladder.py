"""Trains the papers' ladder of models and makes its tables and figure, in resumable stages.

    scripts/train_ladder.sh --workdir=runs/lm1b    # on LM1B, after scripts/prepare_lm1b.sh
    scripts/train_ladder.sh --workdir=runs/open --data='my_text/train-*' --heldout='my_text/held*'
    scripts/train_ladder.sh --workdir=runs/lm1b --only=train_2m,train_6m \\
        --stage_flags='train: --config.steps=20000'

For one accelerator. You can stop it at any time: the same command resumes, because each program
continues its own work and leaves finished work alone. A stage that fails does not stop stages that
do not need it. The stages and their results under --workdir are:

    pack        the tokenized text (packed)
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

The recipe is configs/lm1b.py for LM1B and configs/open_text.py for --data. --stage_flags changes
anything else, as in 'train: --config.batch_size=128', 'export: --dtype=int8' (the weights in
ladder), 'table2,trees: --config.num_prompts=100', or 'table2: --again' after a model has changed.
"""

import collections
import pathlib
import shlex
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
LM1B, PACKED = "tfds:lm1b:train", "packed:"
MODELS = {f"train_{size}": f"draft_{size}" for size in ("2m", "6m", "20m")}
MODELS["train_97m"] = "target_97m"
Flags = dict[str, list[str]]
Stages = dict[str, list[tuple[str, ...]]]
"""The commands of each stage, each a module and its flags."""
NEEDS = dict.fromkeys(MODELS, ("pack",))
NEEDS |= {name: tuple(MODELS) for name in ("table2", "latency", "quality")}
NEEDS |= dict.fromkeys(("auto_1", "auto_32", "trees", "figures"), ("train_6m", "train_97m"))


def trainings(work: pathlib.Path, data: str, heldout: str, tfds: str, more: Flags) -> Stages:
    """Returns the stages that pack the text and train the models; on LM1B without `data`."""
    stages: Stages = {}
    packed = data.removeprefix(PACKED) if data.startswith(PACKED) else f"{work}/packed"
    if not data.startswith(PACKED):
        places = f"--data={data or LM1B}", f"--out={packed}", f"--tfds_dir={tfds}"
        stages["pack"] = [("spectr_jax.pack", *places, *more["pack"])]
    corpus = f"--config.data.train={PACKED}{packed}", f"--config.data.heldout={heldout}"
    corpus += f"--config.data.tfds_dir={tfds}", f"--config.data.tokenizer={packed}/tokenizer.model"
    for name, model in MODELS.items():
        config = f"--config={CONFIGS}/{'open_text' if data else 'lm1b'}.py:{model}"
        train = "spectr_jax.train", config, f"--workdir={work}/{model}", *corpus
        export = "spectr_jax.export", f"--model={work}/{model}", f"--out={work}/ladder"
        stages[name] = [(*train, *more["train"], *more[name]), (*export, *more["export"])]
    return stages


def evaluations(work: pathlib.Path, heldout: str, tfds: str, more: Flags) -> Stages:
    """Returns the stages that make tables and figures from the weights in `work`/ladder."""
    draft_2m, draft_6m, draft_20m, target = (f"{work}/ladder/{model}" for model in MODELS.values())
    bfloat16, tfds_dir = "--config.dtype=bfloat16", f"--config.tfds_dir={tfds}"
    pair = f"--config.target={target}", f"--config.draft={draft_6m}"
    decoding = pair[0], f"--config.prompts={heldout}", tfds_dir, bfloat16
    models = f"--config.models={(target, draft_20m, draft_6m, draft_2m)}"
    drafts = f"--config.drafts={(draft_2m, draft_6m, draft_20m)}"

    def batch(size: int, prompts: int) -> tuple[str, str]:
        return f"--config.batch_size={size}", f"--config.num_prompts={prompts}"

    tables = {  # Stage: (config, settings).
        "table2": ("table2", (*decoding, drafts, *batch(256, 1_000))),
        "latency": ("latency", (models, pair[1], bfloat16)),
        "quality": ("quality", (models, f"--config.heldout={heldout}", tfds_dir)),
        "auto_1": ("auto", (*decoding, pair[1], *batch(1, 16))),
        "auto_32": ("auto", (*decoding, pair[1], *batch(32, 32))),
        "trees": ("trees", (*decoding, pair[1], *batch(32, 256))),
        "figures": ("figures", ("--config.only=('spectr_figure_5',)", *pair)),
    }
    stages: Stages = {}
    for name, (config, settings) in tables.items():
        places = f"--config={CONFIGS}/{config}.py", f"--workdir={work}/results/{name}"
        stages[name] = [("spectr_jax.eval", *places, *settings, *more[name])]
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


def succeeds(stage: str, command: tuple[str, ...]) -> bool:
    """Runs a program and returns whether it succeeded. Ctrl-C and SIGTERM end it with SIGTERM and
    raise `Interrupted`."""
    process, stopped = subprocess.Popen([sys.executable, "-m", *command]), False
    while True:
        try:
            status = process.wait()
            break
        except (
            KeyboardInterrupt
        ):  # `cli.run` raises it for SIGTERM too. The program saves its work.
            process.terminate()
            stopped = True
    if status == cli.INTERRUPTED or (stopped and status):
        raise Interrupted(f"stopped at stage {stage}; the same command resumes")
    return status == 0


def run(stages: Stages) -> None:
    """Runs the stages. Raises `UserError` if some failed, or need one that failed."""
    failed: list[str] = []
    for name, commands in stages.items():
        if missing := [need for need in NEEDS.get(name, ()) if need in failed]:
            print(f"== {name} needs {', '.join(missing)}", flush=True)
        else:
            print(f"== {name}", flush=True)
        if missing or not all(succeeds(name, command) for command in commands):
            failed.append(name)
    if failed:
        raise UserError(
            f"failed: {', '.join(failed)}; fix the errors above and run the same command again"
        )


def main():
    # Imported here so that --help does not wait for JAX.
    from spectr_jax.data.corpus import open_sentences, text_files
    from spectr_jax.data.packed import open_corpus
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
    stages = {name: stages[name] for name in stages if not _ONLY.value or name in _ONLY.value}
    # Missing text is reported now, not after hours of training.
    if any(f"={heldout}" in argument for each in stages.values() for argument in sum(each, ())):
        open_sentences(heldout, tfds or None)
    if data.startswith(PACKED) and stages.keys() & MODELS.keys():
        open_corpus(data)
    elif "pack" in stages and not (data or LM1B).startswith("tfds:"):
        text_files(data)
    run(stages)


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
