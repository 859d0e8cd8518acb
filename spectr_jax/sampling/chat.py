"""A conversation with an instructed model: each answer is shown as it is decoded."""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import NamedTuple

import jax

from spectr_jax.decoding import stream
from spectr_jax.decoding.stopping import before, dropped_space, settled
from spectr_jax.sampling.session import (
    PARTIAL,
    Prompts,
    Session,
    Token,
    arguments,
    check_room,
    encode,
    encode_all,
    note,
)
from spectr_jax.sampling.trace import observe_call, read_call
from spectr_jax.utils.errors import UserError


class Answer(NamedTuple):
    """An answer with its counts and times."""

    text: str  # Without the token or stop string that ends it.
    tokens: int  # Their number, including those that end it.
    calls: int  # The number of calls of the target.
    first: float  # Seconds to the first token, including compilation.
    speed: float  # Tokens per second after the first one; 0 if there were none.
    whole: bool  # Whether the model or a stop string ended the answer, not the limit.


def check(session: Session) -> None:
    """Raises `UserError` if the target has no chat template."""
    if session.target.tokenizer.template is None:
        raise UserError(
            f"--chat needs a chat template, and {session.target.name!r} has none; leave --chat out"
        )


def encode_message(session: Session, message: str) -> list[int]:
    """Returns the tokens of a conversation that starts with the user's `message`, up to where the
    answer begins. Raises `TooLong` if the target's context has no room for an answer."""
    return encode_next(session, [], message)


def encode_alone(
    session: Session, prompts: Prompts, is_chat: bool
) -> Iterator[tuple[str, list[int]]]:
    """Returns an iterator over prompts that do not depend on each other, each with its tokens.

    With `is_chat` each prompt is the first message of a conversation. Raises as `encode_all`, and
    `UserError` if the target has no chat template.
    """
    if is_chat:
        check(session)
    return encode_all(session, prompts, encode_message if is_chat else encode)


def encode_next(session: Session, messages: list[dict[str, str]], message: str) -> list[int]:
    """Returns the tokens of a conversation (roles and contents) that continues with `message`.

    Appends it to `messages`. If the context has no room for all of them and an answer, the oldest
    turns are removed, and a line on stderr says so.

    Raises:
      TooLong: the message alone has no room; `messages` are as before.
    """
    chat, left = session.target.tokenizer.chat, [*messages, {"role": "user", "content": message}]
    whole = tokens = chat(left)
    room = session.target.model.context - session.max_new_tokens
    while len(left) > 2 and len(tokens) > room:
        left = left[2:]  # A question and its answer.
        tokens = chat(left)
    check_room(session, message, tokens)
    if removed := (len(messages) + 1 - len(left)) // 2:
        note(
            f"the conversation has {len(whole)} tokens, and max_new_tokens is "
            f"{session.max_new_tokens}, more than the {session.target.model.context} of "
            f"{session.target.name!r} together; it continues without the oldest {removed} of its "
            f"{len(messages) // 2} turns; lower max_new_tokens, or start again"
        )
    messages[:] = left
    return tokens


def answers(
    session: Session, prompts: Prompts, key: jax.Array, show: Callable[[Token], None]
) -> Iterator[Answer]:
    """Yields the answers to messages, passing each token to `show`; consumes `key`.

    A list or file has separate conversations; any other iterable is one conversation (see `encode_next`),
    where a message that is too long is reported on stderr and skipped.

    Raises:
      TooLong: a message of a list is too long; before the first answer.
    """
    messages: list[dict[str, str]] = []

    def encode(session: Session, message: str) -> list[int]:
        return encode_next(session, messages, message)

    alone = isinstance(prompts, Sized)
    turns = encode_all(session, prompts, encode_message if alone else encode)
    for number, (_, tokens) in enumerate(turns):
        made = answer(session, tokens, jax.random.fold_in(key, number), show)
        messages.append({"role": "assistant", "content": made.text})
        yield made


def answer(
    session: Session, prompt: Sequence[int], key: jax.Array, show: Callable[[Token], None]
) -> Answer:
    """Answers an encoded conversation, passing each token to `show`. Consumes `key`."""
    tokenizer = session.target.tokenizer
    started = time.perf_counter()
    options = arguments(session) | {"logprobs": False}
    steps = stream(key, prompt=prompt, observe=observe_call, **options)
    new: list[int] = []
    text, space, shown, calls, first, begun = "", "", "", 0, 0.0, 0
    for step in steps:
        length = len(prompt) + len(new)
        observed, end = jax.device_get(step.observed), length + len(step.tokens)
        call = read_call(session.method.tree, observed, length, end)
        if not calls:
            first, begun = time.perf_counter() - started, len(step.tokens)
        for token, origin in zip(step.tokens, call.origins, strict=True):
            new.append(token)
            text = tokenizer.decode(new)
            space = dropped_space(tokenizer, new, text, session.stop)
            shows = text[: max(settled(space + text, session.stop) - len(space), 0)]
            if not text.endswith(PARTIAL) and len(shows) > len(shown):
                show(Token(shows[len(shown) :], origin, calls))
                shown = shows
        calls += 1
    text = before(space + text, session.stop)[len(space) :]
    if len(text) > len(shown):  # The limit cut a character, or what might have been a stop string.
        show(Token(text[len(shown) :], origin, calls - 1))
    rest = time.perf_counter() - started - first
    speed = (len(new) - begun) / rest if len(new) > begun else 0.0
    stopped = text != tokenizer.decode(new) or tokenizer.piece(new[-1]) in session.stop
    whole = len(new) < session.max_new_tokens or stopped or tokenizer.ends(new[-1])
    return Answer(text, len(new), calls, first, speed, whole)
