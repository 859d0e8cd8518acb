"""Runs llama.cpp on the CPU through llama-cpp-python, for compare_llama_cpp.py: a JSON request a line, an answer a line.

Nothing of spectr_jax is imported. Keys and values are cached in float32, attention is the plain one.

    {"op": "load", "file": file, "threads": 1}               -> {}
    {"op": "tokens", "texts": [...]}                         -> {"tokens": [[...]]}, special tokens in texts read as such
    {"op": "greedy", "prompts": [[...]], "new_tokens": 24}   -> {"tokens": [[...]]}, the continuations
    {"op": "logits", "tokens": [...], "out": file}           -> {}, and float32 [N, V] in the .npy file
    {"op": "nats", "rows": [[...]]}                          -> {"nats": [...]}, of all tokens but the first of each row
"""

import json
import os
import sys

import llama_cpp
import numpy as np

CONTEXT = 512
MODELS: list[llama_cpp.Llama] = []


def load(file: str, threads: int) -> dict:
    """Loads a model in the place of the one before."""
    MODELS.clear()
    number = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": CONTEXT}
    plain = {
        "flash_attn": False,
        "type_k": llama_cpp.GGML_TYPE_F32,
        "type_v": llama_cpp.GGML_TYPE_F32,
    }
    MODELS.append(llama_cpp.Llama(file, logits_all=True, verbose=False, **number, **plain))
    return {}


def scores(row: list[int]) -> np.ndarray:
    """Logits [N, V] of a row from an empty cache."""
    model = MODELS[0]
    model.reset()
    model.eval(row)
    return np.array(model.scores[: len(row)], np.float32)


def tokens(texts: list[str]) -> dict:
    return {
        "tokens": [MODELS[0].tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    }


def greedy(prompts: list[list[int]], new_tokens: int) -> dict:
    """The likeliest continuation of each prompt, token by token through the cache; it ends
    nowhere."""
    model, made = MODELS[0], []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        row: list[int] = []
        for _ in range(new_tokens):
            row.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(row[-1:])
        made.append(row)
    return {"tokens": made}


def logits(tokens: list[int], out: str) -> dict:
    np.save(out, scores(tokens))
    return {}


def nats(rows: list[list[int]]) -> dict:
    """The sum over a row of -log p of each token but the first, given those before it; in
    float64."""
    sums = []
    for row in rows:
        given = scores(row)[:-1].astype(np.float64)
        largest = given.max(-1)
        total = largest + np.log(np.exp(given - largest[:, None]).sum(-1))
        sums.append(float((total - given[np.arange(len(row) - 1), row[1:]]).sum()))
    return {"nats": sums}


def main() -> None:
    # Answers only on stdout: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    operations = {"load": load, "tokens": tokens, "greedy": greedy, "logits": logits, "nats": nats}
    for line in sys.stdin:
        request = json.loads(line)
        answer = operations[request.pop("op")](**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
