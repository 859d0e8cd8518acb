"""Records small EAGLE-3 heads and their outputs in tests/references, from the library speculators.

It also records a file of PyTorch, in which heads may be published.

    references/bin/python scripts/dev/eagle3_references.py

Run it in the environment of scripts/dev/references.py, which no test needs. Each head has the
weights of tests/references/weights.py. The library runs it as in training: step 0 on all tokens
with the target's features, each later step one token deeper, with the head's own.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = pathlib.Path(__file__).parents[2] / "tests/references"
sys.path.insert(0, str(FOLDER))
from weights import weight  # noqa: E402

TOKENS, STEPS, VOCABULARY = 10, 3, 60
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEADS = {
    "llama": (LlamaConfig(**SHAPE, rope_parameters=ROPE), {}),
    "qwen3": (
        Qwen3Config(**SHAPE | {"num_hidden_layers": 2}, rope_theta=1e6),
        {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3]},
    ),
    "fc_norm": (LlamaConfig(**SHAPE), {"fc_norm": True, "norm_output": True}),
    "whole": (LlamaConfig(**SHAPE), {"norm_before_fc": True, "draft_vocab_size": VOCABULARY}),
}
"""The layer and the fields of each head."""


def main() -> None:
    """Writes all files."""
    numbers = torch.arange(12).reshape(4, 3)
    kinds = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
    tensors = {kind: numbers.to(getattr(torch, kind)) for kind in kinds}
    tensors |= {"rows": tensors["float32"][1:3], "one": torch.tensor(3.0)}
    tensors["parameter"] = torch.nn.Parameter(tensors["float32"])
    torch.save(tensors, FOLDER / "tensors.bin")
    for name, (layer, fields) in HEADS.items():
        verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
        methods = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
        speculators = SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=methods,
            default_proposal_method="greedy",
            verifier=verifier,
        )
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            speculators_config=speculators,
            **{"draft_vocab_size": 24} | fields,
        )
        model = Eagle3DraftModel(config).eval()
        state, arrays = model.state_dict(), {}
        for tensor, value in state.items():
            if value.is_floating_point():
                value.copy_(torch.tensor(weight(tensor, tuple(value.shape))))
        if config.draft_vocab_size < VOCABULARY:
            kept = np.sort(np.random.default_rng(0).permutation(VOCABULARY)[:24])
            arrays["d2t"] = kept - np.arange(24)
            state["d2t"].copy_(torch.tensor(arrays["d2t"]))
            state["t2d"][torch.tensor(kept)] = True
        arrays["logits"] = outputs(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            written = json.loads((pathlib.Path(folder) / "config.json").read_text())
        shapes = {tensor: list(value.shape) for tensor, value in state.items()}
        description = {"config": written, "shapes": shapes}
        (FOLDER / f"eagle3_{name}.json").write_text(json.dumps(description, indent=1) + "\n")
        np.savez_compressed(FOLDER / f"eagle3_{name}.npz", **arrays)
        print(name, {array: value.shape for array, value in arrays.items()})


@torch.no_grad()
def outputs(model: Eagle3DraftModel) -> np.ndarray:
    """Returns logits [steps, tokens, scored tokens] of a head for the tokens after the first.

    Step s at index t is after the tokens t + 2 and the s next ones, of which these are drafts.
    """
    found = []
    model.lm_head.register_forward_hook(lambda *given: found.append(given[-1][0].numpy()))
    tokens = torch.arange(1, TOKENS + 1)[None] * 7 % VOCABULARY
    features = weight("features", (TOKENS, model.fc.in_features))
    model(
        hidden_states=torch.tensor(features)[None],
        input_ids=tokens,
        document_ids=torch.zeros_like(tokens),
        ttt_steps=STEPS,
    )
    return np.stack(found)


if __name__ == "__main__":
    main()
