"""Tokens per call of `otm_layer` on trees that follow the draft's probabilities, against K chains of L.

    python scripts/dev/compare_dynamic.py [--workdir=results/layer]

Writes results/layer/dynamic.md and .json. Every layer of a K x L tree has K drafts. With chains each node has one; here a
rule spreads them over the nodes of the layer before, by their path probabilities under the draft model (largest remainder,
copies taken as one). The rule sees only what is drafted already, so every tree is exact. The figure of a context is the
mean, over drafted trees, of the expected number of emitted tokens given the tree.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from spectr_jax import cli
from spectr_jax.config import eval_config
from spectr_jax.decoding import Policy
from spectr_jax.decoding.policy import probabilities
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import parse
from spectr_jax.decoding.verifiers import layer
from spectr_jax.errors import UserError
from spectr_jax.measure import measurement, report
from spectr_jax.models.frozen import freeze
from spectr_jax.pairs import load_pair
from spectr_jax.transport.base import draw

_WORKDIR = flags.DEFINE_string("workdir", "results/layer", "Where the table goes: Markdown and JSON.")
_TREES = flags.DEFINE_multi_string("tree", ["2x8", "4x8", "8x8"], "K chains of L drafts, KxL; also the size of the others.")
_TARGET = flags.DEFINE_string("target", "embedded:20m", "The target model.")
_DRAFT = flags.DEFINE_string("draft", "embedded:2m", "The draft model.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Precision of both.")
_PROMPTS = flags.DEFINE_integer("num_prompts", 64, "Contexts: the first of the embedded prompts.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("prompt_tokens", 8, "Longer prompts are cut to so many tokens after BOS.", lower_bound=1)
_DRAWS = flags.DEFINE_integer("draws", 4, "Drafted trees for each context and rule.", lower_bound=1)
_COMPETITIONS = flags.DEFINE_integer("competitions", layer.COMPETITIONS, "Of `otm_layer`.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of target and drafts.", lower_bound=0.01)


def half_likeliest(first, log_path):
    """The likelier half of the nodes have an equal share each, the others none (as in EAGLE-2)."""
    order = jnp.argsort(jnp.argsort(jnp.where(first, -log_path, jnp.inf)))
    return first & (order < max(len(first) // 2, 1))


RULES = {
    "chains": None,
    "evenly": lambda first, log_path: first,
    "square root of the path's probability": lambda first, log_path: first * jnp.exp((log_path - jnp.max(log_path)) / 2),
    "path's probability": lambda first, log_path: first * jnp.exp(log_path - jnp.max(log_path)),
    "likelier half": half_likeliest,
}
"""Weights of the nodes of a layer: functions of which of them [K] are the first with their tokens, and of the logarithms of
their paths' probabilities [K]."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parent"], meta_fields=["width", "height"])
@dataclasses.dataclass(frozen=True)
class Grown:
    """A tree of `height` layers of `width` nodes: to the walk, a `Tree` whose parents [N + 1] are traced."""

    parent: jax.Array
    width: int
    height: int

    @property
    def size(self) -> int:
        return self.width * self.height

    @property
    def depth(self) -> np.ndarray:
        return np.append(0, 1 + np.arange(self.size) // self.width)

    @property
    def inner(self) -> np.ndarray:
        return np.arange(1 + self.size - self.width)

    @property
    def inner_rank(self) -> np.ndarray:
        return np.minimum(np.arange(self.size + 1), self.inner[-1])

    @property
    def paths(self) -> jax.Array:
        nodes = jnp.arange(self.size + 1)
        above = [nodes]
        for _ in range(self.height - 1):
            above.append(self.parent[above[-1]])
        # The k-th node on the way to one of depth d is d - k levels above it.
        index = jnp.asarray(self.depth)[:, None] - 1 - jnp.arange(self.height)
        return jnp.where(index >= 0, jnp.take_along_axis(jnp.stack(above, axis=1), jnp.maximum(index, 0), axis=1), 0)

    @property
    def levels(self) -> list[np.ndarray]:
        return [np.flatnonzero(self.depth == depth) for depth in range(self.height + 1)]

    @property
    def level_table(self) -> np.ndarray:
        table = np.full((self.height + 2, self.width), -1, np.int32)
        table[0, 0], table[1:-1] = 0, 1 + np.arange(self.size).reshape(-1, self.width)
        return table


def parents_of(rule, tokens, log_path, above):
    """The node of a layer [K] above each draft of the next, by its place in the layer; `above` are those of this layer."""
    K = len(tokens)
    index = jnp.arange(K)
    same = (tokens[:, None] == tokens) & (above[:, None] == above)
    first = jnp.argmax(same, axis=1) == index

    def by(weights):
        def spread():
            weight = weights(first, log_path).astype(jnp.float32)
            share = K * weight / jnp.sum(weight)
            whole = jnp.floor(share)
            order = jnp.argsort(jnp.lexsort((-log_path, whole - share)))
            counts = whole.astype(jnp.int32) + (order < K - jnp.sum(whole))
            return jnp.searchsorted(jnp.cumsum(counts), index, side="right").astype(jnp.int32)

        return spread

    return jax.lax.switch(rule, [lambda: index.astype(jnp.int32), *(by(weights) for weights in list(RULES.values())[1:])])


def grow(key, rule, model, policy, prompt_T, length, K: int, L: int):
    """A drafted tree: itself, its tokens [N + 1], p of its inner nodes [I, V], and who is above whom [N + 1, N + 1]."""
    T, N = len(prompt_T), K * L
    cache = _on_prompt(model, prompt_T, length, T + N)
    tokens, parent = jnp.zeros(N + 1, jnp.int32).at[0].set(prompt_T[length - 1]), jnp.zeros(N + 1, jnp.int32)
    above, seen = jnp.eye(N + 1, dtype=bool), 0
    nodes, log_path, place, pmfs = np.array([0]), jnp.zeros(1), jnp.zeros(K, jnp.int32), []
    for depth in range(L):
        upto = seen + len(nodes)
        positions = jnp.full((1, len(nodes)), length - 1 + depth)
        logits, cache = model.extend(tokens[None, nodes], positions, above[None, nodes, :upto], cache, seen)
        pmfs.append(probabilities(logits[0], policy))
        p_KxV = pmfs[-1][place]
        drafts = jax.vmap(draw)(jax.random.split(jax.random.fold_in(key, depth), K), p_KxV)
        log_path = log_path[place] + jnp.log(jnp.take_along_axis(p_KxV, drafts[:, None], axis=1)[:, 0])
        seen, children = upto, np.arange(upto, upto + K)
        tokens, parent = tokens.at[children].set(drafts), parent.at[children].set(jnp.asarray(nodes)[place])
        above = above.at[children].set(above[parent[children]] | above[children])
        # Copies of one path have the same parent, except in chains, where nothing is merged.
        nodes, place = children, parents_of(rule, drafts, log_path, place)
    return Grown(parent, K, L), tokens, jnp.concatenate(pmfs), above


def _on_prompt(model, prompt_T, length, slots: int):
    """The cache with all tokens but the last committed."""
    T = len(prompt_T)
    cache = model.init_cache(1, slots + 1)
    visible = jnp.asarray(np.tri(T, dtype=bool))[None]
    _, cache = model.extend(prompt_T[None], jnp.arange(T)[None], visible, cache)
    return dataclasses.replace(cache, lengths=(length - 1)[None])


@functools.partial(jax.jit, static_argnums=(0, 1))
def outcomes(K: int, L: int, keys, rule, target, draft, temperature, prompt_T, length):
    """Expected tokens of a call given its drafts, and one more than the sum of scores, [draws, 2]."""
    large, small, policy = target.merge(), draft.merge(), Policy(temperature)
    cache = _on_prompt(large, prompt_T, length, len(prompt_T) + K * L)

    def one(key):
        draft_key, walk_key = jax.random.split(key)
        tree, tokens, p, above = grow(draft_key, rule, small, policy, prompt_T, length, K, L)
        positions = length - 1 + jnp.asarray(tree.depth)[None]
        logits, _ = large.extend(tokens[None], positions, above[None], cache)
        tree: Any = tree  # It is as good as a `Tree` here.
        scored = ScoredTree(tree=tree, policy=policy, length=length, tokens=tokens, p=p, logits=logits[0])
        return jnp.stack(layer.Layer(_COMPETITIONS.value).expected(walk_key, scored))

    return jax.lax.map(one, keys)


def measured(spec: str, target, draft, prompts) -> dict[str, Any]:
    """Means over draws [contexts], of both outcomes, by rule."""
    tree = parse(spec)
    K = len(tree.levels[1])
    started, found = time.monotonic(), {name: [] for name in RULES}
    rows, lengths = prompts.tokens.reshape(-1, prompts.tokens.shape[-1]), prompts.lengths.reshape(-1)
    for context in range(prompts.real):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), context), _DRAWS.value)
        texts = jnp.asarray(rows[context]), jnp.int32(lengths[context])
        for rule, values in enumerate(found.values()):
            result = outcomes(K, tree.height, keys, jnp.int32(rule), target, draft, _TEMPERATURE.value, *texts)
            values.append(np.mean(np.asarray(result, np.float64), axis=0).tolist())
    print(f"{spec} done in {time.monotonic() - started:,.0f} s", flush=True)
    return {"tree": spec, "nodes": tree.size, "found": found}


