"""Decodes one prompt at a time with a method and the baseline: tokens, calls, tokens per second."""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from spectr_jax.data.tokenizer import AnyTokenizer
from spectr_jax.decoding import Generation, Method, Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.request import padded_length
from spectr_jax.decoding.stopping import before, dropped_space, prepared
from spectr_jax.loading.by_name import SMOLLM2, Trained, load
from spectr_jax.loading.pairs import fitted, load_alone, load_pair
from spectr_jax.models import parallel
from spectr_jax.models.frozen import Frozen, TooLong, check_context, freeze
from spectr_jax.sampling.trace import Recorded, read_calls, recorder
from spectr_jax.utils.errors import UserError

DEFAULT_DRAFT, DEFAULT_TABLE = "2m", "smollm2-bigram"
ROUNDS = 5
"""Timed runs of a method and of the baseline, in turns, after one untimed run of each."""
PARTIAL = "\ufffd"

Prompts: TypeAlias = Mapping[int, str] | Iterable[str]
"""The prompts of a file by line, or a list of prompts, or prompts that are read as they come."""


class Session(NamedTuple):
    """The models and options that all prompts share. `target_model` and `draft_model` are frozen."""

    method: Method
    target: Trained
    draft: Trained | None
    target_model: Frozen
    draft_model: Frozen | None
    max_new_tokens: int
    policy: Policy
    draft_policy: Policy | None
    logprobs: bool = False
    stop: tuple[str, ...] = ()
    mesh: Mesh | None = None


class Token(NamedTuple):
    """A new token of a sequence."""

    text: str  # The characters that it adds; empty while a character is incomplete.
    origin: str  # As in `sampling.trace`.
    call: int  # The index of the call that emitted it.
    logprobs: tuple[float, float] | None = None  # Under the policy and the model, if computed.


class Decoded(NamedTuple):
    """The new tokens by one method, and the recorded calls of the target."""

    method: str
    tokens: list[Token]
    calls: list[Recorded]


class Speed(NamedTuple):
    """Tokens per second: medians over runs in turns, and the median ratio."""

    method: float
    baseline: float
    ratio: float


def open_session(
    method: Method | None,
    target: str,
    draft: str | None,
    dtype: str | None,
    max_new_tokens: int,
    policy: Policy,
    draft_policy: Policy | None = None,
    logprobs: bool = False,
    stop: tuple[str, ...] = (),
    mesh: Mesh | None = None,
) -> Session:
    """Returns a session with loaded models. The draft is loaded only if the method needs one.

    Args:
      method: None chooses one that beats the baseline with the default models on a CPU, or the
        baseline if there is no draft and no table.
      target: any name that `load` takes.
      draft: likewise. None means `DEFAULT_DRAFT` if it fits the target, and no draft otherwise. For
        `recycle` it is a table, by default `DEFAULT_TABLE` for SmolLM2.
      logprobs: whether `decode` returns log-probabilities of each token.
      stop: strings before which a continuation ends.
      mesh: the devices that decode one sequence, as in `load`; None for one device.

    Raises:
      UserError: a model does not exist or has another vocabulary, the method needs a draft and
        there is none, or it needs none and there is one.
    """
    has_table = target == SMOLLM2 and draft is None
    wanted = method or (get_method("recycle") if has_table else get_method("block", draft_length=3))
    # These have vocabularies of their own.
    others = target.startswith(("hf:", "gguf:")) or target == SMOLLM2
    missing = UserError(
        f"method {wanted.name!r} needs a draft model with the vocabulary of {target!r}; give --draft"
    )
    if has_table and wanted.takes_draft and not wanted.needs_draft:
        draft = DEFAULT_TABLE
    if draft is not None and not wanted.takes_draft:
        problem = f"method {wanted.name!r} uses no draft model; leave it out"
        raise UserError(f"--draft={draft}: {problem}")
    if draft is not None:
        loaded, (drafts,) = load_pair(target, (draft,), dtype, mesh)
        wanted.drafter_for(freeze(drafts)).check(freeze(loaded), freeze(drafts))
    elif not wanted.needs_draft:
        loaded, drafts = load_alone(target, dtype, mesh), None
    elif method and others:  # Before anything is loaded.
        raise missing
    else:
        loaded = load_alone(target, dtype, mesh)
        drafts = None if others else _default_draft(loaded, dtype, mesh)
        if method and not drafts:
            raise missing
        wanted = wanted if drafts else get_method("baseline")
    prepared(stop, loaded.tokenizer, loaded.model.vocab_size)  # Raises before any long work.
    policy = dataclasses.replace(policy, eos=loaded.tokenizer.eos)
    frozen = freeze(loaded.model), freeze(drafts.model) if drafts else None
    if mesh is not None and frozen[1]:  # `generate` would place the draft's mask in every call.
        frozen = frozen[0], parallel.draft_on_mesh(mesh, frozen[1])
    return Session(
        *(wanted, loaded, drafts, *frozen, max_new_tokens, policy, draft_policy, logprobs, stop),
        mesh=mesh,
    )


