"""Call times: SpecTr's Tables 1 and 3 on this machine, and the phases of a SpecTr call.

    python -m spectr_jax.eval --config=configs/latency.py --workdir=runs/latency

The models have the ladder's shapes and random weights. It takes 15 to 30 minutes on two CPU
cores, mostly for 1,000 runs of the 97M's large batches. Set --config.dtype=bfloat16 on a GPU or
TPU, and --config.models for trained models.
"""

from spectr_jax.experiments.config import latency_config


def get_config():
    return latency_config()
