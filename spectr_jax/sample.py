"""Decodes a prompt with any method and shows where each token came from.

    python -m spectr_jax.sample --prompt="The committee will meet again"
    python -m spectr_jax.sample --file=prompts.txt --method=spectr --num_drafts=4 --draft_length=4 --compare --html=page.html
    echo "The committee will meet again" | python -m spectr_jax.sample
    python -m spectr_jax.sample --file=prompts.jsonl --output=answers.jsonl
    python -m spectr_jax.sample --target=smollm2 --chat --prompt="Why is the sky blue?"
    python -m spectr_jax.sample --target=smollm2 --chat --method=lookup --prompt="Repeat this list backwards: apple, pear"

Accepted drafts are green, corrections red, bonus tokens blue. Speeds are medians of runs of
--max_new_tokens tokens each, in which the method and the baseline take turns. The ratio is the median
over pairs of runs, so on a busy machine it is not the quotient of the speeds. Several prompts end with
a line on all of them. The default models are part of the package; nothing is downloaded. With
--chat an instructed model answers; without --prompt and --file it holds a conversation. With --chat
and --compare or --html each prompt is a conversation of its own, shown once it is answered.

With --output all prompts of a file are decoded together, a line of JSON for each. If such a run is
stopped or killed, the same command continues it.

A line of stdin that is too long for the target's context is reported and skipped. Before a
conversation outgrows the context its oldest turns are left out, and a line says so.
"""

import dataclasses
import io
import pathlib
import shlex
import shutil
import sys
from collections.abc import Mapping

from absl import flags

from spectr_jax.utils import cli

_PROMPT = flags.DEFINE_multi_string(
    "prompt",
    None,
    "The text to continue; may be given several times. Without --prompt and --file, each line of "
    "stdin.",
)
_FILE = flags.DEFINE_string(
    "file",
    None,
    "A text file with one prompt per line, or FILE.jsonl with a JSON string or an object with a "
    '"prompt" per line.',
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Write the answers to all prompts of --file to this file, as JSON lines: index, prompt, text, "
    "tokens, calls. The same command continues a run that was stopped.",
)
_SLOTS = flags.DEFINE_integer(
    "slots",
    None,
    "The number of prompts of --output that are decoded at the same time. (default: 8)",
    lower_bound=1,
)
_LOGPROBS = flags.DEFINE_bool(
    "logprobs",
    False,
    "Write log-probabilities of each token to --output, under the policy and under the model.",
)
_METHOD = flags.DEFINE_string(
    "method",
    None,
    "Such as spectr; a wrong name lists all. (default: block, L = 3; recycle for smollm2 without "
    "--draft; otm_block with --tree or --num_drafts)",
)
_TREE = flags.DEFINE_string(
    "tree",
    None,
    "The draft tree: children per node by level, as 4,2,1; 8x4 for 8 chains of 4; chain:8, "
    "batch:8, specinfer:16, recall:8.",
)
_NUM_DRAFTS = flags.DEFINE_integer("num_drafts", None, "Drafted chains (K); not with --tree.")
_DRAFT_LENGTH = flags.DEFINE_integer("draft_length", None, "Tokens per drafted chain (L).")
_LAYERS = flags.DEFINE_integer("layers", None, "For self_speculative: the layers that draft.")
_TARGET = flags.DEFINE_string(
    "target",
    "20m",
    "A published model such as 20m, smollm2, a file, a workdir, hf:FOLDER, gguf:FILE.",
)
_DRAFT = flags.DEFINE_string(
    "draft",
    None,
    "The draft model, named like --target or eagle3:FOLDER, with the target's vocabulary; added or "
    "padded tokens may differ. "
    "For recycle, a table of spectr_jax.tabulate. (default: 2m; for smollm2 its table, which recycle "
    "uses; none for hf:, gguf: and targets of other vocabularies, which the baseline then decodes)",
)
_DTYPE = flags.DEFINE_string(
    "dtype",
    None,
    "Precision of both models: float32, bfloat16 or int8. (default: int8 for published models and "
    "smollm2; for others what is fastest without loss)",
)
_MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel",
    1,
    "The number of devices over which the target's weights are split, for targets that are too "
    "large for one.",
    lower_bound=1,
)
_CHAT = flags.DEFINE_bool(
    "chat", False, "Treat prompts as chat messages, and print each answer as it is decoded."
)
_NEW = flags.DEFINE_integer(
    "max_new_tokens",
    None,
    "The most tokens to add to a prompt. (default: 64; 256 with --chat)",
    lower_bound=1,
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "Sampling temperature; 0 is greedy decoding. (default: 1; 0.2 with --chat)"
)
_DRAFT_TEMPERATURE = flags.DEFINE_float(
    "draft_temperature", None, "Temperature of the drafts. (default: --temperature)"
)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample among the k most probable tokens; 0 for all.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Sample among the most probable tokens with this mass.")
_MIN_P = flags.DEFINE_float(
    "min_p", 0.0, "Sample among tokens with this fraction of the largest probability; 0 for all."
)
_STOP = flags.DEFINE_multi_string(
    "stop", [], "Stop before this string; may be given several times."
)
_SEED = flags.DEFINE_integer("seed", 0, "Random seed.", lower_bound=0, upper_bound=2**32 - 1)
_COMPARE = flags.DEFINE_bool("compare", False, "Show the baseline's continuation as well.")
_HTML = flags.DEFINE_string("html", None, "Also write a page with the draft tree of each call.")
_COLOUR = flags.DEFINE_enum(
    "color", "auto", ["auto", "always", "never"], "Colours; auto: in a terminal without NO_COLOR."
)


