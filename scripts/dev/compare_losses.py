"""Which loss makes the best draft: one student, trained once with each loss on the same labels in the same steps.

    python scripts/dev/compare_losses.py --labels=labels/train --heldout=labels/heldout [--student=2m] [--steps=300]

Writes results/smollm2/losses.md and .json. Each training is a run of its own under --runs; a stopped command resumes there.
"""

import pathlib
from typing import Any

from absl import flags

from spectr_jax import cli
from spectr_jax.config import distil_config
from spectr_jax.distillation.labels import open_labels
from spectr_jax.distillation.losses import LOSSES
from spectr_jax.distillation.training import distil
from spectr_jax.errors import unknown
from spectr_jax.files import expanded
from spectr_jax.measure import report
from spectr_jax.runs import REJECTION
from spectr_jax.training.metrics import read_metrics

_WORKDIR = flags.DEFINE_string("workdir", "results/smollm2", "Where the table goes: Markdown and JSON.")
_RUNS = flags.DEFINE_string("runs", "runs/losses", "Where the trainings live.")
_LABELS = flags.DEFINE_string("labels", "labels/train", "What the students learn from: what `spectr_jax.label` wrote.")
_HELDOUT = flags.DEFINE_list("heldout", ["labels/heldout"], "Labels that they are scored on.")
_STUDENT = flags.DEFINE_string("student", "2m", "One of configs/distil.py.")
_LOSSES = flags.DEFINE_list("losses", [*LOSSES], "The losses to compare.")
_STEPS = flags.DEFINE_integer("steps", 300, "Of each training, 32 rows each.", lower_bound=1)


def main():
    for name in _LOSSES.value:
        if name not in LOSSES:
            raise unknown("loss", name, LOSSES)
    labelled = open_labels(_LABELS.value)
    config = distil_config(_STUDENT.value)
    config.update(steps=_STEPS.value, log_every=25, eval_every=100, checkpoint_every=_STEPS.value)
    config.data.update(train=_LABELS.value, heldout=tuple(_HELDOUT.value))
    config.optimizer.warmup_steps = max(1, _STEPS.value // 10)
    rows = []
    for name in _LOSSES.value:
        config.loss = name
        workdir = expanded(_RUNS.value) / f"{_STUDENT.value}_{name}"
        distil(config, workdir)
        records = read_metrics(workdir / "metrics.jsonl")
        scores = [record for record in records if REJECTION in record][-1]
        rows.append({"loss": name, "tokens": sum(record.get("tokens", 0) for record in records), "scores": scores})
    tokens = int(sum((labelled.take([index])["segments"] > 0).sum() for index in range(len(labelled))))
    settings = {
        "student": _STUDENT.value,
        "teacher": labelled.teacher.name,
        "steps": _STEPS.value,
        "heldout": [pathlib.Path(name).name for name in _HELDOUT.value],
    }
    result = {"settings": settings, "labelled": tokens, "rows": rows, **report.provenance()}
    report.write(pathlib.Path(_WORKDIR.value), "losses", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table with its provenance, as Markdown."""
    settings, sets = result["settings"], result["settings"]["heldout"]
    header = ["Loss", *(f"{score}, {name}" for name in sets for score in ("alpha_1", "alpha_4", "KL(q, p)"))]
    body = [
        [
            f"`{row['loss']}`",
            *(f"{row['scores'][f'eval_{key}_{name}']:.3f}" for name in sets for key in ("alpha_1", "alpha_4", "kl")),
        ]
        for row in result["rows"]
    ]
    seen = result["rows"][0]["tokens"]
    passes = seen / result["labelled"]
    notes = [
        f"The `{settings['student']}` student of `{settings['teacher']}`, {settings['steps']} steps with each loss: "
        f"{seen:,} tokens, {passes:.1f} passes over {result['labelled']:,} labelled ones. Scores of the last step, "
        "held out.",
        "alpha_1 is the acceptance of one draft, alpha_4 that of four under the exact plan. Both are told from the 64 "
        "labels of a place, and are at most the true ones. KL, over the tokens that the head scores, in nats per token.",
        report.made_by(result),
    ]
    return f"# Losses\n\n{report.markdown_table(header, body)}\n\n" + "\n\n".join(notes) + "\n"


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
