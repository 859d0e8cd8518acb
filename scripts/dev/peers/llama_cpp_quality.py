"""What compare_llama_cpp.py compares but for speed: tokens of texts, greedy continuations, loss on sentences."""

import functools
import math
import pathlib
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peers.environment import ask
from peers.llama_cpp_build import Built

from spectr_jax.data.corpus import open_sentences
from spectr_jax.decoding import generate, get_method
from spectr_jax.decoding.policy import Policy
from spectr_jax.experiments import quality
from spectr_jax.loading import EMBEDDED, SMOLLM2, Trained, load
from spectr_jax.models.layers.attention import causal

ROWS = 8
"""Sentences that are scored at once."""
PIECES = (
    *("0123456789", " 12 345  6789", "3.14159", "1,000,000", "-7", "1e-5", "½ ² ③ Ⅷ", "٣٤٥", "१२३", "２０２６"),
    *(" ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "   a", "a   ", "\u00a0", "\u3000", "\u200b", "\ufeff"),
    *("naïve café", "e\u0301", "Ünïcödé", "привет мир", "你好，世界", "こんにちは", "한국어", "שלום", "مرحبا", "ไทย"),
    *("😀", "👩‍👩‍👧", "🇩🇪", "𝕏", "\U0010fffd", "\ufffd", "\x00", "\x7f", "�"),
    *("don't we'll I'm you've he'd it's they're", "DON'T", "'s's", "``quoted''", "a_b-c/d\\e", "def f(x):\n    return x\n"),
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n", "<repo_name>", "<|im_start", "<|"),
)
"""Of which texts are made, besides the embedded prompts."""


def texts(count: int) -> list[str]:
    """Prompts, pieces, random strings of pieces and random characters."""
    prompts, random = open_sentences(str(EMBEDDED / "prompts.txt")), np.random.default_rng(0)
    made = [*(prompts[index] for index in range(len(prompts))), *PIECES]
    made += ["".join(random.choice(PIECES, random.integers(2, 9))) for _ in range(count)]
    for first, last in ((32, 127), (32, 0x250), (0x370, 0x1400), (0x2000, 0x2C00), (0x3000, 0xD800), (0x1F000, 0x1FB00)):
        made += ["".join(map(chr, random.integers(first, last, random.integers(1, 40)))) for _ in range(count // 5)]
    return made


def compare_tokens(worker: subprocess.Popen, files: Built, tokenizer: Any) -> dict[str, Any]:
    """How many texts have other tokens."""
    ask(worker, op="load", file=files.files["Q4_1"], threads=1)
    given = texts(200)
    theirs = ask(worker, op="tokens", texts=given)["tokens"]
    pairs = [(tokenizer.encode(text), row) for text, row in zip(given, theirs, strict=True)]
    differ = [text for text, (ours, row) in zip(given, pairs, strict=True) if ours != row]
    return {"texts": len(given), "tokens": sum(len(row) for row in theirs), "differ": len(differ), "first": differ[:5]}


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, tokens):
    """Logits [B, N, V] of a whole forward pass."""
    B, N = tokens.shape
    positions = jnp.tile(jnp.arange(N), (B, 1))
    return nnx.merge(graphdef, state).extend(tokens, positions, causal(jnp.zeros((B, N))))[0]


@functools.partial(jax.jit, static_argnums=0)
def token_nats(graphdef, state, tokens):
    """-log p of each token but the first [B, N - 1]."""
    logs = jax.nn.log_softmax(forward(graphdef, state, tokens)[:, :-1])
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]


def our_nats(trained: Trained, rows: list[list[int]]) -> np.ndarray:
    """The sum over each row of -log p of its tokens but the first; rows of like lengths are padded to one."""
    graphdef, state = nnx.split(trained.model)
    order, sums = np.argsort([len(row) for row in rows], kind="stable"), np.zeros(len(rows))
    for start in range(0, len(rows), ROWS):
        chosen = order[start : start + ROWS]
        length = -(-max(len(rows[index]) for index in chosen) // 16) * 16
        padded = np.zeros((ROWS, length), np.int32)
        for place, index in enumerate(chosen):
            padded[place, : len(rows[index])] = rows[index]
        nats = np.asarray(token_nats(graphdef, state, jnp.asarray(padded)), np.float64)
        for place, index in enumerate(chosen):
            sums[index] = nats[place, : len(rows[index]) - 1].sum()
    return sums


def compare_greedy(
    worker: subprocess.Popen, files: Built, trained: Trained, prompts: int, new_tokens: int
) -> dict[str, Any]:
    """Greedy continuations of ours in float32, and of each quantisation; where one leaves ours, with the logits of both."""
    sentences = open_sentences(str(EMBEDDED / "prompts.txt"))
    given = [trained.tokenizer.prompt(sentences[index]) for index in range(prompts)]
    lengths = np.array([len(row) for row in given])
    made = generate(
        jax.random.key(0), get_method("baseline"), trained, None, _padded(given), lengths, new_tokens, Policy(temperature=0)
    )
    ours = [np.asarray(row)[n : n + new_tokens].tolist() for row, n in zip(made.tokens, lengths, strict=True)]
    whole = [prompt + row for prompt, row in zip(given, ours, strict=True)]
    graphdef, state = nnx.split(trained.model)
    logits = np.asarray(forward(graphdef, state, jnp.asarray(_padded(whole))))
    rows = []
    for kind in ("F32", "Q8_0", "Q4_1"):
        ask(worker, op="load", file=files.files[kind], threads=1)
        theirs = ask(worker, op="greedy", prompts=given, new_tokens=new_tokens)["tokens"]
        row = {"file": kind, "prompts": prompts, "new_tokens": new_tokens, "equal": sum(map(list.__eq__, ours, theirs))}
        rows.append(row | _against(worker, whole, lengths, logits, ours, theirs))
    return {"rows": rows}


def _padded(rows: list[list[int]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)


def _against(worker, whole, lengths, logits, ours, theirs) -> dict[str, Any]:
    """On the texts that we made: how far the logits are apart, where the likeliest token is another, and the first of each
    text that left ours."""
    largest, squares, same, places, left = 0.0, [], 0, 0, []
    with tempfile.TemporaryDirectory() as here:
        for text, row in enumerate(whole):
            out = str(pathlib.Path(here, "logits.npy"))
            ask(worker, op="logits", tokens=row, out=out)
            first = lengths[text] - 1
            mine, other = logits[text, first : len(row) - 1], np.load(out)[first:-1]
            largest = max(largest, float(np.abs(mine - other).max()))
            squares.append(float(np.square(mine - other).mean()))
            same += int((mine.argmax(-1) == other.argmax(-1)).sum())
            places += len(mine)
            if ours[text] != theirs[text]:
                place = next(i for i, pair in enumerate(zip(ours[text], theirs[text], strict=True)) if pair[0] != pair[1])
                a, b = ours[text][place], theirs[text][place]
                gaps = {
                    "ours": float(mine[place, a] - mine[place, b]),
                    "llama_cpp": float(other[place, a] - other[place, b]),
                }
                left.append({"prompt": text, "place": place, "tokens": [a, b], "gap": gaps})
    error = {"largest": largest, "root_mean_square": float(np.sqrt(np.mean(squares)))}
    return {"same_argmax": same, "places": places, "logits": error, "left": left}


def compare_loss(worker: subprocess.Popen, files: Built, heldout: str, sentences: int) -> dict[str, Any]:
    """Perplexity on the first sentences, of every token but the first of each, without BOS."""
    corpus = open_sentences(heldout)
    rows: list[list[int]] = []
    losses = {}
    for dtype in ("float32", "int8"):
        trained = load(SMOLLM2, dtype)
        rows = rows or [trained.tokenizer.encode(corpus[index]) for index in range(sentences)]
        losses[f"spectr_jax {dtype}"] = our_nats(trained, rows)
        print(f"loss of ours in {dtype}", flush=True)
    for kind in ("F32", "Q8_0", "Q4_1"):
        ask(worker, op="load", file=files.files[kind], threads=1)
        losses[f"llama.cpp {kind}"] = np.array(ask(worker, op="nats", rows=rows)["nats"])
        print(f"loss of llama.cpp on {kind}", flush=True)
    count, reference = sum(len(row) - 1 for row in rows), losses["llama.cpp F32"]
    table = [
        {
            "name": name,
            "perplexity": math.exp(sums.sum() / count),
            "to_f32": math.exp((sums - reference).sum() / count) - 1,
            "largest_nats_of_a_sentence": float(np.abs(sums - reference).max()),
        }
        for name, sums in losses.items()
    ]
    return {"rows": table, "sentences": sentences, "tokens": count}


def bits(heldout: str, sentences: int) -> dict[str, Any]:
    """Bits per character of ours on the first sentences, by the definition of `experiments.quality`."""
    corpus = open_sentences(heldout)
    given = [corpus[index] for index in range(sentences)]
    characters, rows = sum(len(text) + 1 for text in given), []
    for dtype in ("float32", "int8"):
        trained = load(SMOLLM2, dtype)
        tokens = [quality.scored(trained.tokenizer, text) for text in given]
        nats, inner = our_nats(trained, tokens), our_nats(trained, [row[1:-1] for row in tokens])
        unscored = sum(len(trained.tokenizer.decode(row[1:2])) + 1 for row in tokens)
        rows.append(
            {
                "dtype": dtype,
                "nats_per_token": float(nats.sum() / sum(len(row) - 1 for row in tokens)),
                "bits_per_character": float(nats.sum() / math.log(2) / characters),
                "without_first_and_end": float(inner.sum() / math.log(2) / (characters - unscored)),
            }
        )
        print(rows[-1], flush=True)
    return {"rows": rows, "sentences": sentences, "characters": characters}
