"""Compilers of accelerators that this machine does not have, and what their programs need."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import kernels
from jax.experimental import topologies

from spectr_jax.experiments.measure.call_times import PHASES
from spectr_jax.utils.errors import UserError

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


def accelerators(name: str, count: int = 4) -> list[jax.Device]:
    """Returns `count` devices of one machine, which can be compiled for but not run on."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a cloud machine's server.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    with contextlib.suppress(Exception):  # Each plugin has errors of its own.
        if name == "v5e":
            return topologies.get_topology_desc(f"v5e:2x{count // 2}", "tpu").devices
        return topologies.get_topology_desc(
            "", "cuda", target_config=H100, topology=f"1x1x{count}"
        ).devices
    package = DEVICES[name][1]
    raise UserError(f"--device={name}: its compiler cannot be loaded; pip install {package}")


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
        "collectives": [
            {**each._asdict(), "number": number} for each, number in counts.collectives.items()
        ],
        "lowering_seconds": between - started,
        "compilation_seconds": time.process_time() - between,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
