"""A program for test_mesh.py: decodes on meshes of several devices, and prints what it found.

python on_devices.py CHECK ARGUMENTS_IN_JSON [COORDINATOR PROCESS]
"""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
from flax import nnx

from spectr_jax.decoding import generate_all, get_method, stream
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.decoding.policy import Policy
from spectr_jax.models import parallel
from spectr_jax.models.eagle3 import Eagle3, Eagle3Config
from spectr_jax.models.frozen import freeze
from spectr_jax.models.functional import FunctionalModel
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.table import TableModel, exact_pmf, perturbed, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.testing import chi_square, count_compilations
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.errors import UserError

VOCAB, EOS, NEW, PROMPT, BATCH = 8, 7, 3, (1, 2), 4_000
METHODS = {"otm_block": {"tree": "2x2"}, "otm_layer": {"tree": "2,1"}}

GEMMA = {
    "windows": (3, 0),
    "window_rope_theta": 100.0,
    "full_kv_heads": 1,
    "full_head_width": 16,
    "attention_cap": 2.0,
    **dict.fromkeys(
        ("tied", "qk_norm", "value_norm", "keys_as_values", "post_norms", "layer_scale"), True
    ),
}
"""The fields in which Gemma 2 to 4 differ."""


def llama(seed: int, **changes) -> Llama:
    shape = {"layers": 2, "width": 32, "mlp": 64, "heads": 8, "kv_heads": 2, "head_width": 8}
    config = LlamaConfig(**shape | {"vocab_size": VOCAB, "context": 64} | changes)
    return Llama(config, rngs=nnx.Rngs(seed))


def models(kind: str):
    """Returns a target and a draft: tables, or Llamas of one layer.

    The draft of a table is functions of its table.
    """
    if kind == "table":
        target = random_table(0, VOCAB)
        functions = {
            "extend_fn": lambda table, *given, **more: TableModel(table).extend(*given, **more),
            "init_cache_fn": lambda table, *sizes: TableModel(table).init_cache(*sizes),
        }
        sizes = {"vocab_size": VOCAB, "context": 128, "layers": 1}
        draft = FunctionalModel(perturbed(target, 1, 0.8), **functions, **sizes)
        return TableModel(target), draft
    return llama(0, layers=1), llama(1, layers=1)


def exact(kind: str, target) -> dict[tuple[int, ...], float]:
    """Returns the probability of each continuation of `PROMPT` by at most `NEW` tokens."""
    if kind == "table":
        return dict(exact_pmf(random_table(0, VOCAB), PROMPT, NEW, EOS))
    firsts = np.array(list(np.ndindex(*[VOCAB] * (NEW - 1))))  # All but the last new token.
    tokens = np.concatenate([np.tile(PROMPT, (len(firsts), 1)), firsts], axis=1)
    N = tokens.shape[1]
    visible = np.broadcast_to(np.tri(N, dtype=bool), (len(firsts), N, N))
    positions = np.broadcast_to(np.arange(N), tokens.shape)
    q = np.asarray(jax.nn.softmax(target.extend(tokens, positions, visible)[0]), float)
    found: dict[tuple[int, ...], float] = {}
    for row, first in zip(q, firsts.tolist(), strict=True):
        probability = 1.0
        for length in range(NEW):
            pmf = row[len(PROMPT) - 1 + length] * probability
            is_last = length == NEW - 1
            found |= {
                (*first[:length], token): pmf[token]
                for token in range(VOCAB)
                if is_last or token == EOS
            }
            if is_last or first[length] == EOS:
                break
            probability = pmf[first[length]]
    return found