def main():
    # After flags are parsed, so that `--help` does not wait for JAX.
    from spectr_jax.decoding import Policy
    from spectr_jax.decoding.policy import check_policy
    from spectr_jax.loading.by_name import SMOLLM2, check_dtype
    from spectr_jax.models.formats.published import PUBLISHED
    from spectr_jax.sampling.session import open_session
    from spectr_jax.utils.errors import UserError
    from spectr_jax.utils.files import checked_path

    chat, html, temperature = _CHAT.value, _HTML.value, _TEMPERATURE.value
    if temperature is None:
        temperature = 0.2 if chat else 1.0
    policy = own = Policy(temperature, _TOP_K.value, _TOP_P.value, min_p=_MIN_P.value)
    if _DRAFT_TEMPERATURE.value is not None:
        own = dataclasses.replace(policy, temperature=_DRAFT_TEMPERATURE.value)
    if "" in _STOP.value:
        raise UserError("--stop is empty; give a string, or leave it out")
    check_policy(policy)
    check_policy(own, owner="draft_")
    dtype = _DTYPE.value or ("int8" if _TARGET.value in (*PUBLISHED, SMOLLM2) else None)
    if dtype is not None:
        check_dtype(dtype)
    output, method, prompts = _output(), _method(), _prompts()
    without_model = method is not None and not (method.tree.size and method.drafter.draws)
    if without_model and _DRAFT_TEMPERATURE.value is not None:
        problem = f"method {method.name!r} draws no drafts from a model; leave it out"
        raise UserError(f"--draft_temperature={_DRAFT_TEMPERATURE.value}: {problem}")
    path = None if html is None else checked_path("html", html)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Replaces characters that the terminal lacks.
    session = open_session(
        *(method, _TARGET.value, _DRAFT.value or None, dtype),
        *(_NEW.value or (256 if chat else 64), policy, own),
        logprobs=path is not None or _LOGPROBS.value,
        stop=tuple(_STOP.value),
        mesh=_mesh(),
    )
    draws = session.method.tree.size and session.method.drafter.draws
    if not draws and _DRAFT_TEMPERATURE.value is not None:
        problem = "no draft model is used, because there is no --draft; give one, or leave it out"
        raise UserError(f"--draft_temperature={_DRAFT_TEMPERATURE.value}: {problem}")
    if method is None and session.draft is None:
        print(
            f"no --draft is given for {_TARGET.value!r}: the baseline decodes it", file=sys.stderr
        )
    if output is not None:
        _write(session, prompts, output, dtype)
    elif chat and not _COMPARE.value and path is None:
        _chat(session, prompts)
    else:
        _show(session, prompts, path)


def _mesh():
    """Returns a mesh of --model_parallel devices, or None for one device.

    Raises:
      UserError: there are fewer devices.
    """
    import jax

    from spectr_jax.utils import sharding
    from spectr_jax.utils.errors import UserError, check_device

    if (wanted := _MODEL_PARALLEL.value) == 1:
        return None
    check_device()
    if wanted > (count := jax.device_count()):
        problem = f"JAX finds {count} device{'s' * (count > 1)}; give at most {count}"
        raise UserError(f"--model_parallel={wanted}: {problem}")
    return sharding.make_mesh(model=wanted, devices=jax.devices()[:wanted])


def _method():
    """Returns the method that the flags name, or None to let `open_session` choose.

    Raises:
      UserError: the flags contradict each other.
    """
    from spectr_jax.decoding import get_method
    from spectr_jax.utils.errors import UserError

    flags_of_method = (_TREE, _NUM_DRAFTS, _DRAFT_LENGTH, _LAYERS)
    given = {flag.name: flag.value for flag in flags_of_method if flag.value is not None}
    if _METHOD.value is not None:
        return get_method(_METHOD.value, **given)
    if "layers" in given:
        raise UserError(
            f"--layers={_LAYERS.value}: applies to --method=self_speculative only; give both, or "
            "leave it out"
        )
    if "tree" in given and len(given) > 1:
        both = " and ".join(f"--{name}={value}" for name, value in list(given.items())[:2])
        raise UserError(f"{both} are both given; give one of them")
    if "tree" in given or "num_drafts" in given:
        return get_method("otm_block", **given)
    return get_method("block", **given) if given else None


