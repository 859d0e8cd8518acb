"""Compiles every method and training step for an accelerator that this machine does not have.

    pip install libtpu                                                # for a TPU
    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc    # for a GPU: jax's version
    python scripts/dev/compile_for.py --device=v5e [--only=otm,train,calls]

The device's own compiler compiles the training step of each model of the ladder (configs/lm1b.py
and configs/open_text.py), every method with its default options (97M target, 6M drafts, bfloat16), and
both on a mesh of four devices. `calls` are methods on one sequence: the kernels and host stops of a
call decide its latency on a GPU. Nothing runs, there are no weights, and kernels are not tuned.
Writes DEVICE.md and DEVICE.json.
"""

import dataclasses
import functools
import itertools
import pathlib
import runpy
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from ahead_of_time import DEVICES, accelerators, compiled
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.decoding import get_method, slots
from spectr_jax.decoding.generate import lower
from spectr_jax.decoding.methods import METHODS
from spectr_jax.decoding.request import Request, checked
from spectr_jax.experiments.measure import acceptance, report
from spectr_jax.experiments.measure.call_times import PHASES
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import LADDER, Transformer
from spectr_jax.training.programs import make_programs
from spectr_jax.utils import cli, sharding
from spectr_jax.utils.errors import UserError, unknown

_WORKDIR = flags.DEFINE_string("workdir", "runs/compiled", "Where the table goes.")
_DEVICE = flags.DEFINE_string("device", "h100", "h100 or v5e.")
_ONLY = flags.DEFINE_list(
    "only",
    [],
    "Methods, or groups: train, mesh (several devices), calls (one sequence), slots (a list).",
)

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
SEQUENCES, ROWS = 64, 256
"""Sequences decoded at once, and rows of a training step."""
GROUPS = ("train", *METHODS, "calls", "slots", "mesh")
CALLS = [
    ("baseline", {}),
    ("speculative", {"draft_length": 4}),
    *((name, {"tree": "8x4"}) for name in ("spectr", "otm", "otm_block", "otm_layer")),
    ("otm_layer", {"tree": "8x8"}),
]
"""Methods whose kernels are counted for one sequence."""


