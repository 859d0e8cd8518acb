"""Tests which kernels are loaded, and what the note says without them. Nothing is compiled."""

import hashlib
import shutil
import sys
import sysconfig

import pytest

from spectr_jax.models.layers import cpu

NAME = f"_products{sysconfig.get_config_var('EXT_SUFFIX')}"
FOLDER = cpu.FOLDER
CODE = "spectr_jax/models/layers/cpu"
SOURCES = b"".join((FOLDER / source).read_bytes() for source in cpu.SOURCES)
FITTING = b"kernels " + hashlib.sha256(SOURCES).hexdigest().encode()
STALE = b"kernels " + hashlib.sha256(b"older").hexdigest().encode()


@pytest.mark.skipif(not (FOLDER / NAME).is_file(), reason="there is no file of kernels")
def test_the_kernels_of_this_checkout_were_built_from_its_sources():
    """If this fails, scripts/setup.sh builds them; setup.py and `built` hash the same files."""
    assert cpu.built() == FOLDER / NAME


@pytest.fixture
def clone(monkeypatch, tmp_path):
    """Returns a clone without kernels, from which Python imports during the test."""
    clone = tmp_path / "my clone"
    monkeypatch.setattr(cpu, "FOLDER", clone / CODE)
    shutil.copytree(FOLDER, clone / CODE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (clone / "setup.py").touch()
    (clone / "spectr_jax.egg-info").mkdir()  # pip leaves it there.
    (clone / "spectr_jax.egg-info/PKG-INFO").write_text("Name: spectr_jax\nVersion: 1\n")
    monkeypatch.setattr(sys, "path", [str(clone)])
    monkeypatch.setenv("CXX", "compiler-of-the-test --with=flags")
    monkeypatch.setattr(shutil, "which", {"compiler-of-the-test": "/bin/it"}.get)
    return clone


@pytest.fixture
def installed(clone, tmp_path):
    """Returns the path of the kernels in an installed package; the test writes the file."""
    site = tmp_path / "site-packages"
    (site / CODE).mkdir(parents=True)
    (site / "spectr_jax-1.dist-info").mkdir()
    (site / "spectr_jax-1.dist-info/METADATA").write_text("Name: spectr_jax\nVersion: 1\n")
    (site / "spectr_jax-1.dist-info/RECORD").write_text(f"{CODE}/{NAME},,\n{CODE}/products.cc,,\n")
    sys.path.append(str(site))
    return site / CODE / NAME


def test_kernels_next_to_the_code_are_loaded_before_installed_ones(clone, installed):
    installed.write_bytes(FITTING)
    (clone / CODE / NAME).write_bytes(FITTING)
    assert cpu.built() == clone / CODE / NAME


@pytest.mark.parametrize("beside", [None, STALE], ids=["none", "stale"])
def test_a_clone_uses_installed_kernels_of_its_own_sources(clone, installed, beside):
    installed.write_bytes(FITTING)
    if beside:
        (clone / CODE / NAME).write_bytes(beside)
    assert cpu.built() == installed


@pytest.mark.parametrize("changed", cpu.SOURCES)
def test_kernels_of_other_sources_are_not_loaded(clone, changed):
    file = clone / CODE / NAME
    file.write_bytes(FITTING)
    (clone / CODE / changed).write_bytes(b"// of a later commit")
    with pytest.raises(OSError) as error:
        cpu.built()
    assert str(error.value) == (
        f"{file} was built from other sources; run: pip install -e '{clone}'"
    )


def test_installed_kernels_of_other_sources_are_not_loaded(clone, installed):
    installed.write_bytes(STALE)
    with pytest.raises(OSError) as error:
        cpu.built()
    assert str(error.value) == (
        f"{installed} was built from other sources; run: pip install -e '{clone}'"
    )


def test_the_note_names_a_compiler_only_if_there_is_none(clone, installed, monkeypatch):
    with pytest.raises(OSError) as error:
        cpu.built()
    assert str(error.value) == f"they are not built; run: pip install -e '{clone}'"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OSError) as error:
        cpu.built()
    assert str(error.value) == (
        "they are not built; install a C++ compiler (compiler-of-the-test), "
        f"then run: pip install -e '{clone}'"
    )


def test_an_installed_package_without_kernels_asks_to_install_it_again(clone, installed):
    (clone / "setup.py").unlink()
    with pytest.raises(OSError, match=r"^they are not built; install spectr_jax again$"):
        cpu.built()
