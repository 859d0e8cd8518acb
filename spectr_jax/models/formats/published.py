"""The paths of the published models."""

import pathlib

from spectr_jax.utils.files import expanded

EMBEDDED = pathlib.Path(__file__).parents[2] / "embedded"
PUBLISHED = {
    "2m": EMBEDDED / "draft_2m",
    "6m": EMBEDDED / "draft_6m",
    "20m": EMBEDDED / "draft_20m",
    "97m": EMBEDDED / "target_97m",
    "smollm2-draft": EMBEDDED / "smollm2_eagle",
    "smollm2-6m": EMBEDDED / "smollm2_6m",
    "smollm2-bigram": EMBEDDED / "smollm2_bigram",
}
"""Path of each trained model by name. A clone has all of them; a wheel has all but `97m`."""


def weights_path(spec: str) -> pathlib.Path:
    """Returns the path of a published model's weights, or `spec` itself as a path."""
    return PUBLISHED.get(spec) or expanded(spec)