def outputs(kind: str, name: str, generations: int) -> dict:
    """Returns the p-value of outputs on 2 x 4 devices, whether greedy tokens equal those of one
    device, and the number of programs that the last call compiled."""
    target, draft = models(kind)
    pmf = exact(kind, target)
    index = {tokens: i for i, tokens in enumerate(pmf)}
    prompts, lengths = np.tile(PROMPT, (BATCH, 1)), np.full(BATCH, len(PROMPT))
    run = functools.partial(
        generate,
        method=get_method(name, **METHODS[name]),
        prompts=prompts,
        prompt_lengths=lengths,
        max_new_tokens=NEW,
    )
    greedy = run(jax.random.key(0), target=target, draft=draft, policy=Policy(0.0, eos=EOS))
    mesh = sharding.make_mesh(model=4)
    assert sharding.groups_of(mesh) == 2
    both = parallel.on_mesh(mesh, target), parallel.on_mesh(mesh, draft)
    run_there = functools.partial(run, target=both[0], draft=both[1], mesh=mesh)
    counts = np.zeros(len(index), int)
    for chunk in range(generations // BATCH):
        out = run_there(jax.random.key(chunk + 1), policy=Policy(eos=EOS))
        for row, length in zip(*map(np.asarray, (out.tokens, out.lengths)), strict=True):
            counts[index[tuple(row[len(PROMPT) : length].tolist())]] += 1
    with count_compilations() as compiled:
        same = run_there(jax.random.key(0), policy=Policy(0.0, eos=EOS))
    return {
        "p": chi_square.p_value(counts, np.array(list(pmf.values()))),
        "greedy": bool(np.array_equal(same.tokens, greedy.tokens)),
        "compiled": len(compiled),
    }


def logits(shapes: list[list[int]]) -> dict[str, float]:
    """Returns the largest difference of logits from those of one device."""
    transformer = TransformerConfig(layers=2, width=64, mlp=64, heads=8, vocab_size=64, context=32)
    family = {
        "llama": llama(0, vocab_size=64),
        "qwen": llama(0, vocab_size=64, qk_norm=True, qkv_bias=True),
        "gemma": llama(0, vocab_size=64, **GEMMA),
        "transformer": Transformer(transformer, rngs=nnx.Rngs(0)),
        "gpt2": Transformer(
            dataclasses.replace(transformer, learned_positions=True, attention_bias=True),
            rngs=nnx.Rngs(0),
        ),
    }
    tokens = np.random.default_rng(0).integers(0, 64, (8, 9))
    visible = np.broadcast_to(np.tri(9, dtype=bool), (8, 9, 9))
    found = {}
    for name, model in family.items():
        positions = np.broadcast_to(np.arange(9), tokens.shape)

        def run(frozen, positions=positions):
            return frozen.merge().extend(tokens, positions, visible)[0]

        wanted = jax.jit(run)(freeze(model))
        for data, devices in shapes:
            frozen = parallel.on_mesh(sharding.make_mesh(model=devices), model)
            split = sum(leaf.sharding.is_fully_replicated for leaf in frozen.leaves)
            assert split < len(frozen.leaves) or devices == 1
            error = np.abs(np.asarray(jax.jit(run)(frozen)) - np.asarray(wanted)).max()
            found[f"{name} {data}x{devices}"] = float(error)
    return found


def selection(vocab_size: int) -> str:
    """Returns the optimized program of a call whose vocabulary is split over eight devices."""
    target, draft = llama(0, vocab_size=vocab_size), llama(1, vocab_size=vocab_size)
    method = get_method("otm_layer", tree="4x2")
    mesh = sharding.make_mesh(model=8)
    rows = np.ones((2, 4), np.int32), np.full(2, 4), 4
    return lower(jax.random.key(0), method, target, draft, *rows, mesh=mesh).compile().as_text()


def refused() -> list[str]:
    """Returns the errors of meshes that do not fit."""
    target, draft = models("llama")
    rows = np.ones((4, 4), np.int32), np.full(4, 4), 4
    three = np.ones((3, 4), np.int32), np.full(3, 4), 4
    four, two = (sharding.make_mesh(model=count) for count in (4, 2))
    split = parallel.on_mesh(four, target)
    foreign = jax.make_mesh((2, 4), ("data", "model"))
    row = np.ones(4, np.int32)
    attempts = [
        lambda: generate(jax.random.key(0), get_method("baseline"), split, None, *rows),
        lambda: generate(jax.random.key(0), get_method("baseline"), split, None, *rows, mesh=two),
        lambda: generate(jax.random.key(0), get_method("baseline"), split, None, *three, mesh=four),
        lambda: parallel.on_mesh(foreign, target),
        lambda: parallel.draft_on_mesh(two, split),
        lambda: next(
            stream(jax.random.key(0), get_method("baseline"), target, None, row, 4, mesh=four)
        ),
        lambda: sharding.make_mesh(model="2"),
        lambda: parallel.on_mesh(sharding.make_mesh(model=8), llama(0, heads=6, kv_heads=6)),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    copied = parallel.draft_on_mesh(four, draft)
    laid_out = parallel.on_mesh(four, copied)  # A copied model can become a target.
    return [*errors, copied.merge().config.shards, laid_out.merge().config.shards]


def tokens(shapes: list[list[int]]) -> dict[str, list]:
    """Returns sampled tokens on meshes. On the last one it also decodes through slots, and in one
    process streams on the first group of devices."""
    target, draft = models("llama")
    prompts = np.random.default_rng(0).integers(0, VOCAB - 1, (8, 5))
    lengths = np.array([5, 3, 4, 5, 2, 5, 1, 4])
    policy = Policy(temperature=np.where(np.arange(8) % 2, 1.0, 0.5), eos=EOS)
    method, key = get_method("spectr", tree="2x2"), jax.random.key(3)
    decode = functools.partial(
        generate, key, method, target, draft, prompts, lengths, 12, policy=policy
    )

    def sequences(out):
        rows = zip(*hosts.fetch((out.tokens, out.lengths)), strict=True)
        return [row[:length].tolist() for row, length in rows]

    found = {}
    for data, model in shapes:
        mesh = sharding.make_mesh(model=model)
        found[f"{data}x{model}"] = sequences(decode(mesh=mesh))
    several = [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True)]
    arguments = key, method, target, draft, several, 12, policy
    through = generate_all(*arguments, slots=4, mesh=mesh, in_order=True)
    found["slots"] = [done.tokens.tolist() for done in through]
    if jax.process_count() > 1:
        return found
    row = sharding.make_mesh(model=model, devices=jax.devices()[:model])
    with jax.set_mesh(row):  # A mesh of the user's own context is not ours.
        found["context"] = sequences(decode())
    both = (parallel.on_mesh(row, each) for each in (target, draft))
    steps = stream(key, method, *both, prompts[0], 12, mesh=row)
    found["stream"] = [token for step in steps for token in step.tokens]
    alone = generate(key, method, target, draft, prompts[:1], [5], 12)
    found["alone"] = np.asarray(alone.tokens)[0, 5:17].tolist()
    return found


def heads() -> list:
    """Returns tokens with an EAGLE-3 head on one device, and on a mesh with the number of its split
    arrays, copied and split.

    The head takes the target's embedding, which lies split on the mesh.
    """
    target = llama(0)
    shape = vars(target.config) | {"layers": 1, "head_tokens": 6, "target_layers": (1, 2)}
    config = Eagle3Config(**shape, target_width=target.config.width, own_embed=False)
    head = Eagle3(config, rngs=nnx.Rngs(1))
    prompts = np.random.default_rng(0).integers(0, VOCAB - 1, (8, 5))
    rows = prompts, np.full(8, 5), 12
    method, key = get_method("otm_block", tree="2,2"), jax.random.key(3)
    found = [
        np.asarray(generate(key, method, target, head.completed(target), *rows).tokens).tolist()
    ]
    mesh = sharding.make_mesh(model=4)
    there = parallel.on_mesh(mesh, target)
    whole = head.completed(there.merge())
    for place in (parallel.draft_on_mesh, parallel.on_mesh):
        draft = place(mesh, whole)
        split = sum(not leaf.sharding.is_fully_replicated for leaf in draft.leaves)
        out = generate(key, method, there, draft, *rows, mesh=mesh)
        found.append([np.asarray(out.tokens).tolist(), split])
    return found


if __name__ == "__main__":
    check, arguments, *process = sys.argv[1:]
    if process:
        hosts.connect(process[0], 2, int(process[1]))
    print(json.dumps(globals()[check](**json.loads(arguments))))
