"""Times Hugging Face transformers and spectr_jax on the same weights, in turns, and writes results/peers.

    python scripts/dev/compare_peers.py [--workdir=results/peers] [--target=random:target_97m] [--draft=random:draft_6m]

Makes an environment of its own for torch and transformers in .venv-peers, unless --peers_python names one. All rows take
turns in an order drawn for each round, and ratios are medians over the rounds of what ran side by side, since machines are
noisy. Let nothing else run meanwhile: torch's threads wait for each other, and one busy core slows them several times. Both
run on the CPU, or both on the GPU that JAX sees.
"""

import functools
import itertools
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from peers.environment import ask, made

from spectr_jax import cli
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import BOS, Tokenizer
from spectr_jax.decoding import Method, generate, get_method
from spectr_jax.decoding.generate import lower
from spectr_jax.errors import UserError
from spectr_jax.files import write_json, write_whole
from spectr_jax.loading import DTYPES, EMBEDDED, RANDOM_PREFIX, Trained
from spectr_jax.measure import report
from spectr_jax.measure.compilation import side_by_side
from spectr_jax.models.formats.gpt2 import save_gpt2
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.transformer import Transformer
from spectr_jax.pairs import load_pair

_WORKDIR = flags.DEFINE_string("workdir", "results/peers", "Where the tables go: Markdown and JSON.")
_TARGET = flags.DEFINE_string("target", "random:target_97m", "embedded:NAME, random:NAME, a model file or a workdir.")
_DRAFT = flags.DEFINE_string("draft", "random:draft_6m", "Likewise.")
_L = flags.DEFINE_integer("draft_length", 4, "Tokens of each drafted chain.")
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Of each generation.")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 8, "Of each prompt, behind BOS.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed rounds, after one that warms up.")
_BATCH = flags.DEFINE_integer("batch", 8, "Texts at once in the second table, of at most three rounds; 1 for no such table.")
_TREES = flags.DEFINE_string("trees", "2,1,1,1;4,2,1", "Candidate trees of otm_block, with semicolons between.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16", "int8"], "Of spectr_jax.")
_PEERS_DTYPE = flags.DEFINE_enum("peers_dtype", "float32", ["float32", "bfloat16"], "Of transformers.")
_COMPILED = flags.DEFINE_bool("compiled", False, "Also time transformers' baseline compiled, with a static cache.")
_PEERS_PYTHON = flags.DEFINE_string("peers_python", "", "An interpreter with torch and transformers to use as it is.")

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = ("torch==2.13.0", "transformers>=5,<6")
DEVICES = {"cpu": "cpu", "gpu": "cuda"}
"""torch's names of JAX's backends."""
COLUMNS = {
    "tokens_per_call": "Tokens per call",
    "ms_per_token": "ms per token",
    "tokens_per_second": "Tokens/s",
    "to_own_baseline": "x own baseline",
    "to_transformers_baseline": "x transformers baseline",
    "to_transformers_assisted": "x transformers assisted",
    "floor_ms_per_token": "Memory floor, ms",
}


class Sample(NamedTuple):
    """One generation: its seconds, new tokens and calls of the target that emitted them, over all texts."""

    seconds: float
    new_tokens: int
    target_calls: int


Row = tuple[str, str, str, int]  # framework, method, dtype, texts at once
Runs = dict[Row, Callable[[list[list[int]], int], Sample]]  # each a function of prompts and a seed


def check_flags() -> None:
    """Raises `UserError` for flags or a machine that cannot be used, before anything takes long."""
    if jax.default_backend() not in DEVICES:
        raise UserError(f"transformers does not run on {jax.default_backend()} as JAX does; give JAX_PLATFORMS=cpu")
    for name in ("draft_length", "new_tokens", "prompt_tokens", "rounds", "batch"):
        if flags.FLAGS[name].value < 1:
            raise UserError(f"--{name}={flags.FLAGS[name].value} is less than 1; give at least 1")
    if not _DTYPES.value or set(_DTYPES.value) - set(DTYPES):
        raise UserError(f"--dtypes={','.join(_DTYPES.value)} is not known; give some of {', '.join(DTYPES)}")
    for tree in _TREES.value.split(";"):
        get_method("otm_block", tree=tree)
    if _PEERS_PYTHON.value:
        device = DEVICES[jax.default_backend()]
        try:
            command = [_PEERS_PYTHON.value, "-c", f"import torch, transformers; torch.ones(1, device='{device}')"]
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"--peers_python={_PEERS_PYTHON.value} does not import {', '.join(REQUIREMENTS)}, or not for {device!r}"
            ) from error


