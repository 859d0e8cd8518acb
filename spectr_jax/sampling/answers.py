"""Answers to all prompts of a file, one JSON line each, in a file that the same run continues.

The first line has the settings. The others are answers in the order in which they end. Once all are
there, the file is rewritten in the order of the prompts, and does not show how often it was
continued.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from spectr_jax.decoding.slots import Completion, generate_all
from spectr_jax.models import frozen
from spectr_jax.sampling import chat
from spectr_jax.sampling import session as sessions
from spectr_jax.sampling.session import Session
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import lock, parse_json, path_in_errors, write_whole
from spectr_jax.utils.progress import progress

NUMBERS = ("temperature", "top_k", "top_p", "min_p")
FIELDS = ("index", "prompt")
"""The fields by which an answer is recognised."""
DECIMALS = 5
"""The precision of log-probabilities."""


class Totals(NamedTuple):
    """What one run has decoded."""

    answers: int
    tokens: int
    calls: int
    seconds: float


def answer_all(
    session: Session,
    prompts: Mapping[int, str],
    path: pathlib.Path,
    slots: int,
    seed: int,
    dtype: str | None = None,
    is_chat: bool = False,
) -> Totals:
    """Writes the answers to the prompts of a file (`prompts.from_file`) that `path` lacks.

    Prompt i is row i of a batch with the key `key(seed)`. The lines of `path` do not depend on
    `slots`, apart from the rounding of log-probabilities.

    Raises:
      UserError: a prompt is too long; another process writes `path`; or it has answers of other
        settings or other prompts, or is another file. It stays as it is.
      OSError: `path` cannot be written. It keeps the answers that were finished.
    """
    texts, tokens = zip(*chat.encode_alone(session, prompts, is_chat), strict=True)
    header = _line({"settings": _settings(session, seed, dtype, is_chat)})
    totals = Totals(0, 0, 0, 0.0)
    with path_in_errors(path), path.open("a+b") as file:
        lock(file, f"--output={path}: another process writes it; wait, or choose another file")
        file.seek(0)
        content = file.read()
        lines = _read(f"--output={path}", content, header, texts)
        if len(lines) < len(texts):
            options = sessions.arguments(session) | {"slots": slots, "skip": frozenset(lines)}
            completions = generate_all(jax.random.key(seed), prompts=tokens, **options)
            file.truncate(content.rfind(b"\n") + 1 if lines else 0)  # Without a torn last line.
            file.write(b"" if lines else header)
            totals = _decode(session, completions, texts, is_chat, file, lines)
        whole = header + b"".join(lines[index] for index in range(len(texts)))
        if content != whole:
            write_whole(path, whole)
    return totals


def _settings(session: Session, seed: int, dtype: str | None, is_chat: bool) -> dict[str, Any]:
    """Returns everything that tokens depend on, apart from the prompts."""
    method, draft_policy = session.method, session.draft_policy or session.policy
    return {  # In this order, so that a difference is reported by its cause.
        "dtype": dtype,
        "method": method.name,
        "tree": method.tree.parents,
        "verifier": repr(method.verifier),
        "drafter": repr(method.drafter),
        **{name: getattr(session.policy, name) for name in (*NUMBERS, "eos")},
        **{f"draft_{name}": getattr(draft_policy, name) for name in NUMBERS},
        "stop": session.stop,
        "max_new_tokens": session.max_new_tokens,
        "chat": is_chat,
        "seed": seed,
        "logprobs": session.logprobs,
        "weights of the target": frozen.digest(session.target),
        "weights of the draft": session.draft and frozen.digest(session.draft),
    }


def _read(place: str, content: bytes, header: bytes, prompts: Sequence[str]) -> dict[int, bytes]:
    """Returns the lines of the answers in a file by index, without a torn last line.

    Raises:
      UserError: the file has other settings than `header`, or other prompts, or is another file.
    """
    if header.startswith(content):
        return {}
    ours, (first, *lines) = parse_json(header.decode())["settings"], content.split(b"\n")
    theirs = _fields(f"{place}: line 1", first, {"settings"})["settings"]
    for name, value in ours.items():
        other = theirs.get(name) if isinstance(theirs, dict) else None
        if other != value:
            raise UserError(
                f"{place}: has answers with {name}={other!r:.60}, and this run has "
                f"{name}={value!r:.60}; give the flags of that run, or choose another file"
            )
    found = {}
    for number, line in enumerate(lines[:-1], start=2):
        if not line.strip():
            continue
        answer = _fields(f"{place}: line {number}", line, FIELDS)
        index, prompt = answer["index"], answer["prompt"]
        if type(index) is not int or not 0 <= index < len(prompts):
            raise UserError(
                f"{place}: line {number} answers prompt {index!r:.60}, and --file has prompts 0 to "
                f"{len(prompts) - 1}; give the file of that run, or delete the line"
            )
        if prompt != prompts[index]:
            raise UserError(
                f"{place}: line {number} answers {prompt!r:.60}, but prompt {index} of --file is "
                f"{prompts[index]!r:.60}; restore the prompt, or delete the line"
            )
        found[index] = line + b"\n"
    return found


def _fields(place: str, line: bytes, names: Collection[str]) -> dict[str, Any]:
    """Returns a JSON object; raises `UserError` if the line is something else or lacks a name."""
    with contextlib.suppress(ValueError):
        record = parse_json(line.decode())
        if isinstance(record, dict) and record.keys() >= set(names):
            return record
    if names is FIELDS:
        raise UserError(f"{place} is damaged; delete it, and its prompt is answered again")
    raise UserError(f"{place} is not of a file of answers; choose another file")


def _decode(
    session: Session,
    completions: Iterator[Completion],
    prompts: Sequence[str],
    is_chat: bool,
    file: BinaryIO,
    lines: dict[int, bytes],
) -> Totals:
    """Writes each answer when it ends, adds it to `lines`, and shows progress."""
    totals, started = Totals(0, 0, 0, 0.0), time.monotonic()
    with progress(len(prompts), "prompt", initial=len(lines)) as bar:
        for done in completions:
            answer = _answer(session, prompts[done.index], done, is_chat)
            lines[done.index] = _line(answer)
            file.write(lines[done.index])
            file.flush()
            if not totals.answers:  # The speed on the bar is that after compilation.
                first, compiled_with = time.monotonic(), len(answer["tokens"])
            totals = Totals(
                answers=totals.answers + 1,
                tokens=totals.tokens + len(answer["tokens"]),
                calls=totals.calls + done.target_calls,
                seconds=time.monotonic() - started,
            )
            if totals.answers > 1:
                speed = (totals.tokens - compiled_with) / (time.monotonic() - first)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            bar.update()
    return totals


def _answer(session: Session, prompt: str, done: Completion, is_chat: bool) -> dict[str, Any]:
    """Returns the fields of an answer."""
    decode, added = session.target.tokenizer.decode, slice(done.prompt_length, None)
    before, new = done.tokens[: done.prompt_length].tolist(), done.tokens[added].tolist()
    # An answer of a chat is a text of its own; a continuation may begin with a space.
    text = decode(new) if is_chat else decode([*before, *new])[len(decode(before)) :]
    text = sessions.before_stop(session, new, text)
    answer: dict[str, Any] = {"index": done.index, "prompt": prompt, "text": text, "tokens": new}
    answer |= {"calls": done.target_calls}
    if done.logprobs is not None:
        answer["logprobs"] = {
            name: np.round(row[added].astype(float), DECIMALS).tolist()
            for name, row in done.logprobs._asdict().items()
        }
    return answer


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
