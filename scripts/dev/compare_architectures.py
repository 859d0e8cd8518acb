"""Compares logits of the Llama family with Hugging Face transformers, random weights of every architecture that is read.

    python scripts/dev/compare_architectures.py [--workdir=results/smollm2] [--peers_python=...]

Each model is written by transformers with random weights, read by ours, written by ours where the layout has a place for
it, and read by transformers again. Makes an environment of its own in .venv-peers, unless --peers_python names one.
Writes architectures.md and .json; a difference above 1e-4 is an error.
"""

import json
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from peers.environment import ask, made

from spectr_jax import cli
from spectr_jax.errors import UserError
from spectr_jax.measure import report
from spectr_jax.models.formats.hf_llama import load_llama, save_llama
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama

_WORKDIR = flags.DEFINE_string("workdir", "results/smollm2", "Where the table goes: Markdown and JSON.")
_PEERS_PYTHON = flags.DEFINE_string("peers_python", "", "An interpreter with torch and transformers to use as it is.")

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = ("torch==2.13.0", "transformers>=5,<6")  # As in compare_peers.py, which shares the environment.
BATCH, LENGTH, LARGEST = 2, 192, 1e-4


def our_logits(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """Those of a whole forward pass in float32, without a cache."""
    B, N = tokens.shape
    positions = jnp.tile(jnp.arange(N), (B, 1))
    whole, _ = model.extend(jnp.asarray(tokens), positions, causal(jnp.zeros((B, N))))
    return np.asarray(whole)


def config_of_old(folder: pathlib.Path) -> None:
    """Turns the rotary fields of config.json into those that transformers wrote before its version 5."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    path.write_text(json.dumps(config))


def row_of(worker: subprocess.Popen, name: str, seed: int, here: pathlib.Path) -> dict[str, Any]:
    """The largest differences of one architecture."""
    folder, back, out = here / str(seed), here / f"{seed}-back", here / "logits.npy"
    ask(worker, op="make", name=name, folder=str(folder), seed=seed)
    model = load_llama(folder)
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, (BATCH, LENGTH))
    ours = our_logits(model, tokens)

    def difference(written: pathlib.Path) -> float:
        ask(worker, op="logits", folder=str(written), tokens=tokens.tolist(), out=str(out))
        return float(np.abs(ours - np.load(out)).max())

    row = {"name": name, "scale": float(np.abs(ours).max()), "read": difference(folder)}
    config_of_old(folder)
    row["read_old"] = float(np.abs(ours - our_logits(load_llama(folder), tokens)).max())
    try:
        save_llama(back, model)
        row["written"] = difference(back)
    except UserError:
        row["written"] = None  # The layout has no place for it.
    return row


def markdown(result: dict[str, Any]) -> str:
    header = ["architecture", "largest logit", "read by ours", "with an old config.json", "written by ours"]
    cells = [
        [row["name"], f"{row['scale']:.1f}"]
        + ["refused" if row[name] is None else f"{row[name]:.1e}" for name in ("read", "read_old", "written")]
        for row in result["rows"]
    ]
    return (
        "# The Llama family against transformers\n\nLargest absolute difference of logits on random tokens "
        f"({BATCH} x {LENGTH}) and random weights, float32:\n\n{report.markdown_table(header, cells)}\n\n"
        "- Read by ours: `save_pretrained` wrote the folder. Written by ours: transformers read it.\n"
        "- With an old config.json: the rotary fields as before version 5, against our own logits.\n"
        "- Refused: a model with rotary scaling is read but not written, and the error says so.\n"
        f"- transformers {result['transformers']} on torch {result['torch']}, on the CPU.\n\n{report.made_by(result)}\n"
    )


def main() -> None:
    if jax.default_backend() != "cpu":
        raise UserError(f"logits are compared on the CPU, not on {jax.default_backend()}; give JAX_PLATFORMS=cpu")
    if _PEERS_PYTHON.value and shutil.which(_PEERS_PYTHON.value) is None:
        raise UserError(
            f"--peers_python={_PEERS_PYTHON.value} does not run; give an interpreter with torch and transformers"
        )
    python = _PEERS_PYTHON.value or made(ROOT / ".venv-peers", REQUIREMENTS)
    command = [python, str(ROOT / "scripts" / "dev" / "peers" / "llama_worker.py")]
    pipe, rows = subprocess.PIPE, []
    with tempfile.TemporaryDirectory() as here, subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as worker:
        about = ask(worker, op="versions")
        for seed, name in enumerate(about.pop("models")):
            rows.append(row_of(worker, name, seed, pathlib.Path(here)))
            print(rows[-1], flush=True)
    result = {"rows": rows, **about, **report.provenance()}
    report.write(pathlib.Path(_WORKDIR.value), "architectures", result, markdown(result))
    worst = max(row[name] or 0.0 for row in rows for name in ("read", "read_old", "written"))
    if not worst <= LARGEST:
        raise UserError(f"logits differ by {worst:.2g}, more than {LARGEST}; one of the readers is wrong")


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
