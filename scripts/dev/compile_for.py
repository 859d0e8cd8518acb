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

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import runpy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import kernels
import ml_collections
import numpy as np
from absl import flags
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import lower
from spectr_jax.decoding.methods import METHODS
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
    "only", [], "Methods, or groups: train, mesh (several devices), calls (one sequence)."
)

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
SEQUENCES, ROWS = 64, 256
"""Sequences decoded at once, and rows of a training step."""
GROUPS = ("train", *METHODS, "calls", "mesh")
CALLS = [
    ("baseline", {}),
    ("speculative", {"draft_length": 4}),
    *((name, {"tree": "8x4"}) for name in ("spectr", "otm", "otm_block", "otm_layer")),
    ("otm_layer", {"tree": "8x8"}),
]
"""Methods whose kernels are counted for one sequence."""
DEVICES = {"h100": ("gpu", "jax-cuda13-plugin"), "v5e": ("tpu", "libtpu")}
"""JAX's name of the backend, and the package with its compiler."""

H100 = """
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a" core_count: 132 fpus_per_core: 128
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_core_limit: 2048 threads_per_block_limit: 1024
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_core: 233472
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 l2_cache_size: 52428800
  device_memory_size: 84942979072 memory_bandwidth: 3352320000000 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}"""
"""The device's description by CUDA, in XLA's form (`GpuTargetConfigProto`)."""


def accelerators(name: str) -> list[jax.Device]:
    """Returns the devices of one machine, which can be compiled for but not run on."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a cloud machine's server.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    with contextlib.suppress(Exception):  # Each plugin has errors of its own.
        if name == "v5e":
            return topologies.get_topology_desc("v5e:2x2", "tpu").devices
        return topologies.get_topology_desc(
            "", "cuda", target_config=H100, topology="1x1x4"
        ).devices
    package = DEVICES[name][1]
    raise UserError(f"--device={name}: its compiler cannot be loaded; pip install {package}")


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
    prompts, lengths = np.ones((sequences, 16), np.int32), np.full(sequences, 9)
    target, draft = (weights(model, dtype, mesh) for model in ("target_97m", "draft_6m"))
    method = get_method(name, **options)
    models = target, draft if method.needs_draft else None
    inputs = jax.random.key(0), method, *models, prompts, lengths, 64
    return lower(*inputs, observe=observe, mesh=mesh if mesh.size > 1 else None)


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


def compiled(make: Callable[[], jax.stages.Lowered]) -> dict[str, Any]:
    """Returns the measurements of one program, or its compiler's error."""
    started = time.process_time()  # CPU time, so that other work on the machine does not count.
    lowered = make()
    between = time.process_time()
    try:
        program = lowered.compile()
        memory: Any = program.memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    counts = kernels.count(program.as_text() or "", PHASES)
    return {
        "kernels": dict(counts.kernels),
        "stops": counts.stops.total(),
        "lowering_seconds": between - started,
        "compilation_seconds": time.process_time() - between,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


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
