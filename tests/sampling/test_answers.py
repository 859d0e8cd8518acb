"""Tests files of answers: their content, how a stopped run continues, and which are refused."""

import errno
import fcntl
import json
import resource

import jax
import numpy as np
import pytest

from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.slots import Completion
from spectr_jax.sampling import answers, terminal
from spectr_jax.sampling import session as sessions
from spectr_jax.sampling.answers import Totals, answer_all
from spectr_jax.utils.errors import UserError, explain

SLOTS, SEED, NEW = 3, 5, 8


@pytest.fixture(scope="module")
def session(toy):
    models = (str(toy.folder / name) for name in ("target", "draft"))
    method, policy = get_method("block", draft_length=2), Policy(0.7)
    return sessions.open_session(
        *(method, *models, "float32", NEW, policy, Policy(1.3)), logprobs=True, stop=("w", "2-")
    )


@pytest.fixture(scope="module")
def prompts(toy):
    """By the number of their line, as in a file whose every other line is blank."""
    return {2 * index + 1: prompt for index, prompt in enumerate(toy.prompts)}


@pytest.fixture(scope="module")
def whole(session, prompts, tmp_path_factory):
    """Returns the content of the file of an unbroken run."""
    path = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    totals = answer_all(session, prompts, path, SLOTS, SEED)
    records = [json.loads(line) for line in path.read_bytes().splitlines()][1:]
    tokens, calls = (sum(counts) for counts in zip(*map(counts_of, records), strict=True))
    assert totals[:3] == (len(prompts), tokens, calls) and totals.seconds > 0
    return path.read_bytes()


def counts_of(record):
    return len(record["tokens"]), record["calls"]


