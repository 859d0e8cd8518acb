"""Exports a trained model with its tokenizer, as safetensors or as a folder for transformers.

    python -m spectr_jax.export --model=runs/embedded/draft_6m --out=spectr_jax/embedded
    python -m spectr_jax.export --model=runs/ladder/target_97m@best --out=spectr_jax/embedded --dtype=int8 --part_mb=16
    python -m spectr_jax.export --model=smollm2 --out=smollm2 --format=llama

The result can be named wherever a model is, as --config.target=runs/models/draft_6m or hf:smollm2.
"""

import pathlib

from absl import flags

from spectr_jax.utils import cli
from spectr_jax.utils.files import expanded

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "The workdir of a training run, with @best appended for its best checkpoint instead of its "
    "newest; with --format=llama the name of any model of the Llama family.",
    required=True,
)
_OUT = flags.DEFINE_string("out", None, "The folder to write to.", required=True)
_FORMAT = flags.DEFINE_enum(
    "format",
    "spectr_jax",
    ["spectr_jax", "llama"],
    "spectr_jax: NAME.safetensors and tokenizer.model. llama: a folder for transformers, in float32.",
)
_DTYPE = flags.DEFINE_string(
    "dtype",
    None,
    "Precision of the stored matrices: bfloat16 (default), or int8 with one scale per output. Not "
    "for --format=llama.",
)
_PART_MB = flags.DEFINE_float(
    "part_mb",
    0.0,
    "The largest size of a file's arrays in MB; 0 for one file of any size.",
    lower_bound=0.0,
)


def main():
    out = expanded(_OUT.value)
    files = _ours(out) if _FORMAT.value == "spectr_jax" else _folder(out)
    for file in files:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def _ours(out: pathlib.Path) -> list[pathlib.Path]:
    from spectr_jax.loading.by_name import BEST, load_run
    from spectr_jax.models.formats.runs import TOKENIZER, open_run
    from spectr_jax.models.formats.weights import STORED, read_notes, save_weights
    from spectr_jax.training.metrics import read_metrics
    from spectr_jax.utils.errors import UserError, unknown
    from spectr_jax.utils.files import expanded_with_name, write_whole

    dtype = _DTYPE.value or "bfloat16"
    if dtype not in STORED:
        raise unknown("--dtype", dtype, STORED)
    best = _MODEL.value.endswith(BEST)
    workdir = expanded_with_name(_MODEL.value.removesuffix(BEST))
    if not workdir.is_dir():
        raise UserError(
            f"--model={_MODEL.value}: is not the workdir of a training run, and only these can be "
            "exported; fix the path, or give --format=llama"
        )
    trained, run = load_run(workdir, best=best), open_run(workdir)
    tokenizer, proto = out / TOKENIZER, None if run.student else (workdir / TOKENIZER).read_bytes()
    if proto and tokenizer.exists() and tokenizer.read_bytes() != proto:
        raise UserError(
            f"{str(tokenizer)!r} is not the tokenizer of {str(workdir)!r}; choose another --out"
        )
    checkpoint = "best" if best else "newest"
    stored = read_notes(out / trained.name).get("checkpoint", checkpoint)
    if stored != checkpoint:
        raise UserError(
            f"--out={_OUT.value}: has the {stored} checkpoint as {trained.name!r}, and --model "
            f"names the {checkpoint} one; choose another folder"
        )
    records = read_metrics(workdir / "metrics.jsonl")
    evaluated = [record for record in records if run.metric in record]
    if best and evaluated:
        evaluated = [min(evaluated, key=lambda record: record[run.metric])]
    notes = {
        "run": run.config,
        "checkpoint": checkpoint,
        "tokens": sum(record.get("tokens", 0) for record in records),
        "evaluation": evaluated[-1] if evaluated else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    part_bytes = round(_PART_MB.value * 1e6) or None
    names = trained.tokenizer.vocabulary if proto is None else proto
    files = save_weights(out / trained.name, trained.model, names, notes, dtype, part_bytes)
    if proto:
        write_whole(tokenizer, proto)
    return files


def _folder(out: pathlib.Path) -> list[pathlib.Path]:
    from spectr_jax.data.hugging_face import HuggingFaceTokenizer
    from spectr_jax.data.tokenizer import VocabularyOf
    from spectr_jax.loading.by_name import load
    from spectr_jax.models.formats.hf_llama import save_llama
    from spectr_jax.models.llama import Llama
    from spectr_jax.utils.errors import UserError

    model_flag = f"--model={_MODEL.value}"
    for flag in (_DTYPE, _PART_MB):
        if flag.value:
            raise UserError(
                f"--{flag.name}={flag.value}: does not apply to --format=llama; leave it out"
            )
    if (out / "config.json").exists():
        raise UserError(f"--out={str(out)!r}: has a config.json already; choose another folder")
    _, model, tokenizer = load(_MODEL.value, "float32")
    if isinstance(tokenizer, VocabularyOf):
        raise UserError(
            f"{model_flag}: is a draft that was trained for its target, without a tokenizer and with "
            "parts that transformers lacks; leave --format=llama out, or copy its files"
        )
    if not isinstance(model, Llama) or not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"{model_flag}: must be of the Llama family with a tokenizer of Hugging Face's library; "
            "give another model, or leave --format=llama out"
        )
    eos = tokenizer.eos if isinstance(tokenizer.eos, int) else list(tokenizer.eos)
    save_llama(out, model, tokenizer.bos, eos)
    tokenizer.save(out, model.context)
    return sorted(path for path in out.iterdir() if path.suffix in (".json", ".safetensors"))


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main, output=_OUT)
