"""Builds the CPU kernels, which are optional: without a C++ compiler the package installs, and
decodes more slowly."""

import importlib.util
import pathlib

import setuptools

FOLDER = "spectr_jax/models/layers/cpu"


def extensions() -> list[setuptools.Extension]:
    """The kernels, if jaxlib is there, whose headers they include."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        return []
    kernels = setuptools.Extension(
        FOLDER.replace("/", ".") + "._products",
        sources=[f"{FOLDER}/products.cc"],
        depends=[f"{FOLDER}/lanes.h"],
        include_dirs=[str(pathlib.Path(found.origin).parent / "include")],
        extra_compile_args=["-std=c++20", "-O3", "-g0", "-w"],
        language="c++",
        optional=True,
    )
    return [kernels]


setuptools.setup(ext_modules=extensions())
