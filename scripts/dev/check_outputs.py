"""Chi-square of a real model's two-token outputs against their exact distribution, drafted by its own first layers or by a
draft model.

    python scripts/dev/check_outputs.py [--target=smollm2] [--layers=28] [--top_k=4] [--workdir=results/smollm2]
    python scripts/dev/check_outputs.py --draft=smollm2-draft --workdir=results/smollm2/eagle

With top-k sampling the two tokens have at most k^2 outcomes, whose probabilities are products of those that the target gives
in one call on each first token. Writes outputs.md and outputs.json.
"""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.policy import probabilities
from spectr_jax.experiments.measure import report
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.testing.chi_square import p_value
from spectr_jax.utils import cli
from spectr_jax.utils.files import write_json, write_whole

_WORKDIR = flags.DEFINE_string(
    "workdir", "results/smollm2", "Where the table goes: Markdown and JSON."
)
_TARGET = flags.DEFINE_string("target", "smollm2", "The target model.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Its precision.")
_LAYERS = flags.DEFINE_integer(
    "layers", 28, "Number of target layers that draft when no --draft is given.", lower_bound=1
)
_DRAFT = flags.DEFINE_string(
    "draft", None, "The draft model; the target's first layers without it."
)
_METHODS = flags.DEFINE_list(
    "methods", ["speculative", "spectr", "otm_block", "otm_layer"], "To check."
)
_TREE = flags.DEFINE_string("tree", "2,2", "The tree of methods that take one.")
_TOP_K = flags.DEFINE_integer("top_k", 4, "Tokens that may be sampled.", lower_bound=2)
_PROMPT = flags.DEFINE_string("prompt", "The committee will meet again to", "The prompt.")
_OUTPUTS = flags.DEFINE_integer("outputs", 2048, "Sampled by each method.", lower_bound=100)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Sequences at once.", lower_bound=1)


@jax.jit
def _next(model: Frozen, tokens: jax.Array, policy: Policy) -> jax.Array:
    """The distribution [B, V] of the token after each row of `tokens` [B, T]."""
    B, T = tokens.shape
    positions, visible = (
        jnp.broadcast_to(jnp.arange(T), (B, T)),
        jnp.broadcast_to(np.tri(T, dtype=bool), (B, T, T)),
    )
    return probabilities(model.merge().extend(tokens, positions, visible)[0][:, -1], policy)


def exact_pmf(model: Frozen, prompt: list[int], policy: Policy) -> dict[tuple[int, int], float]:
    """The probability of each pair of next tokens."""
    first = np.asarray(_next(model, jnp.asarray([prompt]), policy)[0], np.float64)
    tokens = np.flatnonzero(first)
    second = np.asarray(
        _next(model, jnp.asarray([[*prompt, token] for token in tokens]), policy), np.float64
    )
    return {
        (int(one), int(two)): first[one] * row[two]
        for one, row in zip(tokens, second, strict=True)
        for two in np.flatnonzero(row)
    }


def sampled(
    method, model: Frozen, draft: Frozen | None, prompt: list[int], policy: Policy
) -> tuple[dict[tuple[int, int], int], float]:
    """How often each pair came, and tokens per call."""
    prompts, lengths = np.tile(prompt, (_BATCH.value, 1)), np.full(_BATCH.value, len(prompt))
    counts: dict[tuple[int, int], int] = {}
    calls = 0
    for batch in range(-(-_OUTPUTS.value // _BATCH.value)):
        key = jax.random.fold_in(jax.random.key(0), batch)
        made = generate(key, method, model, draft, prompts, lengths, 2, policy)
        calls += int(np.sum(made.target_calls))
        for one, two in np.asarray(made.tokens[:, len(prompt) : len(prompt) + 2]).tolist():
            counts[one, two] = counts.get((one, two), 0) + 1
    return counts, 2 * sum(counts.values()) / calls


def markdown(result: dict[str, Any]) -> str:
    """The table and its provenance."""
    settings = result["settings"]
    cells = [
        [
            f"`{row['method']}`",
            str(row["outputs"]),
            str(row["impossible"]),
            f"{row['p']:.3f}",
            f"{row['per_call']:.2f}",
        ]
        for row in result["rows"]
    ]
    draft = settings.get("draft")
    drafted_by = pathlib.Path(draft).name if draft else f"its first {settings['layers']} layers"
    header = ["method", "outputs", "not possible", "p-value", "tokens per call"]
    return (
        f"# Two-token outputs of {settings['target']}, drafted by {drafted_by}\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        f"Chi-square test against the exact distribution of the {result['outcomes']} outcomes of "
        f"top-{settings['top_k']} "
        f"sampling, {settings['dtype']}; at most 2 tokens per call count. Tree "
        f"({settings['tree']}) but for `speculative`, "
        f"which drafts 2 tokens. Prompt: {settings['prompt']!r}.\n\n{report.made_by(result)}\n"
    )


def main():
    workdir = pathlib.Path(_WORKDIR.value)
    policy = Policy(top_k=_TOP_K.value)
    trained, drafts = load_pair(
        _TARGET.value, (_DRAFT.value,) if _DRAFT.value else (), _DTYPE.value
    )
    options = {
        name: {"draft_length": 2} if name == "speculative" else {"tree": _TREE.value}
        for name in _METHODS.value
    }
    methods = {
        name: get_method(name, **more)
        if drafts
        else get_method("self_speculative", layers=_LAYERS.value, method=name, **more)
        for name, more in options.items()
    }
    draft = freeze(drafts[0]) if drafts else None
    model, prompt = freeze(trained.model), trained.tokenizer.prompt(_PROMPT.value)
    pmf = exact_pmf(model, prompt, policy)
    names = ("target", "draft", "dtype", "layers", "methods", "tree", "top_k", "prompt", "outputs")
    settings = {name: flags.FLAGS[name].value for name in names}
    workdir.mkdir(parents=True, exist_ok=True)
    rows, started = [], time.monotonic()
    for name, method in methods.items():
        counts, per_call = sampled(method, model, draft, prompt, policy)
        p = p_value(np.array([counts.get(pair, 0) for pair in pmf]), np.array(list(pmf.values())))
        outputs, impossible = (
            sum(counts.values()),
            sum(count for pair, count in counts.items() if pair not in pmf),
        )
        rows.append(
            {
                "method": name,
                "outputs": outputs,
                "impossible": impossible,
                "p": p,
                "per_call": per_call,
            }
        )
        print(rows[-1], flush=True)
        result = {
            "settings": settings,
            "outcomes": len(pmf),
            "rows": rows,
            "seconds": time.monotonic() - started,
        }
        result |= report.provenance()
        write_json(workdir / "outputs.json", result)
        write_whole(workdir / "outputs.md", markdown(result))
    print((workdir / "outputs.md").read_text())


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
