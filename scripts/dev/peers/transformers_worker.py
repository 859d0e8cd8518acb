"""Generates with Hugging Face transformers, for compare_peers.py: a JSON request a line in, an answer a line out.

Runs in an environment of its own, of torch and transformers; nothing of spectr_jax is imported.

    {"op": "load", "target": folder, "draft": folder, "device": "cpu", "threads": 2}
                                                                       -> {"torch": version, "transformers": version}
    {"op": "logits", "model": "target", "tokens": [[...]]}             -> {"logits": [[[...]]]}
    {"op": "narrow", "dtype": "bfloat16"}                              -> {}: both models, after their logits were compared
    {"op": "generate", "method": "assisted", "prompt": [[...]], "new_tokens": 64, "draft_length": 4, "seed": 0}
                                                                       -> {"seconds", "new_tokens", "target_calls"}
"""

import json
import os
import sys
import time

import torch
import transformers
from transformers import GenerationConfig, GPT2LMHeadModel

MODELS: dict[str, GPT2LMHeadModel] = {}
CALLS = {"target": 0}
COMPILED: dict = {}


def load(target: str, draft: str, device: str, threads: int) -> dict:
    """Loads both models, written by `spectr_jax.models.formats.gpt2`, to `device`: "cpu" or "cuda"."""
    torch.set_num_threads(threads)
    for name, folder in (("target", target), ("draft", draft)):
        MODELS[name] = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    MODELS["target"].register_forward_hook(_count)
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def narrow(dtype: str) -> dict:
    """Converts both models, and compiles the target for `compiled`, with what transformers advises for a static cache."""
    for model in MODELS.values():
        model.to(getattr(torch, dtype))
    COMPILED["target"] = torch.compile(MODELS["target"].forward, mode="reduce-overhead", fullgraph=True)
    return {}


def logits(model: str, tokens: list[list[int]]) -> dict:
    """Logits of a whole forward pass, without a cache; products in full float32."""
    torch.set_float32_matmul_precision("highest")
    with torch.inference_mode():
        given = torch.tensor(tokens, device=MODELS[model].device)
        return {"logits": MODELS[model](given, use_cache=False).logits.tolist()}


def generate(method: str, prompt: list[list[int]], new_tokens: int, draft_length: int, seed: int) -> dict:
    """One generation at temperature 1, of `new_tokens` tokens whatever they are; `seconds` are those of `generate` alone.

    `target_calls` are all forward calls of the target, the one on the prompt too: unlike ours it emits tokens. In
    `baseline` it emits the first, so that n tokens are n calls; in `assisted` it scores the prompt and the first drafts at
    once. So tokens over calls are in both cases, as in spectr_jax, tokens over those calls that emit.

    Near the end transformers drafts less: one token fewer than `max_new_tokens` leaves room for, so that the last call may
    draft none. Ours drafts L and cuts what is too much; both emit as many tokens a call, in distribution.
    """
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,  # If it is not given, transformers takes 50.
        top_p=1.0,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = MODELS["target"]
    tokens = torch.tensor(prompt, device=target.device)
    if tokens.is_cuda:
        torch.set_float32_matmul_precision("high")  # TF32, as JAX's products of float32 there.
    options = {"generation_config": config, "attention_mask": torch.ones_like(tokens)}
    plain = target.forward
    if method == "compiled":
        config.cache_implementation, target.forward = "static", COMPILED["target"]
    if method == "assisted":
        # These are read from the assistant, not from the config of the call. The defaults are drafts of 20 tokens that end
        # where the draft is less than 0.4 sure.
        drafting = MODELS["draft"].generation_config
        drafting.num_assistant_tokens = draft_length
        drafting.num_assistant_tokens_schedule = "constant"
        drafting.assistant_confidence_threshold = 0.0
        options["assistant_model"] = MODELS["draft"]
    torch.manual_seed(seed)
    CALLS["target"] = 0
    started = time.perf_counter()
    try:
        out = target.generate(tokens, **options)
    finally:
        target.forward = plain
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "new_tokens": out.shape[1] - tokens.shape[1], "target_calls": CALLS["target"]}


def _count(*_) -> None:
    CALLS["target"] += 1


def main() -> None:
    # Answers only on stdout: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    operations = {"load": load, "logits": logits, "narrow": narrow, "generate": generate}
    for line in sys.stdin:
        request = json.loads(line)
        answer = operations[request.pop("op")](**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
