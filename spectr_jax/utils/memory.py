"""Free memory, and settings of glibc's heap.

The heap otherwise returns its memory to Linux at each training step on a CPU and reacquires it,
filled with zeros (results/notes/2026-11-training.md).
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""


MEMINFO = pathlib.Path("/proc/meminfo")


def free_of(devices: Iterable[Any]) -> int | None:
    """Returns the free bytes of the fullest of some JAX devices; None if they do not report them."""
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in each for each in stats):
        return None
    return min(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)


def free_on_host() -> int | None:
    """Returns the bytes that programs can still allocate on this host; None if that is unknown."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    except OSError:  # Only Linux has the file.
        return None
    return 1024 * int(found[1]) if found else None


def keep_freed_memory() -> bool:
    """Makes glibc keep large freed blocks for later allocations, and returns whether it does. Call
    it before JAX starts threads.

    Nothing changes if an accelerator plugin is installed, if the C library is not glibc, or if the
    environment configures malloc (huge pages apart) by GLIBC_TUNABLES or MALLOC_*.
    """
    tuned = re.search(r"glibc\.malloc\.(arena|mmap|trim)", os.environ.get("GLIBC_TUNABLES", ""))
    if tuned or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if not sys.platform.startswith("linux") or _accelerator_expected():
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    # One heap for all threads (others are limited in size), no block outside it, and no trimming.
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))
    return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings)


def _accelerator_expected() -> bool:
    """Returns whether an accelerator plugin is installed. JAX cannot be asked before its threads
    exist."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(
        importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu")
    )
