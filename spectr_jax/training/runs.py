"""What a training run leaves in its workdir beside checkpoints: its config, its model's shape, its
tokenizer.

Nothing here needs Orbax, or the code that trains.
"""

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from spectr_jax.data.tokenizer import AnyTokenizer, Tokenizer, VocabularyOf
from spectr_jax.models.llama import LlamaConfig
from spectr_jax.models.transformer import TransformerConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_json

CONFIG, STUDENT, TOKENIZER = "config.json", "student.json", "tokenizer.model"
BITS = "eval_bits_per_character"
"""What the best checkpoint of a language model has least of."""
REJECTION = "eval_rejection"
"""What the best checkpoint of a student has least of: 1 - alpha_1 on the first held-out labels."""


class Student(NamedTuple):
    """What a distillation chose before its first step.

    Attributes:
      shape: of the student.
      head_tokens: the tokens that its head scores [W] int32.
      vocabulary: digest of the teacher's.
      rows: labelled rows of each folder that it learns from; empty in runs that are older than this
        field.
    """

    shape: LlamaConfig
    head_tokens: np.ndarray
    vocabulary: str
    rows: tuple[int, ...]


class Run(NamedTuple):
    """A run, as its workdir describes it.

    Attributes:
      config: JSON values.
      shape: of its model.
      tokenizer: of its vocabulary; a student knows its teacher's by name alone.
      metric: what its best checkpoint has least of.
      student: of a distillation; None of a language model.
    """

    config: dict[str, Any]
    shape: TransformerConfig | LlamaConfig
    tokenizer: AnyTokenizer
    metric: str
    student: Student | None


def open_run(workdir: pathlib.Path) -> Run:
    """Reads what is in a workdir.

    Raises:
      UserError: it is not that of a training run, or a file of it is damaged.
    """
    try:
        config = json.loads((workdir / CONFIG).read_text())
        shape = (
            None
            if "teacher" in config
            else TransformerConfig(**{**config["model"], "dropout": 0.0})
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(workdir)!r} is not the workdir of a training run ({error}); fix the path"
        ) from error
    if shape is not None:
        return Run(config, shape, Tokenizer(workdir / TOKENIZER), BITS, None)
    student = read_student(workdir)
    names = VocabularyOf(workdir.name, student.vocabulary, student.shape.vocab_size)
    return Run(config, student.shape, names, REJECTION, student)


def read_student(workdir: pathlib.Path) -> Student:
    """Reads student.json.

    Raises:
      UserError: it is not there, or damaged.
    """
    path = workdir / STUDENT
    try:
        about = json.loads(path.read_text())
        tokens, rows = np.array(about["head_tokens"], np.int32), tuple(about.get("rows", ()))
        return Student(LlamaConfig(**about["model"]), tokens, about["vocabulary"], rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error}); restore it, or train again"
        ) from error


def write_student(workdir: pathlib.Path, student: Student, teacher: str) -> None:
    """Writes student.json; `teacher` is its name, for people to read."""
    about = {
        "teacher": teacher,
        "vocabulary": student.vocabulary,
        "model": dataclasses.asdict(student.shape),
    }
    write_json(
        workdir / STUDENT,
        {**about, "rows": list(student.rows), "head_tokens": student.head_tokens.tolist()},
    )
