"""Compares the two-token outputs of a real model with their exact distribution, by chi-square.

    python scripts/dev/check_outputs.py --workdir=results/smollm2
    python scripts/dev/check_outputs.py --draft=smollm2-draft --workdir=results/smollm2/eagle

Without --draft the target's first layers draft. With top-k sampling there are at most k^2 outcomes;
the target's probabilities of both tokens give that of each outcome. Writes outputs.md and
outputs.json.
"""

import pathlib
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spectr_jax.decoding import Method, Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.policy import probabilities
from spectr_jax.experiments.measure import report
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.testing.chi_square import p_value
from spectr_jax.utils import cli

_WORKDIR = flags.DEFINE_string("workdir", "results/smollm2", "Where the table goes.")
_TARGET = flags.DEFINE_string("target", "smollm2", "The target model.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft model; the target's first layers if empty.")
_LAYERS = flags.DEFINE_integer("layers", 28, "Layers that draft without --draft.", lower_bound=1)
_DTYPE = flags.DEFINE_string("dtype", "float32", "Precision of the models.")
_METHODS = flags.DEFINE_list(
    "methods", ["speculative", "spectr", "otm_block", "otm_layer"], "Methods to check."
)
_TREE = flags.DEFINE_string("tree", "2,2", "Tree of all methods but `speculative`.")
_TOP_K = flags.DEFINE_integer("top_k", 4, "Number of tokens to sample from.", lower_bound=2)
_PROMPT = flags.DEFINE_string("prompt", "The committee will meet again to", "The prompt.")
_OUTPUTS = flags.DEFINE_integer("outputs", 2048, "Outputs per method.", lower_bound=100)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Sequences decoded at once.", lower_bound=1)

Pair = tuple[int, int]


@jax.jit
def _next(model: Frozen, tokens: jax.Array, policy: Policy) -> jax.Array:
    """Returns the distribution [B, V] of the token after each row of `tokens` [B, T]."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    visible = jnp.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    return probabilities(model.merge().extend(tokens, positions, visible)[0][:, -1], policy)


def exact_pmf(model: Frozen, prompt: list[int], policy: Policy) -> dict[Pair, float]:
    """Returns the probability of each pair of next tokens."""
    first = np.asarray(_next(model, jnp.asarray([prompt]), policy)[0], np.float64)
    tokens = np.flatnonzero(first)
    prefixes = jnp.asarray([[*prompt, token] for token in tokens])
    second = np.asarray(_next(model, prefixes, policy), np.float64)
    return {
        (int(one), int(two)): first[one] * row[two]
        for one, row in zip(tokens, second, strict=True)
        for two in np.flatnonzero(row)
    }


def sampled(
    method: Method, models: tuple[Frozen, Frozen | None], prompt: list[int], policy: Policy
) -> tuple[Counter[Pair], float]:
    """Returns how often each pair was sampled, and the tokens per call."""
    prompts, lengths = np.tile(prompt, (_BATCH.value, 1)), np.full(_BATCH.value, len(prompt))
    counts: Counter[Pair] = Counter()
    calls = 0
    for batch in range(-(-_OUTPUTS.value // _BATCH.value)):
        key = jax.random.fold_in(jax.random.key(0), batch)
        made = generate(key, method, *models, prompts, lengths, 2, policy)
        calls += int(np.sum(made.target_calls))
        pairs = np.asarray(made.tokens[:, len(prompt) : len(prompt) + 2])
        counts.update(map(tuple, pairs.tolist()))
    return counts, 2 * counts.total() / calls


def markdown(result: dict[str, Any]) -> str:
    """Returns the page with the table and its provenance."""
    settings, cells = result["settings"], []
    for row in result["rows"]:
        counts = [f"`{row['method']}`", str(row["outputs"]), str(row["impossible"])]
        cells.append([*counts, f"{row['p']:.3f}", f"{row['per_call']:.2f}"])
    draft = settings["draft"]
    drafted_by = pathlib.Path(draft).name if draft else f"its first {settings['layers']} layers"
    header = ["Method", "Outputs", "Impossible", "p-value", "Tokens/call"]
    return report.page(
        f"Two-token outputs of {settings['target']}, drafted by {drafted_by}",
        report.markdown_table(header, cells),
        [
            f"Chi-square test against the exact distribution of the {result['outcomes']} outcomes "
            f"of top-{settings['top_k']} sampling, {settings['dtype']}. Tree ({settings['tree']}); "
            f"`speculative` drafts 2 tokens. Prompt: {settings['prompt']!r}.",
            report.provenance_line(result),
        ],
    )


def main() -> None:
    started, policy = time.monotonic(), Policy(top_k=_TOP_K.value)
    names = (_DRAFT.value,) if _DRAFT.value else ()
    target, drafts = load_pair(_TARGET.value, names, _DTYPE.value)
    methods = {}
    for name in _METHODS.value:
        options = {"draft_length": 2} if name == "speculative" else {"tree": _TREE.value}
        if not drafts:
            options |= {"layers": _LAYERS.value, "method": name}
        methods[name] = get_method(name if drafts else "self_speculative", **options)
    models = freeze(target), freeze(drafts[0]) if drafts else None
    prompt = target.tokenizer.prompt(_PROMPT.value)
    pmf = exact_pmf(models[0], prompt, policy)
    names = ("target", "draft", "dtype", "layers", "methods", "tree", "top_k", "prompt", "outputs")
    settings, rows = {name: flags.FLAGS[name].value for name in names}, []
    for name, method in methods.items():
        counts, per_call = sampled(method, models, prompt, policy)
        p = p_value(np.array([counts[pair] for pair in pmf]), np.array(list(pmf.values())))
        row = {"method": name, "outputs": counts.total(), "p": p, "per_call": per_call}
        impossible = sum(count for pair, count in counts.items() if pair not in pmf)
        rows.append({**row, "impossible": impossible})
        print(rows[-1], flush=True)
        seconds = time.monotonic() - started
        result = {"settings": settings, "outcomes": len(pmf), "rows": rows, "seconds": seconds}
        result |= report.provenance()
        report.write(pathlib.Path(_WORKDIR.value), "outputs", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