def check_counts_and_logprobs(record, alone):
    assert counts_of(record) == (len(alone.tokens), len(alone.calls))
    scores = zip(*(record["logprobs"][name] for name in ("policy", "model")), strict=True)
    expected = [token.logprobs for token in alone.tokens]
    np.testing.assert_allclose(list(scores), expected, atol=2e-5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_answers_equal_those_of_single_prompts(session, prompts, whole):
    head, *records = map(json.loads, whole.splitlines())
    assert (head["settings"]["temperature"], head["settings"]["draft_temperature"]) == (0.7, 1.3)
    assert [record["index"] for record in records] == list(range(len(prompts)))
    stopped = 0
    for index, (prompt, record) in enumerate(zip(prompts.values(), records, strict=True)):
        key = jax.random.fold_in(jax.random.key(SEED), index)[None]
        tokens = sessions.encode(session, prompt)
        alone = sessions.decode(session, session.method, tokens, key)
        assert record["prompt"] == prompt
        assert record["text"] == "".join(token.text for token in alone.tokens)
        check_counts_and_logprobs(record, alone)
        everything = session.target.tokenizer.decode([*tokens, *record["tokens"]])
        assert everything.startswith(prompt + record["text"])
        stopped += everything != prompt + record["text"]
    assert stopped  # The stop strings cut some of them.


def test_chat_messages_are_encoded_with_the_template(session, prompts, path, toy):
    with pytest.raises(UserError, match="--chat needs a chat template"):
        answer_all(session, prompts, path, SLOTS, SEED, is_chat=True)

    class Backwards(Tokenizer):
        template = "any"

        def chat(self, messages):
            return [self.bos, *reversed(self.encode(messages[0]["content"]))]

    tokenizer = Backwards(toy.folder / "tokenizer.model")
    chatting = session._replace(target=session.target._replace(tokenizer=tokenizer))
    answer_all(chatting, {1: toy.prompts[0]}, path, SLOTS, SEED, is_chat=True)
    head, record = map(json.loads, path.read_bytes().splitlines())
    tokens = tokenizer.chat([{"content": toy.prompts[0]}])
    key = jax.random.fold_in(jax.random.key(SEED), 0)[None]
    alone = sessions.decode(chatting, session.method, tokens, key)
    assert head["settings"]["chat"] and record["prompt"] == toy.prompts[0]
    check_counts_and_logprobs(record, alone)


def test_a_continuation_keeps_its_space_and_an_answer_of_a_chat_does_not(session):
    tokenizer = session.target.tokenizer
    prompt, new = tokenizer.prompt("draft"), [*tokenizer.encode("law 3"), tokenizer.eos]
    counts = {"target_calls": 7, "emitted_per_call": np.zeros(4, int)}
    rest = {"index": 2, "prompt_length": len(prompt), "observed": None, "logprobs": None, **counts}
    done = Completion(tokens=np.array([*prompt, *new]), **rest)
    for is_chat, text in ((False, " la"), (True, "la")):
        expected = {"index": 2, "prompt": "draft", "text": text, "tokens": new, "calls": 7}
        assert answers._answer(session, "draft", done, is_chat) == expected


def test_a_run_that_is_stopped_twice_continues(session, prompts, whole, path, monkeypatch):
    """The second run writes after the whole lines of the first."""
    header, *lines = whole.splitlines(keepends=True)
    made = answers._answer
    for cut, finished in ((len(header) + 9, 0), (len(header + lines[0]) + 9, 1)):
        path.write_bytes(whole[:cut])
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(answers, "_answer", stops_after(2, made))
            answer_all(session, prompts, path, SLOTS, SEED)
        assert path.read_bytes().startswith(header + b"".join(lines[:finished]))
        totals = answer_all(session, prompts, path, SLOTS, SEED)
        assert totals.answers == len(lines) - finished - 2 and path.read_bytes() == whole


def stops_after(count, function):
    left = iter(range(count))

    def stops(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return stops


def test_each_answer_is_in_the_file_before_the_next(session, prompts, path, monkeypatch):
    seen, made = [], answers._answer

    def look(*arguments):
        seen.append(path.read_bytes().count(b"\n"))
        return made(*arguments)

    monkeypatch.setattr(answers, "_answer", look)
    answer_all(session, prompts, path, SLOTS, SEED)
    assert seen == [0, *range(2, len(prompts) + 1)]


def test_a_killed_run_continues_to_the_same_file(session, prompts, whole, path):
    """A kill leaves a prefix of the lines, in any order, of which the last may be torn."""
    header, *lines = whole.splitlines(keepends=True)
    shuffled = [lines[index] for index in (4, 1, 8, 2, 0, 7, 3, 6, 5)]
    end = len(header)
    cuts = {0: 0, 1: 0, end - 1: 0, end: 0, end + 1: 0}
    for whole_lines in (1, 8, 9):
        end = len(header) + sum(map(len, shuffled[:whole_lines]))
        cuts |= {end - 20: whole_lines - 1, end - 1: whole_lines - 1, end: whole_lines}
    for cut, finished in cuts.items():
        path.write_bytes(b"".join([header, *shuffled])[:cut])
        totals = answer_all(session, prompts, path, SLOTS, SEED)
        assert totals.answers == len(lines) - finished, cut
        assert path.read_bytes() == whole, cut
    assert list(path.parent.iterdir()) == [path]


def _parsed(content):
    """Returns the lines of a file without their log-probabilities, and all of these."""
    lines = [json.loads(line) for line in content.splitlines()]
    logprobs = [line.pop("logprobs", {}) for line in lines]
    return lines, [x for each in logprobs for values in each.values() for x in values]


def test_a_finished_file_stays_and_new_prompts_are_appended(session, prompts, whole, path):
    fewer = dict(list(prompts.items())[:6])
    answer_all(session, fewer, path, SLOTS, SEED)
    assert whole.startswith(path.read_bytes())
    before = path.stat()
    assert answer_all(session, fewer, path, SLOTS, SEED) == Totals(0, 0, 0, 0.0)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert answer_all(session, prompts, path, 2 * SLOTS, SEED).answers == 3
    # Programs of other widths may round log-probabilities otherwise.
    (made, logprobs), (wanted, exact) = map(_parsed, (path.read_bytes(), whole))
    assert made == wanted and exact
    np.testing.assert_allclose(logprobs, exact, atol=2e-4)


def test_other_files_are_refused_and_left_untouched(session, prompts, whole, path, toy):
    header, first, *rest = whole.splitlines(keepends=True)
    lines = list(prompts)
    other_target = session._replace(target=session.draft)

    def refused(message, content=whole, prompts=prompts, session=session, seed=SEED):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            answer_all(session, prompts, path, SLOTS, seed)
        assert path.read_bytes() == content

    refused("has answers with seed=5, and this run has seed=6; give the flags", seed=6)
    refused("has answers with weights of the target='", session=other_target)
    refused(r"with stop=\['w', '2-'\], and .* stop=\[\]", session=session._replace(stop=()))
    refused("with draft_temperature=1.3", session=session._replace(draft_policy=Policy(1.4)))
    refused(r"with tree=\[0, 1\]", session=session._replace(method=get_method("block")))
    edited = {**prompts, lines[2]: "draft"}
    refused("line 4 answers 'draft target token 2 law', but prompt 2 of", prompts=edited)
    fewer = {line: prompts[line] for line in lines[:-1]}
    refused("line 10 answers prompt 8, and --file has prompts 0 to 7;", prompts=fewer)
    for content in (b"text", b"text\n", b"\xff\n", b"[1]\n", b"{}\n", first, whole[1:]):
        refused("line 1 is not of a file of answers", content)
    refused("has answers with method=None", b'{"settings": 3}\n')
    for broken in (b"torn", b'{"index": 0}\n', b'"index"\n', first[:-9] + b"\n"):
        content = header + broken + (b"".join(rest) if broken.endswith(b"\n") else b"\n")
        refused("line 2 is damaged; delete it", content)
    refused(
        "line 2 answers prompt .0., and", header + first.replace(b'"index": 0', b'"index": [0]')
    )


def test_blank_lines_links_and_modes_of_a_file_are_kept(session, prompts, whole, path, tmp_path):
    header, *lines = whole.splitlines(keepends=True)
    real = tmp_path / "elsewhere"
    real.write_bytes(b"".join([header, b"\n", *lines[3:], b" \n"]))
    real.chmod(0o600)
    path.symlink_to(real)
    assert answer_all(session, prompts, path, SLOTS, SEED).answers == 3
    assert path.is_symlink() and real.read_bytes() == whole
    assert real.stat().st_mode & 0o777 == 0o600


def test_one_process_writes_a_file(session, prompts, whole, path, monkeypatch):
    path.write_bytes(whole[:-1])

    def taken(*_):
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", taken)
    with pytest.raises(UserError, match="another process writes it"):
        answer_all(session, prompts, path, SLOTS, SEED)
    assert path.read_bytes() == whole[:-1]


def test_a_full_disk_keeps_the_finished_answers(session, prompts, whole, path):
    header, *lines = whole.splitlines(keepends=True)
    room = len(header) + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError) as raised:
            answer_all(session, prompts, path, SLOTS, SEED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert explain(raised.value).startswith(f"{str(path)!r} cannot be written")
    kept = path.read_bytes()[:room].splitlines(keepends=True)
    assert kept[0] == header and len(kept) > 2 and set(kept[1:-1]) <= set(lines)
    answer_all(session, prompts, path, SLOTS, SEED)
    assert path.read_bytes() == whole


def test_an_overlong_prompt_is_refused_with_its_line(session, prompts, path):
    with pytest.raises(
        UserError, match=r"^line 40 of --file: the prompt 'law law .* exceed the context 32"
    ):
        answer_all(session, {**prompts, 40: "law " * 30}, path, SLOTS, SEED)
    assert not path.exists()


def test_the_last_line_has_the_totals_of_the_run():
    assert terminal.written("a", 1, "block", Totals(0, 0, 0, 0.0)) == "a is finished, 1 answer"
    line = "a is finished, 5 answers; of this run 2, block: 30 tokens in 20 calls, 1.50 a call; 7 s with compilation"
    assert terminal.written("a", 5, "block", Totals(2, 30, 20, 7.2)) == line
