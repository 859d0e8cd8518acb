"""Writes the small EAGLE-3 heads of the references, and one of them in all layouts."""

import io
import json
import pathlib
import pickle
import runpy
import sys
import types
import zipfile

import numpy as np
import pytest
import safetensors.numpy

REFERENCES = pathlib.Path(__file__).parent
weight = runpy.run_path(str(REFERENCES / "weights.py"))["weight"]
VOCABULARY = 60
IDS = "eagle_aux_hidden_state_layer_ids"


def recorded(name):
    """Returns the config, the tensors and the recorded outputs of a head."""
    description = json.loads((REFERENCES / f"eagle3_{name}.json").read_text())
    arrays = dict(np.load(REFERENCES / f"eagle3_{name}.npz"))
    shapes = {name: tuple(shape) for name, shape in description["shapes"].items()}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    if "d2t" in tensors:
        kept = np.arange(len(arrays["d2t"])) + arrays["d2t"]
        tensors |= {"d2t": arrays["d2t"], "t2d": np.isin(np.arange(VOCABULARY), kept)}
    return description["config"], tensors, arrays["logits"]


def written(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_pickled(path, tensors):
    """Writes arrays as PyTorch does: a pickle that names functions of PyTorch, and storages."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    torch.LongStorage = type("LongStorage", (), {"__module__": "torch"})
    torch.BoolStorage = type("BoolStorage", (), {"__module__": "torch"})

    def _rebuild_tensor_v2(*_):
        """Stands for the function of PyTorch."""

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = (
        "torch._utils",
        "_rebuild_tensor_v2",
    )
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    kinds = {"f": torch.FloatStorage, "i": torch.LongStorage, "b": torch.BoolStorage}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None

        def reducer_override(self, obj):
            if not isinstance(obj, np.ndarray):
                return NotImplemented
            key = next(name for name, array in tensors.items() if array is obj)
            storage = ("storage", kinds[obj.dtype.kind], key, "cpu", obj.size)
            strides = tuple(stride // obj.itemsize for stride in obj.strides)
            return _rebuild_tensor_v2, (storage, 0, obj.shape, strides, False, {})

    with pytest.MonkeyPatch.context() as patch, zipfile.ZipFile(path, "w") as archive:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        listing = io.BytesIO()
        Pickler(listing, 2).dump(tensors)
        archive.writestr("head/data.pkl", listing.getvalue())
        for name, array in tensors.items():
            archive.writestr(f"head/data/{name}", array.tobytes())


def layouts(folder):
    """Writes one head in the layouts of its publishers; returns their folders."""
    config, tensors, _ = recorded("llama")
    layer = {
        name: value
        for name, value in config["transformer_layer_config"].items()
        if name != "layer_types"
    } | {"draft_vocab_size": 24}
    scaling = dict(layer["rope_parameters"])
    older = {name: value for name, value in layer.items() if name != "rope_parameters"}
    older |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    flat = {
        name.replace("layers.0.", "midlayer."): array
        for name, array in tensors.items()
        if not name.startswith("verifier")
    }
    without = {name: array for name, array in flat.items() if name != "embed_tokens.weight"}
    # Any order of the scored tokens is the same head.
    order, kept = np.random.default_rng(1).permutation(24), np.arange(24) + tensors["d2t"]
    mixed = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": kept[order] - np.arange(24)}
    given = {
        "authors": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
        "angelslim": {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True},
        "specforge": {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "phi3",
            "eagle_config": {IDS: [1, 2, 3]},
        },
    }
    prefixed = {f"model.{name}": array for name, array in without.items()}
    found = {
        "authors": written(folder / "authors", older | given["authors"], {}),
        "angelslim": written(folder / "angelslim", older | given["angelslim"], flat | mixed),
        "specforge": written(folder / "specforge", layer | given["specforge"], prefixed),
        "speculators": written(folder / "speculators", config | {IDS: [2, 3, 4]}, tensors),
    }
    (found["authors"] / "model.safetensors").unlink()
    write_pickled(found["authors"] / "pytorch_model.bin", without)
    return found
