"""Exports a trained model with its tokenizer: as safetensors in one file or several, or as a folder for transformers.

    python -m spectr_jax.export --model=runs/embedded/draft_6m --out=spectr_jax/embedded
    python -m spectr_jax.export --model=runs/ladder/target_97m@best --out=results/target_97m --dtype=int8 --part_mb=16
    python -m spectr_jax.export --model=6m --out=draft_6m --format=gpt2
    python -m spectr_jax.export --model=smollm2 --out=smollm2 --format=llama

What it writes can be a target or draft wherever a model is named, as --config.target=runs/models/draft_6m or
hf:draft_6m.
"""

import pathlib

from absl import flags

from spectr_jax.utils import cli
from spectr_jax.utils.files import expanded

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "The workdir of a training run (its newest checkpoint, or its best with @best); for gpt2 and "
    "llama any model by name.",
    required=True,
)
_OUT = flags.DEFINE_string("out", None, "The folder that gets the files.", required=True)
_FORMAT = flags.DEFINE_enum(
    "format",
    "spectr_jax",
    ["spectr_jax", "gpt2", "llama"],
    "NAME.safetensors and tokenizer.model; or a folder for transformers: gpt2 of our decoders, "
    "llama of the Llama family.",
)
_DTYPE = flags.DEFINE_string(
    "dtype",
    None,
    "Precision of the stored matrices: bfloat16 (default), or int8 with one scale per output; not "
    "for --format=gpt2 and "
    "llama, which are float32.",
)
_PART_MB = flags.DEFINE_float(
    "part_mb",
    0.0,
    "The largest size of a file, in millions of bytes; 0 for one file of any size.",
    lower_bound=0.0,
)


def main():
    out = expanded(_OUT.value)
    files = {"spectr_jax": _ours, "gpt2": _gpt2, "llama": _llama}[_FORMAT.value](out)
    for file in files:
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def _ours(out: pathlib.Path) -> list[pathlib.Path]:
    from spectr_jax.loading.by_name import BEST, load_run
    from spectr_jax.models.weights import STORED, save_weights
    from spectr_jax.training.metrics import read_metrics
    from spectr_jax.training.runs import TOKENIZER, open_run
    from spectr_jax.utils.errors import UserError, unknown
    from spectr_jax.utils.files import named, write_whole

    dtype = _DTYPE.value or "bfloat16"
    if dtype not in STORED:
        raise unknown("--dtype", dtype, STORED)
    best = _MODEL.value.endswith(BEST)
    workdir = named(_MODEL.value.removesuffix(BEST))
    trained, run = load_run(workdir, best=best), open_run(workdir)
    tokenizer, proto = out / TOKENIZER, None if run.student else (workdir / TOKENIZER).read_bytes()
    if proto and tokenizer.exists() and tokenizer.read_bytes() != proto:
        raise UserError(
            f"{str(tokenizer)!r} is not the tokenizer of {str(workdir)!r}; choose another --out"
        )
    records = read_metrics(workdir / "metrics.jsonl")
    evaluated = [record for record in records if run.metric in record]
    notes = {
        "run": run.config,
        "tokens": sum(record.get("tokens", 0) for record in records),
        "evaluation": (
            min(evaluated, key=lambda record: record[run.metric]) if best else evaluated[-1]
        )
        if evaluated
        else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    part_bytes = round(_PART_MB.value * 1e6) or None
    names = trained.tokenizer.vocabulary if proto is None else proto
    files = save_weights(out / trained.name, trained.model, names, notes, dtype, part_bytes)
    if proto:
        write_whole(tokenizer, proto)
    return files


def _gpt2(out: pathlib.Path) -> list[pathlib.Path]:
    from spectr_jax.data.hugging_face import save_tokenizer
    from spectr_jax.data.tokenizer import Tokenizer
    from spectr_jax.loading.by_name import load
    from spectr_jax.models.formats.gpt2 import save_gpt2
    from spectr_jax.models.transformer import Transformer
    from spectr_jax.utils.errors import UserError

    _check_folder(out)
    trained = load(_MODEL.value, "float32")
    _check_runs_alone(trained.tokenizer)
    if not isinstance(trained.model, Transformer):
        raise UserError(
            f"--model={_MODEL.value} is not a transformer of this library; give --format=llama, or copy its folder"
        )
    if not isinstance(trained.tokenizer, Tokenizer):
        raise UserError(f"--model={_MODEL.value} is a folder of Hugging Face's already; copy it")
    save_gpt2(out, trained.model, trained.tokenizer.bos, trained.tokenizer.eos)
    save_tokenizer(out, trained.tokenizer, trained.model.context)
    return sorted(path for path in out.iterdir() if path.suffix in (".json", ".safetensors"))


def _llama(out: pathlib.Path) -> list[pathlib.Path]:
    from spectr_jax.data.hugging_face import HuggingFaceTokenizer
    from spectr_jax.loading.by_name import load
    from spectr_jax.models.formats.hf_llama import save_llama
    from spectr_jax.models.llama import Llama
    from spectr_jax.utils.errors import UserError

    _check_folder(out)
    trained = load(_MODEL.value, "float32")
    tokenizer = trained.tokenizer
    _check_runs_alone(tokenizer)
    if not isinstance(trained.model, Llama):
        raise UserError(f"--model={_MODEL.value} is not of the Llama family; give --format=gpt2")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError(
            f"--model={_MODEL.value} has no tokenizer of Hugging Face's, which its folder needs; "
            "give it one"
        )
    eos = tokenizer.eos if isinstance(tokenizer.eos, int) else list(tokenizer.eos)
    save_llama(out, trained.model, tokenizer.bos, eos)
    tokenizer.save(out, trained.model.context)
    return sorted(path for path in out.iterdir() if path.suffix in (".json", ".safetensors"))


def _check_runs_alone(tokenizer) -> None:
    """Raises `UserError` for a student: it is of the Llama family, but has parts that
    transformers lacks."""
    from spectr_jax.data.tokenizer import VocabularyOf
    from spectr_jax.utils.errors import UserError

    if isinstance(tokenizer, VocabularyOf):
        raise UserError(
            f"--model={_MODEL.value} is a draft that was trained for its target, without a "
            "tokenizer and with parts that "
            f"transformers does not have; export its workdir without --format={_FORMAT.value}, or "
            "copy its files"
        )


def _check_folder(out: pathlib.Path) -> None:
    """Raises `UserError` for flags that do not apply to a transformers folder, or if the folder
    is not empty."""
    from spectr_jax.utils.errors import UserError

    for flag in (_DTYPE, _PART_MB):
        if flag.value:
            raise UserError(
                f"--{flag.name}={flag.value} is not for --format={_FORMAT.value}, which is float32 "
                "in one file; leave it out"
            )
    if (out / "config.json").exists():
        raise UserError(f"{str(out)!r} has a config.json already; choose another --out")


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main, output=_OUT)
