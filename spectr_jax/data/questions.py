"""Questions of benchmarks in Spec-Bench's format: JSON lines with question_id, category and turns,
the user's messages."""

from collections.abc import Sequence
from typing import NamedTuple

from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, lines_of, parse_json, read_text

CONVERSATION = "multi-turn conversation"
TASKS = {
    **dict.fromkeys(
        ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        CONVERSATION,
    ),
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}
"""The task of each category. Any other category is its own task."""
OVERALL = "overall"
"""The name that tables give to all tasks together."""


class Question(NamedTuple):
    """One question: the user's messages, in order."""

    identity: str
    task: str
    turns: tuple[str, ...]


def read_questions(path: str) -> list[Question]:
    """Returns the questions of a file in Spec-Bench's format, JSON lines.

    Raises:
      UserError: it cannot be read, or a line is not a question.
    """
    try:
        lines = lines_of(read_text(expanded(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"questions={path!r}: cannot be read ({error}); give Spec-Bench's question.jsonl"
        ) from error
    questions: dict[str, Question] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"questions={path!r}: line {number}"
        question = _question(line, place)
        if question.identity in questions:
            raise UserError(f"{place} repeats question_id {question.identity}; remove one")
        questions[question.identity] = question
    if not questions:
        raise UserError(f"questions={path!r}: has no questions; give Spec-Bench's question.jsonl")
    return list(questions.values())


def _question(line: str, place: str) -> Question:
    try:
        question = parse_json(line)
        identity, category, turns = question["question_id"], question["category"], question["turns"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{place} lacks question_id, category or turns ({error!r}); give JSON lines"
        ) from error
    strings = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
    if strings and any("\ud800" <= each <= "\udfff" for each in "".join(turns)):
        raise UserError(f"{place} has turns {turns!r:.60} of invalid Unicode; fix its escapes")
    if not strings or not turns or not all(map(str.strip, turns)):
        raise UserError(f"{place} has turns {turns!r:.60}; give a list of messages")
    if not isinstance(category, str) or not category.strip() or category == OVERALL:
        raise UserError(
            f"{place} has category {category!r:.60}; give a name other than {OVERALL!r}"
        )
    return Question(str(identity), TASKS.get(category, category), tuple(turns))


def spread(questions: Sequence[Question], per_task: int) -> list[Question]:
    """Returns at most `per_task` evenly spaced questions of each task; all of them for 0."""
    kept = []
    for task in dict.fromkeys(question.task for question in questions):
        of_task = [question for question in questions if question.task == task]
        count = min(per_task or len(of_task), len(of_task))
        kept += [of_task[index * len(of_task) // count] for index in range(count)]
    return kept
