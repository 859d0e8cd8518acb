"""Tests files of PyTorch: recorded tensors of all dtypes, and files that must not be read."""

import pickle
import zipfile

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from helpers import REFERENCES, names_in
from spectr_jax.models.formats import hf_llama, tensors
from spectr_jax.models.formats.folder import PICKLED, WEIGHTS, Folder
from spectr_jax.models.formats.pickled import locations_of
from spectr_jax.utils.errors import UserError

RECORDED = REFERENCES / "tensors.bin"


def test_recorded_tensors_are_read():
    numbers, found = np.arange(12).reshape(4, 3), locations_of(RECORDED)
    assert found.pop("bool")[2:] == ("BOOL", (4, 3))
    read = {name: tensors.unread(place)[:].reshape(place[-1]) for name, place in found.items()}
    assert read.pop("one") == 3.0
    np.testing.assert_array_equal(read.pop("rows"), numbers[1:3])
    for name, array in read.items():
        kind = "float32" if name == "parameter" else name
        assert array.dtype == kind
        np.testing.assert_array_equal(array, numbers.astype(array.dtype))
    assert len(read) == 7


def test_a_model_in_a_file_of_pytorch_loads(llamas, tmp_path):
    hf_llama.save_llama(tmp_path, llamas["tied"])
    names_in("tests/references/heads.py").write_pickled(
        tmp_path / PICKLED, safetensors.numpy.load_file(tmp_path / WEIGHTS)
    )
    (tmp_path / WEIGHTS).unlink()
    read = hf_llama.load_llama(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(llamas["tied"]))


class _Calls:
    """An object whose pickle names `print`, as one that runs code would."""

    def __reduce__(self):
        return print, ("code of the file runs",)


def _archive(folder, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(folder / PICKLED, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(8))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pickle.dumps({"a": _Calls()}), "builtins.print is neither a tensor nor a dictionary"),
        (pickle.dumps({"a": np.ones(2)}), "is neither a tensor nor a dictionary"),
        (pickle.dumps({"a": 3}), "has no attribute 'storage'"),
        (pickle.dumps([3]), "has no attribute 'items'"),
        (b"", "EOFError"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "EOFError"),
    ],
    ids=["function", "array", "number", "list", "empty", "bytes"],
)
def test_other_objects_are_refused_and_no_code_runs(tmp_path, capsys, content, problem):
    _archive(tmp_path, content)
    with pytest.raises(UserError, match="weights that cannot be read") as error:
        Folder(tmp_path)
    assert problem in str(error.value) and "\n" not in str(error.value)
    assert not capsys.readouterr().out


def test_files_of_other_layouts_are_refused(tmp_path):
    (tmp_path / PICKLED).write_bytes(pickle.dumps({"a": 1}))  # Of PyTorch 1.5 or older.
    with pytest.raises(UserError, match="not a zip file"):
        Folder(tmp_path)
    whole = RECORDED.read_bytes()
    (tmp_path / PICKLED).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a zip file"):
        Folder(tmp_path)
    _archive(tmp_path, b"", zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="it is compressed"):
        Folder(tmp_path)
