"""Compiles every method and training step for an accelerator that this machine has not; writes results/compiled/DEVICE.

    pip install libtpu                                                  # for a TPU
    pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc      # for a GPU: of jax's version
    python scripts/dev/compile_for.py --device=v5e [--only=otm,train,calls] [--workdir=runs/compiled]

The training steps of each size (configs/lm1b, configs/open_text.py), and every method at its default options with a target
of 97M and drafts of 6M, go through the compiler that the device would use; so do the 97M's training and one method on a
mesh of four devices. This shows whether they compile, how long it takes here, and what memory they will take there. For a
GPU it also counts the kernels of one call of the target and the stops of the host in it, which decide the latency of one
sequence: `calls` are methods on one sequence. Nothing runs, no weights are made, and kernels are not tuned as they would be
on the device.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import lower
from spectr_jax.decoding.methods import METHODS
from spectr_jax.experiments.measure import acceptance, kernels, report
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import LADDER, Transformer
from spectr_jax.training.config import lm1b_config, open_text_config
from spectr_jax.training.programs import make_programs
from spectr_jax.utils import cli, sharding
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import write_json, write_whole

_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/compiled", "Where the table goes: Markdown and JSON."
)
_DEVICE = flags.DEFINE_string("device", "h100", "h100 or v5e.")
_ONLY = flags.DEFINE_list(
    "only", [], "Methods, or groups: train, mesh (several devices), calls (one sequence)."
)
_TEXTS = flags.DEFINE_integer("texts", 64, "Sequences decoded at once.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 256, "Rows of 128 tokens of a training step.", lower_bound=1)

GROUPS = ("train", *METHODS, "calls", "mesh")
PHASES = ("draft", "score", "select", "commit")
CALLS = (
    ("baseline", {}),
    ("speculative", {"draft_length": 4}),
    ("spectr", {"tree": "8x4"}),
    ("otm", {"tree": "8x4"}),
)
CALLS += (
    ("otm_block", {"tree": "8x4"}),
    ("otm_layer", {"tree": "8x4"}),
    ("otm_layer", {"tree": "8x8"}),
)
"""Methods whose kernels are counted for one sequence."""

H100 = """
platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3" dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32 threads_per_core_limit: 2048
  threads_per_block_limit: 1024 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 device_memory_size: 84942979072 memory_bandwidth: 3352320000000 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}"""
"""What CUDA says of the device, in XLA's words (`GpuTargetConfigProto`)."""


class Device(NamedTuple):
    """An accelerator: JAX's name for its kind, the package that compiles for it, and XLA's
    description."""

    backend: str
    package: str
    topology: Callable[[], topologies.TopologyDescription]


DEVICES = {
    "h100": Device(
        "gpu",
        "jax-cuda13-plugin",
        lambda: topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x4"),
    ),
    "v5e": Device("tpu", "libtpu", lambda: topologies.get_topology_desc("v5e:2x2", "tpu")),
}


def main():
    if _DEVICE.value not in DEVICES:
        raise unknown("--device", _DEVICE.value, DEVICES)
    for name in _ONLY.value:
        if name not in GROUPS:
            raise unknown("--only", name, GROUPS)
    device = DEVICES[_DEVICE.value]
    places = accelerators(device)
    rows = []
    # What a CPU does otherwise is asked of the backend while it is traced.
    with mock.patch.object(jax, "default_backend", lambda: device.backend):
        for name, program in programs(places).items():
            rows.append({"program": name, **compiled(program)})
            print(" ".join(cells(rows[-1])), flush=True)
    result = {"device": places[0].device_kind, "rows": rows, **report.provenance()}
    workdir = pathlib.Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / f"{_DEVICE.value}.json", result)
    write_whole(workdir / f"{_DEVICE.value}.md", markdown(result))
    failed = [row["program"] for row in rows if "error" in row]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(rows)} programs do not compile for {_DEVICE.value}: "
            f"{', '.join(failed)}"
        )


def accelerators(device: Device) -> list[jax.Device]:
    """Those of one machine, which can be compiled for and not run on."""
    os.environ.setdefault(
        "TPU_SKIP_MDS_QUERY", "1"
    )  # Else libtpu looks for the metadata of a cloud machine.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    with contextlib.suppress(Exception):  # Each plugin has errors of its own.
        return device.topology().devices
    raise UserError(
        f"--device={_DEVICE.value}: its compiler cannot be loaded; pip install {device.package}, "
        "as above"
    )


