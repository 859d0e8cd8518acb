"""Builds the CPU kernels, which are optional: without a C++ compiler the package installs, and
decodes more slowly."""

import hashlib
import importlib.util
import pathlib

import setuptools

FOLDER = "spectr_jax/models/layers/cpu"
SOURCES = [f"{FOLDER}/lanes.h", f"{FOLDER}/products.cc"]


def extensions() -> list[setuptools.Extension]:
    """The kernels, if jaxlib is there, whose headers they include."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        return []
    # Only kernels with the digest of the sources next to the Python code are loaded (`cpu.built`).
    sources = b"".join(pathlib.Path(path).read_bytes() for path in SOURCES)
    kernels = setuptools.Extension(
        FOLDER.replace("/", ".") + "._products",
        sources=SOURCES[1:],
        depends=SOURCES[:1],
        define_macros=[("SPECTR_JAX_SOURCES", f'"{hashlib.sha256(sources).hexdigest()}"')],
        include_dirs=[str(pathlib.Path(found.origin).parent / "include")],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-w"],
        language="c++",
        optional=True,
    )
    return [kernels]


setuptools.setup(ext_modules=extensions())
