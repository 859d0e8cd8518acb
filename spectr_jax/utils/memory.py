"""The heap of the C library, which a training on a CPU otherwise gives back to the system and takes
again at each step."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Makes glibc keep large freed blocks for the next allocation; call it before JAX is used,
    whose threads hold heaps.

    Otherwise the system zeroes the memory of each step's arrays again. Does nothing where JAX has an
    accelerator to look for, where the C library is another, or where the environment has such
    settings of its own (GLIBC_TUNABLES, MALLOC_*).

    Returns:
      Whether it was done.
    """
    if not sys.platform.startswith("linux") or _accelerator_expected() or _set_by_user():
        return False
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    # One heap for all threads (others are limited in size), no block outside it, and its end never
    # given back.
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))
    return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings)


def _accelerator_expected() -> bool:
    """Returns whether a plugin for one is installed; JAX itself cannot be asked before its threads
    exist."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(
        importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu")
    )


def _set_by_user() -> bool:
    """Huge pages are another matter, and welcome."""
    ours = re.search(r"glibc\.malloc\.(arena|mmap|trim)", os.environ.get("GLIBC_TUNABLES", ""))
    return ours is not None or any(name.startswith("MALLOC_") for name in os.environ)
