"""Packs the newest checkpoint of a run into one bfloat16 file, with its tokenizer beside it.

python -m spectr_jax.export --workdir=runs/embedded/draft_6m --out=spectr_jax/embedded
"""

import json
import pathlib

from absl import flags

from spectr_jax import cli

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.", required=True)
_OUT = flags.DEFINE_string("out", None, "The folder that gets NAME.safetensors and tokenizer.model.", required=True)


def main():
    from spectr_jax.errors import UserError
    from spectr_jax.experiments.loading import load_run
    from spectr_jax.models.weights import save_weights
    from spectr_jax.training.metrics import read_metrics

    workdir, out = pathlib.Path(_WORKDIR.value), pathlib.Path(_OUT.value)
    trained = load_run(workdir)
    tokenizer = out / "tokenizer.model"
    if tokenizer.exists() and tokenizer.read_bytes() != trained.tokenizer.proto:
        raise UserError(f"{str(tokenizer)!r} is not the tokenizer of {str(workdir)!r}; choose another --out")
    records = read_metrics(workdir / "metrics.jsonl")
    evaluated = [record for record in records if "eval_nats_per_token" in record]
    notes = {
        "run": json.loads((workdir / "config.json").read_text()),
        "tokens": sum(record.get("tokens", 0) for record in records),
        "evaluation": evaluated[-1] if evaluated else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.write_bytes(trained.tokenizer.proto)
    save_weights(out / f"{trained.name}.safetensors", trained.model, trained.tokenizer.proto, notes)


if __name__ == "__main__":
    cli.run(main)
