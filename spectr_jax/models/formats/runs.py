"""A training workdir: its config, and the shape of its model. `checkpoint.py` has its weights."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np

from spectr_jax.models.llama import LlamaConfig
from spectr_jax.models.transformer import TransformerConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import parse_json, read_text, write_json

LANGUAGE_MODEL, DRAFT_STUDENT = KINDS = "language_model", "student"
"""Values of a config's field `kind`."""
CONFIG, STUDENT, TOKENIZER = "config.json", "student.json", "tokenizer.model"
PACKED = "packed"
"""The folder of a run's own packed text."""
BITS, REJECTION = "eval_bits_per_character", "eval_rejection"
"""Metrics that the best checkpoint minimises: of a language model, and of a student, 1 - alpha_1 on
the first held-out labels."""


class Student(NamedTuple):
    """A student as student.json describes it. Distillation chooses it before the first step."""

    shape: LlamaConfig
    head_tokens: np.ndarray  # Tokens that the head scores, [W] int32.
    vocabulary: str  # Digest of the teacher's vocabulary.
    counts: tuple[int, ...]  # Rows of each training folder at the start; empty in older runs.


class Run(NamedTuple):
    """A run, as its workdir describes it."""

    config: dict[str, Any]  # JSON values.
    shape: TransformerConfig | LlamaConfig
    metric: str  # The metric that the best checkpoint minimises.
    student: Student | None  # None for a language model.


def open_run(workdir: pathlib.Path) -> Run:
    """Returns the run in a workdir.

    Raises:
      UserError: `workdir` is not a training workdir, or a file in it is damaged.
    """
    try:
        config = parse_json(read_text(workdir / CONFIG))
        if "model_type" in config or "architectures" in config:
            raise UserError(
                f"{str(workdir)!r} is a folder of Hugging Face; give hf:{workdir}, or "
                f"eagle3:{workdir} for a draft head"
            )
        if kind_of(config) == LANGUAGE_MODEL:
            shape = TransformerConfig(**{**config["model"], "dropout": 0.0})
            return Run(config, shape, BITS, None)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(workdir)!r} is not the workdir of a training run ({error}); fix the path"
        ) from error
    student = read_student(workdir)
    return Run(config, student.shape, REJECTION, student)


def kind_of(config: dict[str, Any]) -> str:
    """Returns the `kind` of a run's config. Older ones have none, and only those of students have a
    teacher."""
    return config.get("kind", DRAFT_STUDENT if "teacher" in config else LANGUAGE_MODEL)


def read_student(workdir: pathlib.Path) -> Student:
    """Returns the contents of student.json.

    Raises:
      UserError: the file is missing or damaged.
    """
    path = workdir / STUDENT
    try:
        about = parse_json(read_text(path))
        tokens = np.array(about["head_tokens"], np.int32)
        counts = tuple(about.get("rows", ()))
        return Student(LlamaConfig(**about["model"]), tokens, about["vocabulary"], counts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); restore it, or train again"
        ) from error


def write_student(workdir: pathlib.Path, student: Student, teacher: str) -> None:
    """Writes student.json. The name `teacher` is for people to read."""
    about = {
        "teacher": teacher,
        "vocabulary": student.vocabulary,
        "model": dataclasses.asdict(student.shape),
        "rows": list(student.counts),
        "head_tokens": student.head_tokens.tolist(),
    }
    write_json(workdir / STUDENT, about)