def programs(places: list[jax.Device]) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower the wanted programs, by name.

    The programs are for the first of `places`, and those of `mesh` for all.
    """
    wanted = _ONLY.value or GROUPS
    one, several = sharding.make_mesh(devices=places[:1]), len(places)
    recipes = {"AdamW": _recipe("lm1b"), "Muon": _recipe("open_text")}
    found: dict[str, Callable[[], jax.stages.Lowered]] = {}
    models = LADDER if "train" in wanted else ()
    for model, (optimizer, recipe) in itertools.product(models, recipes.items()):
        name = f"training, {model}, {optimizer}"
        found[name] = functools.partial(training_step, recipe(model), one)
    decode = functools.partial(decoding, mesh=one)
    methods = [method for method in METHODS if method in wanted]
    found |= {f"`{method}`": functools.partial(decode, method) for method in methods}
    if "otm" in wanted:
        for dtype in ("float32", "int8"):
            found[f"`otm`, {dtype}"] = functools.partial(decode, "otm", dtype=dtype)
        found["`otm`, acceptance at its nodes"] = functools.partial(
            decode, "otm", observe=acceptance.observe_optimum
        )
    for method, options in CALLS if "calls" in wanted else ():
        name = " ".join([f"`{method}`", *map(str, options.values())])
        found[f"{name}, one sequence"] = functools.partial(decode, method, sequences=1, **options)
    if "slots" in wanted:
        found["slots: new prompts"], found["slots: calls"] = through_slots(one)
    if "mesh" in wanted:
        for fsdp, (optimizer, recipe) in itertools.product((1, several), recipes.items()):
            name = f"training, target_97m, {optimizer}, {several} devices, fsdp={fsdp}"
            mesh = sharding.make_mesh(fsdp, places)
            found[name] = functools.partial(training_step, recipe("target_97m"), mesh)
        mesh = sharding.make_mesh(devices=places)
        found[f"`otm`, {several} devices"] = functools.partial(decoding, "otm", mesh=mesh)
    return found


def _recipe(name: str) -> Callable[[str], ml_collections.ConfigDict]:
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]


def training_step(config: ml_collections.ConfigDict, mesh: Mesh) -> jax.stages.Lowered:
    config.batch_size = ROWS
    made = make_programs(config, mesh)
    there = NamedSharding(mesh, sharding.ROWS)
    rows = jax.ShapeDtypeStruct((ROWS, config.model.context), jnp.int32, sharding=there)
    step: Any = made.step
    batch = dict.fromkeys(("inputs", "targets", "segments", "positions"), rows)
    return step.lower(made.like, batch)


def decoding(
    name: str, mesh: Mesh, dtype: str = "bfloat16", sequences=SEQUENCES, observe=None, **options
) -> jax.stages.Lowered:
    return lower(
        *arguments(name, mesh, dtype, sequences, **options),
        observe=observe,
        mesh=mesh if mesh.size > 1 else None,
    )


def arguments(name: str, mesh: Mesh, dtype: str = "bfloat16", sequences=SEQUENCES, **options):
    """Returns the arguments of `generate`."""
    prompts, lengths = np.ones((sequences, 16), np.int32), np.full(sequences, 9)
    target, draft = (weights(model, dtype, mesh) for model in ("target_97m", "draft_6m"))
    method = get_method(name, **options)
    models = target, draft if method.needs_draft else None
    return jax.random.split(jax.random.key(0), sequences), method, *models, prompts, lengths, 64


def through_slots(mesh: Mesh) -> list[Callable[[], jax.stages.Lowered]]:
    """Returns functions that lower the two programs of `generate_all`."""

    def inputs() -> tuple[Any, Request]:
        request = checked(*arguments("otm_block", mesh, tree="4x4"))
        return jax.eval_shape(slots.resized, None, request), request

    is_new = np.ones(SEQUENCES, bool)
    return [
        lambda: slots.start.lower(*inputs(), is_new, slots.GROUP_ON_ACCELERATORS),
        lambda: slots.advance.lower(*inputs(), slots.CALLS_ON_ACCELERATORS),
    ]


def weights(name: str, dtype: str, mesh: Mesh) -> Frozen:
    """Returns a model of the ladder without its weights, on every device of the mesh."""
    shape = dataclasses.replace(LADDER[name], dtype="float32" if dtype == "int8" else dtype)

    def build():
        model = Transformer(shape, rngs=nnx.Rngs(0))
        return quantize(model) if dtype == "int8" else model

    frozen = freeze(nnx.eval_shape(build))
    there = NamedSharding(mesh, PartitionSpec())

    def placed(leaf):
        leaf_dtype = leaf.dtype if dtype == "int8" else dtype
        return jax.ShapeDtypeStruct(leaf.shape, leaf_dtype, sharding=there)

    return dataclasses.replace(frozen, leaves=[placed(leaf) for leaf in frozen.leaves])


def cells(row: dict[str, Any]) -> list[str]:
    """Returns the cells of a program's line in the table."""
    if "error" in row:
        return [row["program"], "-", f"fails: {row['error'][:80]}", *["-"] * (len(PHASES) + 5)]
    seconds = [f"{row[f'{name}_seconds']:.1f}" for name in ("lowering", "compilation")]
    memory = [f"{row[f'{name}_bytes'] / 1e9:.2f}" for name in ("argument", "temporary")]
    counts = [row["kernels"].get(phase, 0) for phase in (*PHASES, "")]
    total = sum(row["kernels"].values())
    return [row["program"], *seconds, *memory, *map(str, [total, *counts, row["stops"]])]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page with the table and its provenance."""
    header = ["Program", "Lowering, s", "Compilation, s", "Arguments, GB", "Temporary, GB"]
    header += ["Kernels/call", *map(str.capitalize, PHASES), "Other", "Host stops/call"]
    return report.page(
        f"Compiled for {result['device']}, without one",
        report.markdown_table(header, list(map(cells, result["rows"]))),
        [
            f"Training: one step on {ROWS} rows of 128 tokens, bfloat16 products; AdamW as in "
            "configs/lm1b.py, Muon as in configs/open_text.py. Methods: default options, target_97m "
            "and draft_6m, in bfloat16 unless the row names another precision, "
            f"{SEQUENCES} sequences, up to 64 new tokens. Seconds are those of one core here, "
            "memory is that of one device. Kernels and host stops are those of one iteration of "
            "the outermost loop, which is a call of the target. Nothing ran, and kernels were not "
            "tuned.",
            report.provenance_line(result),
        ],
    )


def main() -> None:
    if _DEVICE.value not in DEVICES:
        raise unknown("--device", _DEVICE.value, DEVICES)
    for name in _ONLY.value:
        if name not in GROUPS:
            raise unknown("--only", name, GROUPS)
    places, backend = accelerators(_DEVICE.value), DEVICES[_DEVICE.value][0]
    rows = []
    # Tracing asks for the default backend, and would choose a CPU's program.
    with mock.patch.object(jax, "default_backend", lambda: backend):
        for name, program in programs(places).items():
            rows.append({"program": name, **compiled(program)})
            print(" ".join(cells(rows[-1])), flush=True)
    result = {"device": places[0].device_kind, "rows": rows, **report.provenance()}
    report.write(pathlib.Path(_WORKDIR.value), _DEVICE.value, result, markdown(result))
    if failed := [row["program"] for row in rows if "error" in row]:
        raise UserError(f"{len(failed)} of {len(rows)} programs fail: {', '.join(failed)}")


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