def _default_draft(target: Trained, dtype: str | None, mesh: Mesh | None) -> Trained | None:
    """Returns `DEFAULT_DRAFT`, or None if the target has another vocabulary."""
    try:
        return fitted(load(DEFAULT_DRAFT, dtype), target, mesh)
    except UserError:
        return None


def encode(session: Session, prompt: str) -> list[int]:
    """Returns the tokens of a prompt. Raises `TooLong` as `check_room` does."""
    tokens = session.target.tokenizer.prompt(prompt)
    check_room(session, prompt, tokens)
    return tokens


def check_room(session: Session, prompt: str, tokens: Sequence[int]) -> None:
    """Raises `TooLong` if the target's context has no room for the new tokens."""
    new = session.max_new_tokens
    asked = f"the prompt {shortened(prompt)!r} of {len(tokens)} tokens, max_new_tokens={new}"
    check_context(
        asked, len(tokens) + new, session.target, "shorten the prompt or lower max_new_tokens"
    )


def encode_all(
    session: Session, prompts: Prompts, encode: Callable[[Session, str], list[int]] = encode
) -> Iterator[tuple[str, list[int]]]:
    """Yields each prompt with its tokens.

    The prompts of a list or a file are all checked first. A prompt of another iterable that is too
    long is reported on stderr and skipped, so that the later ones are not lost.
    """
    if isinstance(prompts, Mapping):
        return iter(list(_of_lines(session, prompts, encode)))
    if isinstance(prompts, Sized):
        return iter([(prompt, encode(session, prompt)) for prompt in prompts])
    return _as_they_come(session, prompts, encode)


def _of_lines(
    session: Session, lines: Mapping[int, str], encode: Callable[[Session, str], list[int]]
) -> Iterator[tuple[str, list[int]]]:
    for number, prompt in lines.items():
        try:
            yield prompt, encode(session, prompt)
        except TooLong as error:
            raise TooLong(f"line {number} of --file: {error}") from error


def _as_they_come(
    session: Session, prompts: Iterable[str], encode: Callable[[Session, str], list[int]]
) -> Iterator[tuple[str, list[int]]]:
    for prompt in prompts:
        try:
            tokens = encode(session, prompt)
        except TooLong as error:
            note(f"skipped: {error}")
        else:
            yield prompt, tokens


def note(line: str) -> None:
    """Prints a line on stderr, between what stdout shows."""
    print(line, file=sys.stderr, flush=True)