def read_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """BOS and the first pieces of each embedded prompt that is long enough: rows of one length."""
    length, sentences = _PROMPT_TOKENS.value, open_sentences(str(EMBEDDED / "prompts.txt"))
    prompts = [[BOS, *row[:length]] for row in map(tokenizer.encode, sentences) if len(row) >= length]
    if not prompts:
        raise UserError(f"no prompt has --prompt_tokens={length}; give fewer")
    return prompts


def load_models() -> dict[str, tuple[Trained, list[Trained]]]:
    """The target and a list of the draft, of each dtype; float32 always, whose logits are compared."""
    models = {
        d: load_pair(_TARGET.value, (_DRAFT.value,), d)
        for d in dict.fromkeys(["float32", _PEERS_DTYPE.value, *_DTYPES.value])
    }
    target, (draft,) = models["float32"]
    shortest = min(target, draft, key=lambda trained: trained.model.context)
    if 1 + _PROMPT_TOKENS.value + _NEW_TOKENS.value > shortest.model.context:
        raise UserError(
            f"BOS, --prompt_tokens={_PROMPT_TOKENS.value} and --new_tokens={_NEW_TOKENS.value} exceed the context "
            f"{shortest.model.context} of {shortest.name!r}; shorten one of them"
        )
    return models


def peer(name: str) -> Row:
    """The row of a method of transformers."""
    return "transformers", name, _PEERS_DTYPE.value, 1


def peers_python() -> str:
    """The interpreter with transformers; its environment is made if it is not up to date."""
    return _PEERS_PYTHON.value or made(ROOT / ".venv-peers", REQUIREMENTS)


def logits_difference(worker: subprocess.Popen, name: str, model: Transformer) -> float:
    """The largest difference of logits between the frameworks on random tokens; raises `UserError` above 1e-4."""
    N = 1 + _PROMPT_TOKENS.value + _NEW_TOKENS.value
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, N))
    with jax.default_matmul_precision("highest"):  # On a GPU both round to TF32 where speed counts.
        ours, _ = model.extend(jnp.asarray(tokens), jnp.arange(N)[None], causal(jnp.zeros((1, N))))
    theirs = ask(worker, op="logits", model=name, tokens=tokens.tolist())["logits"]
    difference = float(np.abs(np.asarray(ours) - np.array(theirs)).max())
    if not difference <= 1e-4:
        raise UserError(f"logits of the {name} differ by {difference:.2g}; what is timed would not be the same model")
    return difference


def bandwidth() -> float:
    """Bytes that the device, or all cores, read from memory in a second, at best of ten."""
    if jax.default_backend() != "cpu":
        there, total = jnp.ones(2**29), jax.jit(jnp.sum)
        return there.nbytes / fastest(lambda: total(there).block_until_ready())
    here, threads = np.ones(2**27, np.float32), os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(here, threads)
        return here.nbytes / fastest(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))  # Its sum reads slower.