def _output() -> pathlib.Path | None:
    """Returns the path of --output, or None.

    Raises:
      UserError: the file cannot be written, or other flags do not fit.
    """
    from spectr_jax.utils.errors import UserError
    from spectr_jax.utils.files import checked_path

    def given(*several: flags.FlagHolder) -> list[str]:
        return [flag.name for flag in several if flag.value not in (None, False)]

    if _OUTPUT.value is None:
        if name := next(iter(given(_SLOTS, _LOGPROBS)), None):
            raise UserError(f"--{name}: applies to --output only; give both, or leave it out")
        return None
    if name := next(iter(given(_PROMPT, _COMPARE, _HTML)), None):
        raise UserError(f"--{name} and --output={_OUTPUT.value} are both given; give one of them")
    if _FILE.value is None:
        raise UserError(f"--output={_OUTPUT.value}: takes its prompts from a file; give --file")
    return checked_path("output", _OUTPUT.value)


def _prompts():
    """Returns the prompts (`session.Prompts`): of a file, a list, or an iterator over stdin."""
    from spectr_jax.sampling import prompts
    from spectr_jax.utils.errors import UserError

    if _PROMPT.value is not None and _FILE.value is not None:
        raise UserError(f"--prompt and --file={_FILE.value} are both given; give one of them")
    if _FILE.value is not None:
        return prompts.from_file(_FILE.value)
    if _PROMPT.value is None:
        if sys.stdin is not None and sys.stdin.isatty():
            print("one prompt per line, Ctrl-D to end:", file=sys.stderr)
        return prompts.from_stdin(sys.stdin)
    if not all(prompt.strip() for prompt in _PROMPT.value):
        if _CHAT.value:
            raise UserError("--prompt is empty: nothing to answer; give --chat a message")
        print("--prompt is empty: the sequence begins from nothing", file=sys.stderr)
    return prompts.from_flags(_PROMPT.value)


def _colour() -> bool:
    from spectr_jax.sampling import terminal

    return _COLOUR.value == "always" or (_COLOUR.value == "auto" and terminal.wants_colour())


def _write(session, prompts: Mapping[int, str], output: pathlib.Path, dtype: str | None) -> None:
    """Writes the answers to the prompts of a file, and prints a line of totals."""
    from spectr_jax.sampling import terminal
    from spectr_jax.sampling.answers import answer_all

    slots = _SLOTS.value or 8
    try:
        totals = answer_all(session, prompts, output, slots, _SEED.value, dtype, _CHAT.value)
    except KeyboardInterrupt:
        print(f"{output} has the finished answers; the same command continues", file=sys.stderr)
        raise
    print(terminal.written(f"{output}", len(prompts), session.method.name, totals))


def _show(session, prompts, html: pathlib.Path | None) -> None:
    """Prints the continuation of each prompt with its speed, and writes the page."""
    import jax

    from spectr_jax.decoding import get_method
    from spectr_jax.sampling import chat, page, terminal
    from spectr_jax.sampling import session as sampling
    from spectr_jax.utils.files import write_whole

    command = "python -m spectr_jax.sample " + shlex.join(sys.argv[1:])
    colour = _colour()
    baseline, shown, measured = None, [], []
    for number, (prompt, tokens) in enumerate(chat.encode_alone(session, prompts, _CHAT.value)):
        prompt += "\n\n" if _CHAT.value else ""
        key = jax.random.fold_in(jax.random.key(_SEED.value), number)
        decoded = sampling.decode(session, session.method, tokens, key)
        if _COMPARE.value:
            baseline = sampling.decode(session, get_method("baseline"), tokens, key)
        if not number and colour:
            print(terminal.legend(colour) + "\n")
        if baseline:
            width = shutil.get_terminal_size((120, 24)).columns
            print(terminal.columns(prompt, baseline, decoded, width, colour), flush=True)
        else:
            print(terminal.text(prompt, decoded.tokens, colour), flush=True)
        speed = sampling.measure(session, tokens, key)
        print("\n" + "\n".join(terminal.speeds(speed, baseline, decoded)) + "\n", flush=True)
        measured.append((decoded, speed))
        shown.append(page.Shown(prompt, decoded, baseline, speed))
        if html is not None:  # The command may name paths that are not UTF-8.
            write_whole(html, page.page(session, command, shown).encode(errors="replace"))
    if len(measured) > 1 and session.method.tree.size:
        print(terminal.summary(measured))


def _chat(session, prompts) -> None:
    """Answers each prompt separately; prompts of stdin form one conversation."""
    import jax

    from spectr_jax.sampling import chat, terminal

    chat.check(session)
    colour = _colour()

    def show(token) -> None:
        print(terminal.token(token, colour), end="", flush=True)

    for answer in chat.answers(session, prompts, jax.random.key(_SEED.value), show):
        print("\n\n" + terminal.answered(session.method.name, answer) + "\n", flush=True)


if __name__ == "__main__":
    cli.define_import_flag()
    cli.run(main)
