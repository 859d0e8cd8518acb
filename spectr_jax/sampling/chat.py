"""A conversation with an instructed model: each answer is shown as it is decoded."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from spectr_jax.decoding import stream
from spectr_jax.decoding.stopping import before, dropped_space, prepared, settled
from spectr_jax.sampling.session import PARTIAL, Session, Token, check_room, encode_all
from spectr_jax.sampling.trace import read_call, seen
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
    """Returns the tokens of a conversation that starts with the user's `message`."""
    return encode(session, [{"role": "user", "content": message}])


def encode(session: Session, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the tokens of a conversation (roles and contents), up to where the answer begins.

    Raises:
      UserError: the context of a model has no room for an answer.
    """
    prompt = session.target.tokenizer.chat(messages)
    check_room(session, messages[-1]["content"], prompt)
    return prompt


def answers(
    session: Session, prompts: Iterable[str], key: jax.Array, show: Callable[[Token], None]
) -> Iterator[Answer]:
    """Yields the answers to messages, passing each token to `show`; consumes `key`.

    A list has separate conversations; any other iterable is one conversation.

    Raises:
      UserError: as `encode`; for a list, before the first answer.
    """
    messages: list[dict[str, str]] = []

    def encode_next(session: Session, message: str) -> list[int]:
        messages.append({"role": "user", "content": message})
        return encode(session, messages)

    alone = isinstance(prompts, list)
    turns = encode_all(session, prompts, encode_message if alone else encode_next)
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
    models, new_tokens = (session.target_model, session.draft_model), session.max_new_tokens
    policy, own = session.policy, session.draft_policy
    stop = prepared(session.stop, tokenizer, session.target.model.vocab_size)
    steps = stream(key, session.method, *models, prompt, new_tokens, policy, seen, own, stop=stop)
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
    whole = len(new) < new_tokens or tokenizer.ends(new[-1]) or text != tokenizer.decode(new)
    return Answer(text, len(new), calls, first, speed, whole)