def programs(places: list[jax.Device]) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """What is to be compiled, by name: for the first of `places`, and for all of them; the methods
    in bfloat16."""
    wanted = _ONLY.value or GROUPS
    one, several = sharding.make_mesh(devices=places[:1]), len(places)
    recipes = {"AdamW": lm1b_config, "Muon": open_text_config}
    found: dict[str, Callable[[], jax.stages.Lowered]] = {}
    for model, (optimizer, recipe) in itertools.product(
        LADDER if "train" in wanted else (), recipes.items()
    ):
        found[f"training, {model}, {optimizer}"] = functools.partial(
            training_step, recipe(model), one
        )
    for method in METHODS:
        if method in wanted:
            found[f"`{method}`"] = functools.partial(decoding, method, "bfloat16", one)
    if "otm" in wanted:
        for dtype in ("float32", "int8"):
            found[f"`otm`, {dtype}"] = functools.partial(decoding, "otm", dtype, one)
        found["`otm`, acceptance at its nodes"] = functools.partial(
            decoding, "otm", "bfloat16", one, acceptance.observe_optimum
        )
    for method, options in CALLS if "calls" in wanted else ():
        shape = f" {next(iter(options.values()))}" if options else ""
        found[f"`{method}`{shape}, one sequence"] = functools.partial(
            decoding, method, "bfloat16", one, sequences=1, **options
        )
    if "mesh" in wanted:
        for fsdp, (optimizer, recipe) in itertools.product((1, several), recipes.items()):
            name = f"training, target_97m, {optimizer}, {several} devices, fsdp={fsdp}"
            found[name] = functools.partial(
                training_step, recipe("target_97m"), sharding.make_mesh(fsdp, places)
            )
        found[f"`otm`, {several} devices"] = functools.partial(
            decoding, "otm", "bfloat16", sharding.make_mesh(devices=places)
        )
    return found


def training_step(config: ml_collections.ConfigDict, mesh: Mesh) -> jax.stages.Lowered:
    config.batch_size = _ROWS.value
    made = make_programs(config, mesh)
    rows = jax.ShapeDtypeStruct(
        (_ROWS.value, config.model.context), jnp.int32, sharding=NamedSharding(mesh, sharding.ROWS)
    )
    step: Any = made.step
    return step.lower(
        made.like, dict.fromkeys(("inputs", "targets", "segments", "positions"), rows)
    )


def decoding(
    name: str, dtype: str, mesh: Mesh, observe=None, sequences: int | None = None, **options
) -> jax.stages.Lowered:
    sequences = sequences or _TEXTS.value
    prompts, lengths = np.ones((sequences, 16), np.int32), np.full(sequences, 9)
    target, draft = (weights(model, dtype, mesh) for model in ("target_97m", "draft_6m"))
    several = mesh if mesh.size > 1 else None
    return lower(
        jax.random.key(0),
        get_method(name, **options),
        target,
        draft,
        prompts,
        lengths,
        64,
        observe=observe,
        mesh=several,
    )


def weights(name: str, dtype: str, mesh: Mesh) -> Frozen:
    """A model of the ladder without its weights, on every device of the mesh."""
    shape = dataclasses.replace(LADDER[name], dtype="float32" if dtype == "int8" else dtype)

    def build():
        model = Transformer(shape, rngs=nnx.Rngs(0))
        return quantize(model) if dtype == "int8" else model

    frozen = freeze(nnx.eval_shape(build))
    there = NamedSharding(mesh, PartitionSpec())
    leaves: list[Any] = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if dtype == "int8" else dtype, sharding=there)
        for leaf in frozen.leaves
    ]
    return dataclasses.replace(frozen, leaves=leaves)


def compiled(make: Callable[[], jax.stages.Lowered]) -> dict[str, Any]:
    started = time.process_time()  # Of the processor: what else the machine does is not counted.
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
    if "error" in row:
        return [row["program"], "-", f"fails: {row['error'][:80]}", *["-"] * (len(PHASES) + 5)]
    return [
        row["program"],
        f"{row['lowering_seconds']:.1f}",
        f"{row['compilation_seconds']:.1f}",
        f"{row['argument_bytes'] / 1e9:.2f}",
        f"{row['temporary_bytes'] / 1e9:.2f}",
        *(
            [
                str(sum(row["kernels"].values())),
                *(str(row["kernels"].get(phase, 0)) for phase in (*PHASES, "")),
            ]
        ),
        str(row["stops"]),
    ]


def markdown(result: dict[str, Any]) -> str:
    header = ["Program", "Lowering, s", "Compilation, s", "Arguments, GB", "Temporary, GB"]
    header += [
        "Kernels/call",
        *(phase.capitalize() for phase in PHASES),
        "Other",
        "Host stops/call",
    ]
    return (
        f"# Compiled for {result['device']}, without one\n\n"
        f"{report.markdown_table(header, list(map(cells, result['rows'])))}\n\n"
        f"Training: one step on {_ROWS.value} rows of 128 tokens, bfloat16 products; AdamW as in "
        "configs/lm1b, Muon as in "
        "configs/open_text.py. Methods: default options, target_97m and draft_6m, in bfloat16 "
        "where nothing else is named, "
        f"{_TEXTS.value} sequences, up to 64 new tokens. Seconds are a core's here, memory is one "
        "device's. Kernels "
        "and stops of the host are those of one turn of the outermost loop, a call of the target. "
        "Nothing ran, and kernels "
        "were not tuned.\n\n"
        f"{report.made_by(result)}\n"
    )


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