def fastest(read: Callable[[], Any]) -> float:
    """Seconds, the least of ten."""
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def call_bytes(model: Transformer) -> int:
    """What a call of the target reads at least: each weight once, but for the embedding table."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) - model.embed.embedding[...].nbytes


def our_runs(dtype: str, target: Trained, draft: Trained, batch: int, trees: list[str], prompts: list[list[int]]) -> Runs:
    """Rows of ours, compiled; at more than one text those that are worth a look."""
    L = _L.value
    methods = {"baseline": get_method("baseline")}
    methods |= {f"{name}, L={L}": get_method(name, draft_length=L) for name in ("speculative", "block")}
    if batch == 1:
        methods |= {f"{name}, K=2, L={L}": get_method(name, num_drafts=2, draft_length=L) for name in ("spectr", "otm")}
    methods |= {f"otm_block, tree {tree}": get_method("otm_block", tree=tree) for tree in trees}
    models, texts = (freeze(target.model), freeze(draft.model)), list(itertools.islice(itertools.cycle(prompts), batch))
    list(side_by_side([functools.partial(our_program, *models, method, texts) for method in methods.values()]))
    return {("spectr_jax", name, dtype, batch): functools.partial(our_run, *models, methods[name]) for name in methods}


def our_program(target: Frozen, draft: Frozen, method: Method, prompts: list[list[int]]) -> None:
    """Compiles what `our_run` runs; JAX keeps it."""
    lengths = np.array([len(prompt) for prompt in prompts])
    lower(jax.random.key(0), method, target, draft, prompts, lengths, _NEW_TOKENS.value).compile()


def our_run(target: Frozen, draft: Frozen, method: Method, prompts: list[list[int]], seed: int) -> Sample:
    key, lengths = jax.block_until_ready(jax.random.key(seed)), np.array([len(prompt) for prompt in prompts])
    started = time.perf_counter()
    out = jax.block_until_ready(generate(key, method, target, draft, prompts, lengths, _NEW_TOKENS.value))
    seconds = time.perf_counter() - started
    return Sample(seconds, int((out.lengths - lengths).sum()), int(out.target_calls.sum()))


def peer_run(worker: subprocess.Popen, method: str, prompts: list[list[int]], seed: int) -> Sample:
    sizes = {"new_tokens": _NEW_TOKENS.value, "draft_length": _L.value}
    return Sample(**ask(worker, op="generate", method=method, prompt=prompts, seed=seed, **sizes))


def measure(runs: Runs, prompts: list[list[int]], rounds: int) -> dict[Row, list[Sample]]:
    """What each row did in each round, which has prompts, a seed and an order of its own."""
    samples: dict[Row, list[Sample]] = {row: [] for row in runs}
    for round_ in range(rounds + 1):
        for index in np.random.default_rng(round_).permutation(len(runs)):
            row = list(runs)[index]
            chosen = [prompts[(round_ * row[3] + text) % len(prompts)] for text in range(row[3])]
            samples[row].append(runs[row](chosen, round_))
        print(f"round {round_} of {rounds}", flush=True)
    return {row: samples[row][1:] for row in runs}  # The first round warms up.


def summary(samples: dict[Row, list[Sample]], row: Row, floor: float) -> dict[str, Any]:
    """A row of the tables; ratios are of speeds, None where there is nothing to compare with."""
    framework, method, dtype, batch = row
    seconds = {row: np.array([sample.seconds for sample in samples[row]]) for row in samples}

    def ratio(other: Row) -> float | None:
        return float(np.median(seconds[other] / seconds[row])) if other in seconds else None

    per_token = float(np.median(seconds[row])) / samples[row][0].new_tokens
    return {
        **dict(zip(("framework", "method", "dtype", "batch"), row, strict=True)),
        "tokens_per_call": sum(s.new_tokens for s in samples[row]) / sum(s.target_calls for s in samples[row]),
        "ms_per_token": per_token * 1e3,
        "tokens_per_second": 1 / per_token,
        "to_own_baseline": ratio((framework, "baseline", dtype, batch)),
        "to_transformers_baseline": ratio(peer("baseline")),
        "to_transformers_assisted": ratio(peer("assisted")),
        "floor_ms_per_token": floor / batch * 1e3 if method == "baseline" else None,
        "seconds": seconds[row].tolist(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    cells = [[f"{row['framework']} {row['method']}", row["dtype"]] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        line += ["-" if row[name] is None else f"{row[name]:,.2f}" for name in COLUMNS]
    return report.markdown_table(["Method", "Weights", *COLUMNS.values()], cells)


def notes(facts: dict[str, Any]) -> str:
    """What the tables do not say."""
    untrained = """
- **The weights are random**, nothing was trained. The time of a call is that of any weights of these shapes; tokens per
  call, and so the speed of every method that drafts, are those of a pair that agrees in about 0.7 of its drafts."""
    on_gpu = jax.default_backend() == "gpu"
    where = "the same GPU, with products in TF32 as JAX's there" if on_gpu else f"{os.cpu_count()} threads"
    return f"""{untrained if RANDOM_PREFIX in _TARGET.value + _DRAFT.value else ""}
