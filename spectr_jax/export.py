"""Packs a checkpoint of a run into one file or a few, with its tokenizer beside it.

    python -m spectr_jax.export --workdir=runs/embedded/draft_6m --out=spectr_jax/embedded
    python -m spectr_jax.export --workdir=runs/ladder/target_97m@best --out=results/ladder --dtype=int8 --part_mb=16

What it writes can be the target or draft of an evaluation: --config.target=results/ladder/target_97m.
"""

import json
import pathlib

from absl import flags

from spectr_jax import cli

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The training run: its newest checkpoint, or with @best its best.", required=True
)
_OUT = flags.DEFINE_string("out", None, "The folder that gets NAME.safetensors and tokenizer.model.", required=True)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of the matrices: bfloat16, or int8 with a scale for each output.")
_PART_MB = flags.DEFINE_float(
    "part_mb", 0.0, "The most that a file may have, in millions of bytes; 0 for one file.", lower_bound=0.0
)


def main():
    from spectr_jax.errors import UserError, unknown
    from spectr_jax.experiments.loading import BEST, load_run
    from spectr_jax.files import write_whole
    from spectr_jax.models.weights import STORED, save_weights
    from spectr_jax.training.checkpoint import METRIC
    from spectr_jax.training.metrics import read_metrics

    if _DTYPE.value not in STORED:
        raise unknown("--dtype", _DTYPE.value, STORED)
    best = _WORKDIR.value.endswith(BEST)
    workdir, out = pathlib.Path(_WORKDIR.value.removesuffix(BEST)).expanduser(), pathlib.Path(_OUT.value)
    trained = load_run(workdir, best=best)
    tokenizer, proto = out / "tokenizer.model", (workdir / "tokenizer.model").read_bytes()
    if tokenizer.exists() and tokenizer.read_bytes() != proto:
        raise UserError(f"{str(tokenizer)!r} is not the tokenizer of {str(workdir)!r}; choose another --out")
    records = read_metrics(workdir / "metrics.jsonl")
    evaluated = [record for record in records if METRIC in record]
    notes = {
        "run": json.loads((workdir / "config.json").read_text()),
        "tokens": sum(record.get("tokens", 0) for record in records),
        "evaluation": (min(evaluated, key=lambda record: record[METRIC]) if best else evaluated[-1]) if evaluated else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    part_bytes = round(_PART_MB.value * 1e6) or None
    files = save_weights(out / trained.name, trained.model, proto, notes, _DTYPE.value, part_bytes)
    write_whole(tokenizer, proto)
    for file in files:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    cli.run(main, output=_OUT)