def mean_and_error(values) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def markdown(result: dict[str, Any]) -> str:
    """The table and its provenance."""
    cells, odd = [], []
    for row in result["rows"]:
        chains = np.array(row["found"]["chains"])[:, 0]
        for name, values in row["found"].items():
            given, scores = np.array(values).T
            mean, error = mean_and_error(given)
            ratio = np.mean(given) / np.mean(chains)
            loss = mean_and_error((given - ratio * chains) / np.mean(chains))[1]
            odd.append(np.abs(np.mean(given - scores)) / mean_and_error(given - scores)[1])
            gain = "-" if name == "chains" else f"{100 * (ratio - 1):+.1f} % ± {100 * loss:.1f}"
            cells.append([row["tree"], str(row["nodes"]), name, f"{mean:.2f} ± {error:.2f}", gain])
    header = ["tree", "nodes", "drafts of a layer", "tokens per call", "over chains"]
    settings = result["settings"]
    return (
        f"# Trees that follow the draft: {settings['draft']} drafts for {settings['target']}\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        f"`otm_layer`, {settings['num_prompts']} contexts (BOS and at most {settings['prompt_tokens']} tokens), "
        f"{settings['draws']} drafted trees each, {report.temperatures(settings)}, {settings['dtype']}, "
        f"{settings['competitions']} competitions; ± the standard error over contexts. Every layer has as many drafts as "
        "there are chains; the table says how the nodes of the layer before share them, copies taken as one. The figure is "
        "the expected number of tokens given the drafts, not cut by EOS. The sum of all scores has the same mean: the two "
        f"differ by at most {max(odd):.1f} standard errors here.\n\n"
        f"{report.made_by(result)}\n"
    )