def decode(session: Session, method: Method, prompt: Sequence[int], key: jax.Array) -> Decoded:
    """Returns a prompt's continuation by a method, with recorded calls. Consumes `key`."""
    generation = _generate(session, method, prompt, key)
    calls = read_calls(method.tree, generation, row=0)
    added = slice(len(prompt), int(generation.lengths[0]))
    new = np.asarray(generation.tokens[0, added]).tolist()
    origins = [(origin, index) for index, call in enumerate(calls) for origin in call.origins]
    texts = _before(session, new, list(added_texts(session.target.tokenizer, prompt, new)))
    scores: Iterable[Any] = [None] * len(new)
    if generation.logprobs is not None:
        scores = zip(*(np.asarray(x[0, added]).tolist() for x in generation.logprobs), strict=True)
    rows = zip(texts, origins, scores, strict=True)
    tokens = [Token(text, *origin, score) for text, origin, score in rows]
    return Decoded(method.name, tokens, calls)


def added_texts(
    tokenizer: AnyTokenizer, prompt: Sequence[int], new: Sequence[int]
) -> Iterator[str]:
    """Yields the text that each new token adds. The last byte of a character adds all of it, and
    EOS adds none."""
    shown = tokenizer.decode(prompt)
    for count in range(1, len(new) + 1):
        text = tokenizer.decode([*prompt, *new[:count]])
        if text.endswith(PARTIAL) and count < len(new):
            yield ""
        else:
            yield text[len(shown) :]
            shown = text


def before_stop(session: Session, new: Sequence[int], text: str) -> str:
    """Returns the `text` of new tokens up to the first stop string."""
    space = dropped_space(session.target.tokenizer, new, text, session.stop)
    return before(space + text, session.stop)[len(space) :]


def _before(session: Session, new: Sequence[int], texts: Sequence[str]) -> Iterator[str]:
    """Yields the text of each new token, up to the first stop string."""
    left = len(before_stop(session, new, "".join(texts)))
    for text in texts:
        yield text[: max(left, 0)]
        left -= len(text)


def measure(session: Session, prompt: Sequence[int], key: jax.Array) -> Speed:
    """Returns the speeds of the session's method and of the baseline, timed in turns on one prompt.

    Consumes `key`. Every run emits `max_new_tokens` tokens, regardless of EOS and stop strings, so
    that start-up weighs equally on both. Calls are recorded as in `decode`: both use one program.
    """

    def tokens_per_second(method: Method) -> float:
        started = time.perf_counter()
        jax.block_until_ready(_generate(session, method, prompt, key, endless=True))
        return session.max_new_tokens / (time.perf_counter() - started)

    pair = session.method, get_method("baseline")
    rounds = [tuple(map(tokens_per_second, pair)) for _ in range(ROUNDS + 1)][1:]
    method, baseline = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    return Speed(method, baseline, statistics.median(one / other for one, other in rounds))


def _generate(
    session: Session, method: Method, prompt: Sequence[int], key: jax.Array, endless: bool = False
) -> Generation:
    """Returns the generation for one prompt; if `endless`, EOS and stop strings do not end it."""
    options = arguments(session) | {"method": method}
    if endless:
        options["policy"] = dataclasses.replace(session.policy, eos=-1)
        options["stop"] = options["stop"] and options["stop"].never()
    # The recorder depends on the padded length of the prompt, like the program.
    observe = recorder(padded_length(len(prompt)) + session.max_new_tokens)
    rows: Any = {"prompts": np.array([prompt]), "prompt_lengths": np.array([len(prompt)])}
    return generate(key, **rows, observe=observe, **options)


def arguments(session: Session) -> dict[str, Any]:
    """Returns the arguments of `generate`, `generate_all` and `stream` that all prompts share."""
    target = session.target
    return {
        "method": session.method,
        "target": session.target_model,
        "draft": session.draft_model,
        "max_new_tokens": session.max_new_tokens,
        "policy": session.policy,
        "draft_policy": session.draft_policy,
        "mesh": session.mesh,
        "logprobs": session.logprobs,
        "stop": prepared(session.stop, target.tokenizer, target.model.vocab_size),
    }


def shortened(text: str, characters: int = 40) -> str:
    """Returns the first `characters` of a text."""
    return text if len(text) <= characters else text[: characters - 3] + "..."