- Medians over {_ROUNDS.value} rounds (at most 3 at {_BATCH.value} texts). All rows take turns; a ratio is the median of the
  rounds' ratios of speeds, above 1 is faster. Times are of whole generations, the call on the prompt included.
- Tokens per call: new tokens over the calls of the target that emit any. With transformers these are all calls: the one on
  the prompt emits the first token, or in `assisted` scores the first drafts. With spectr_jax the call on the prompt emits
  none and is not counted, so that a baseline of n tokens makes n + 1 calls, and n with transformers.
- transformers {facts["transformers"]} on torch {facts["torch"]}: `generate` as installed, in {_PEERS_DTYPE.value},
  on {where}. `compiled` is its baseline with `torch.compile` and a static cache.
  `assisted` drafts {_L.value} tokens a call (constant schedule, no confidence threshold or top-k), fewer at the end. It is
  not compiled, and refuses more than one sequence and caches of a fixed size.
- On random tokens the logits of the frameworks differ by at most {facts["logits_difference"]:.1e}.
- Memory floor: the bytes of the target's weights, less the embedding table, over the bandwidth of reading measured here,
  {facts["bandwidth_gb_per_second"]:.1f} GB/s. No call takes less, unless the weights fit into a cache.
- In the minute before, {facts["load"]:.1f} processes were running on average. More than a few tenths slow torch the most.
"""


def write(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    made, workdir = report.provenance(), pathlib.Path(_WORKDIR.value)
    one, many = ([row for row in rows if (row["batch"] == 1) == single] for single in (True, False))
    text = (
        f"# Against Hugging Face transformers\n\nTarget `{_TARGET.value}`, draft `{_DRAFT.value}`; {_NEW_TOKENS.value} new "
        f"tokens behind BOS and {_PROMPT_TOKENS.value}, temperature 1, no end of text. One text:\n\n{table(one)}\n"
        + (f"\n{_BATCH.value} texts at once, times per token of any:\n\n{table(many)}\n" if many else "")
        + notes(facts)
        + f"\n{report.made_by(made)}\n"
    )
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "peers.json", {"rows": rows, **facts, **made})
    write_whole(workdir / "peers.md", text)
    print(text)


def main() -> None:
    facts: dict[str, Any] = {"load": os.getloadavg()[0]}
    check_flags()
    models = load_models()
    target, (draft,) = models["float32"]
    prompts = read_prompts(target.tokenizer)
    command = [peers_python(), str(ROOT / "scripts" / "dev" / "peers" / "transformers_worker.py")]
    speed, pipe = bandwidth(), subprocess.PIPE
    facts["bandwidth_gb_per_second"], rows = speed / 1e9, []
    with tempfile.TemporaryDirectory() as made, subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as worker:
        pair = {"target": target.model, "draft": draft.model}
        for name in pair:
            save_gpt2(pathlib.Path(made, name), pair[name])
        place = {"device": DEVICES[jax.default_backend()], "threads": os.cpu_count()}
        facts |= ask(worker, op="load", **place, **{name: f"{made}/{name}" for name in pair})
        facts["logits_difference"] = max(logits_difference(worker, name, pair[name]) for name in pair)
        ask(worker, op="narrow", dtype=_PEERS_DTYPE.value)
        names = ("baseline", "assisted", *(["compiled"] if _COMPILED.value else []))
        runs: Runs = {peer(name): functools.partial(peer_run, worker, name) for name in names}
        trees = dict.fromkeys(_DTYPES.value, _TREES.value.split(";"))
        for batch in dict.fromkeys((1, _BATCH.value)):
            for dtype in trees:
                target, (draft,) = models[dtype]
                runs |= our_runs(dtype, target, draft, batch, trees[dtype], prompts)
            samples = measure(runs, prompts, _ROUNDS.value if batch == 1 else min(_ROUNDS.value, 3))
            rows += [summary(samples, row, call_bytes(models[row[2]][0].model) / speed) for row in samples]
            fastest_last = sorted(rows, key=lambda row: -row["ms_per_token"])
            trees |= {row["dtype"]: [row["method"].split()[-1]] for row in fastest_last if "tree" in row["method"]}
            runs = {}  # transformers assists no more than one text.
    write(rows, facts)


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
