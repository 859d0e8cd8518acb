"""How long is a call? SpecTr's Tables 1 and 3 on this machine, and where the time of a SpecTr call
goes.

    python -m spectr_jax.eval --config=configs/latency.py --workdir=runs/latency

Random weights of the ladder's shapes: half an hour on two CPU cores, most of it the 1,000 runs of
the 97M's large batches. `--config.dtype=bfloat16` for a GPU or TPU, `--config.models` for trained
models.
"""

from spectr_jax.experiments.config import latency_config


def get_config():
    return latency_config()
