"""Tabulates a target's likely next tokens, from which the method `recycle` starts.

    python -m spectr_jax.tabulate --target=smollm2 --out=drafts
    python -m spectr_jax.tabulate --target=97m --text='corpus/train-*' --count=20000 --out=drafts

The first command takes 20 minutes on two CPU cores with bfloat16 products: SmolLM2 writes chats and
scores them. Text is faster. What `spectr_jax.label` wrote can be given as text too; that command
resumes after a stop, and this one does not. Then decode with --method=recycle --draft=drafts/smollm2_bigram.
"""

from absl import flags

from spectr_jax.utils import cli

_TARGET = flags.DEFINE_string(
    "target", "smollm2", "Any model by its name, as for --target of spectr_jax.sample."
)
_TEXT = flags.DEFINE_string(
    "text",
    "",
    "Corpora, or folders that spectr_jax.label wrote, with commas between them. By default the "
    "target writes chats.",
)
_OUT = flags.DEFINE_string(
    "out", None, "The folder that gets NAME_bigram.safetensors.", required=True
)
_COUNT = flags.DEFINE_integer(
    "count", 2_048, "Number of chats, or of sentences of each corpus.", lower_bound=1
)
_LENGTH = flags.DEFINE_integer(
    "length",
    None,
    "Tokens per row; longer sequences are cut. By default 256, or the context if it is shorter.",
    lower_bound=8,
)
_RANKS = flags.DEFINE_integer(
    "ranks", 8, "Number of next tokens of each token.", lower_bound=1, upper_bound=64
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.7, "Temperature of written chats.", lower_bound=0.0
)
_DTYPE = flags.DEFINE_string(
    "dtype", "bfloat16", "Precision of the target: float32, bfloat16 or int8."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of written chats.", lower_bound=0)


def main():
    import itertools

    from spectr_jax.distillation import bigrams
    from spectr_jax.loading.pairs import load_alone
    from spectr_jax.models.formats.weights import save_weights
    from spectr_jax.models.frozen import digest
    from spectr_jax.utils.errors import UserError
    from spectr_jax.utils.files import expanded
    from spectr_jax.utils.memory import keep_freed_memory

    keep_freed_memory()
    out = expanded(_OUT.value)
    target = load_alone(_TARGET.value, _DTYPE.value)
    vocab_size, context = target.model.vocab_size, target.model.context
    if _RANKS.value > vocab_size:
        raise UserError(f"--ranks={_RANKS.value}: {_TARGET.value!r} has {vocab_size} tokens")
    length, names = _LENGTH.value or min(256, context), _TEXT.value.split(",")
    if len(names) > 1 and "" in names:
        raise UserError(f"--text={_TEXT.value}: a name is empty; remove a comma")
    options = target, _COUNT.value, length, _TEMPERATURE.value, _SEED.value
    sources = [bigrams.rows_of_source(name, *options) for name in names]
    rows_of = bigrams.labelled(itertools.chain(*sources), target)
    model, tokens = bigrams.tabulated(rows_of, vocab_size, context, _RANKS.value)
    notes = {"target": _TARGET.value, "weights": digest(target.model), "tokens": tokens}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{target.name}_bigram"
    for file in save_weights(path, model, target.tokenizer.vocabulary, notes):
        print(f"{file}: from {tokens:,} tokens, {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main, output=_OUT, resumes=False)