def main():
    workdir, config, started = pathlib.Path(_WORKDIR.value), eval_config(), time.monotonic()
    config.dtype, config.num_prompts, config.batch_size = _DTYPE.value, _PROMPTS.value, 1
    config.prompt_tokens, config.temperature = _TOKENS.value, _TEMPERATURE.value
    for spec in _TREES.value:
        tree = parse(spec)
        if any(len(level) != len(tree.levels[-1]) for level in tree.levels[1:]):
            raise UserError(f"--tree={spec} is not K chains of L drafts; give KxL, such as 8x8")
        config.max_new_tokens = max(config.max_new_tokens, tree.height + 1)
    measurement.check_decoding(config)
    target, (draft,) = load_pair(_TARGET.value, (_DRAFT.value,), _DTYPE.value)
    prompts = measurement.read_prompts(config, target.tokenizer)
    measurement.check_contexts(config, prompts, [target, draft])

    names = ("target", "draft", "dtype", "num_prompts", "prompt_tokens", "draws", "competitions", "temperature")
    settings = {name: flags.FLAGS[name].value for name in names} | {"weights": report.weights(target, draft)}
    models = freeze(target.model), freeze(draft.model)
    rows = [measured(spec, *models, prompts) for spec in _TREES.value]
    result = {"settings": settings, "rows": rows, "seconds": time.monotonic() - started, **report.provenance()}
    report.write(workdir, "dynamic", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
