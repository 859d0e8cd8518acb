"""Tests how decoded sequences appear in the terminal and on the page, and how prompts are read."""

import io
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import jax
import pytest

from spectr_jax.data.tokenizer import NO_PIECE, Tokenizer
from spectr_jax.decoding import Policy, get_method
from spectr_jax.loading import by_name
from spectr_jax.models.formats.published import EMBEDDED
from spectr_jax.sampling import prompts, session, terminal
from spectr_jax.sampling.page import Shown, page
from spectr_jax.sampling.session import Decoded, Speed, Token
from spectr_jax.sampling.trace import ACCEPTED, BONUS, CORRECTION, TARGET
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import checked_path

TOKENS = [Token(" again", ACCEPTED, 0), Token(" and", CORRECTION, 0), Token(" on", BONUS, 1)]
VOID = ("meta", "circle", "path")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(EMBEDDED / "tokenizer.model")


@pytest.fixture(scope="module")
def decoded(toy_session):
    tokens = session.encode(toy_session, "law <b>& draft")
    return session.decode(toy_session, toy_session.method, tokens, jax.random.key(0))


@pytest.fixture(scope="module")
def toy_session(toy):
    models = (str(toy.folder / name) for name in ("target", "draft"))
    return session.open_session(get_method("otm", tree="2,1"), *models, "float32", 6, Policy())


def test_a_target_without_a_matching_draft_uses_the_baseline(toy, monkeypatch):
    """A method that needs a draft is refused. The embedded models have a default draft."""
    target = str(toy.folder / "target")
    monkeypatch.setitem(by_name.LOADERS, "mine", lambda name, dtype: by_name.load(target, dtype))
    for spec in (target, "mine:large"):
        opened = session.open_session(None, spec, None, "float32", 6, Policy())
        assert (opened.method.name, opened.draft, opened.draft_model) == ("baseline", None, None)
        with pytest.raises(UserError, match=f"'otm' needs a draft model .* '{spec}'; give --draft"):
            session.open_session(get_method("otm", tree="2,1"), spec, None, "float32", 6, Policy())
    for draft, name in ((None, "draft_2m"), ("6m", "draft_6m")):
        opened = session.open_session(None, "6m", draft, "float32", 6, Policy())
        found = opened.method.name, opened.method.tree.height, opened.draft.name
        assert found == ("block", 3, name)


def test_pieces_of_new_tokens_join_to_the_decoded_text(tokenizer):
    prompt, new = "The committee", tokenizer.encode("will meet in 日本 again")
    texts = list(session.added_texts(tokenizer, [1, *tokenizer.encode(prompt)], [*new, 2]))
    assert "".join(texts) == " will meet in 日本 again"  # EOS adds no text.
    # Each of the two characters has three bytes, and the first two add no text.
    assert texts[0] == " will" and texts[:-1].count("") == 4


def test_an_incomplete_last_character_shows_the_replacement_character(tokenizer):
    new = tokenizer.encode("日")[1:-1]
    for end in ([], [2]):
        assert "".join(session.added_texts(tokenizer, [1], [*new, *end])).endswith("\ufffd")


def test_terminal_output_colours_tokens_and_reports_speeds():
    decoded = Decoded("otm", TOKENS, [None, None])
    assert terminal.text("Once", TOKENS, colour=False) == "Once again and on"
    assert terminal.text("Once", TOKENS, colour=True) == (
        "Once\033[32m again\033[0m\033[4;31m and\033[0m\033[1;34m on\033[0m"
    )
    baseline = Decoded("baseline", TOKENS, [None] * 3)
    lines = terminal.speeds(Speed(30.0, 20.0, 1.46), baseline, decoded)
    assert lines == [
        "baseline: 3 tokens in 3 calls, 1.00 a call; 20 tokens/s",
        "otm: 3 tokens in 2 calls, 1.50 a call; 30 tokens/s, 1.46 x baseline",
    ]


def test_a_summary_has_the_medians_and_extremes_of_all_prompts():
    calls = [(2, 1), (3, 3), (7, 2)]
    decoded = [Decoded("block", TOKENS[:1] * tokens, [None] * number) for tokens, number in calls]
    speeds = [session.Speed(method, 100.0, method / 100) for method in (120.0, 90.0, 310.0)]
    assert terminal.summary(list(zip(decoded, speeds, strict=True))) == (
        "block, 3 prompts: 2.00 tokens a call; 120 tokens/s, 1.20 x baseline "
        "(medians; 0.90 x to 3.10 x)"
    )


def test_columns_wrap_at_their_visible_width():
    decoded = Decoded("otm", TOKENS, [])
    plain = terminal.columns("Once upon a time", decoded, decoded, 33, colour=False)
    lines = plain.splitlines()
    assert lines[0] == "otm" + " " * 15 + "otm"
    assert max(map(len, lines)) <= 33
    assert [line[:15].strip() for line in lines[2:]] == ["Once upon a", "time again and", "on"]
    coloured = terminal.columns("Once upon a time", decoded, decoded, 33, colour=True)
    assert re.sub(r"\033\[[0-9;]*m", "", coloured) == plain
    word = Decoded("otm", [Token("x" * 40, ACCEPTED, 0)], [])
    assert max(map(len, terminal.columns("", word, word, 33, colour=False).splitlines())) <= 33


def test_each_decoded_token_has_the_number_of_its_call(decoded):
    assert 0 < len(decoded.tokens) <= 6
    assert [token.call for token in decoded.tokens] == [
        index for index, call in enumerate(decoded.calls) for _ in call.emitted
    ]


@pytest.mark.parametrize("long", [False, True], ids=["short prompt", "long prompt"])
def test_a_longer_prompt_compiles_nothing(toy_session, count_compilations, monkeypatch, long):
    if long:  # Above `LONG` tokens, prompts are padded to a multiple of `LONG`, not of `BUCKET`.
        monkeypatch.setattr(sys.modules["spectr_jax.decoding.request"], "LONG", 12)
    for prompt in ("law " * 3, "law " * 4) if long else ("law", "law law"):
        with count_compilations() as compiled:
            tokens = session.encode(toy_session, prompt)
            again = session.decode(toy_session, toy_session.method, tokens, jax.random.key(1))
    assert again.tokens and not compiled


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.anchors, self.links, self.words = [], set(), set(), []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id")}
        self.links |= {attributes.get("href")}
        assert not {"src", "onload"} & attributes.keys()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_valid_html_and_shows_every_call(toy_session, decoded):
    shown = [
        Shown("law <b>& draft", decoded, None, Speed(30.0, 20.0, 1.5)),
        Shown("law", decoded, decoded, None),
    ]
    html = page(toy_session, "python -m spectr_jax.sample '--prompt=law <b>'", shown)
    checker = _Checker()
    checker.feed(html)
    assert not checker.open and "<b>" not in html and "http" not in html and "<script" not in html
    links = {link[1:] for link in checker.links if link}
    assert links and links <= checker.anchors
    assert html.count("<svg") == 2 * len(decoded.calls)
    size = toy_session.method.tree.size
    drawn = sum(size + 1 + len(call.emitted) - len(call.path) for call in decoded.calls)
    assert html.count("<circle") == 2 * drawn
    assert "".join(token.text for token in decoded.tokens) in "".join(checker.words)
    assert "prefers-color-scheme: dark" in html


def test_the_page_leaves_out_tree_nodes_without_drafts(toy):
    """Lookup may find no draft for a node. A call without any draft emits a token of the target."""
    target = str(toy.folder / "target")
    method = get_method("lookup", tree="2,1")
    opened = session.open_session(method, target, None, "float32", 12, Policy(0.0))
    tokens = session.encode(opened, "law law draft")
    made = session.decode(opened, opened.method, tokens, jax.random.key(0))
    html = page(opened, "", [Shown("law law draft", made, None, None)])
    drawn = [
        1 + int((call.tokens[1:] >= 0).sum()) + len(call.emitted) - len(call.path)
        for call in made.calls
    ]
    assert html.count("<circle") == sum(drawn) and NO_PIECE not in html
    for call in made.calls:
        assert (call.origins[-1] == TARGET) == (call.tokens[1:] < 0).all()


def test_the_page_keeps_leading_spaces_outside_token_links(toy_session):
    html = page(toy_session, "", [Shown("Once", Decoded("otm", TOKENS, []), None, None)])
    assert re.search(r"> <a [^>]*>again</a> <a [^>]*>and</a> <a [^>]*>on</a>", html)


def test_the_page_shows_log_probabilities_in_tooltips(toy_session):
    tokens = [token._replace(logprobs=(-0.25 * index, -1.5)) for index, token in enumerate(TOKENS)]
    html = page(toy_session, "", [Shown("Once", Decoded("otm", tokens, []), None, None)])
    assert html.count("; log-probability -") == len(TOKENS)
    assert "log-probability -0.250, of the model -1.500" in html


def test_the_page_shows_all_tooltips_in_tables_too(toy_session, decoded):
    """A phone has no pointer to show tooltips."""
    scored = [Token(" on", ACCEPTED, 0, (-0.25, -1.5)), Token("", BONUS, 0, (-0.5, -0.75))]
    html = page(toy_session, "", [Shown("", decoded._replace(tokens=scored), None, None)])
    row = r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>"
    assert re.findall(row, html) == [
        ("&#x27; on&#x27;", "accepted draft", "-0.250", "-1.500"),
        ("no text", "bonus token", "-0.500", "-0.750"),
    ]
    titles = re.findall(r"<title>([^<]*): ([^<:]*)</title><circle", html)
    cells = re.findall(r"<tr><td>(?:· )*([^<]*)</td><td>([^<]*)</td></tr>", html)
    drawn = [title for title in titles if title[1] != "the last token before the call"]
    assert sorted(cells) == sorted(drawn) and len(cells) >= 3 * len(decoded.calls)


def test_a_tree_on_the_page_shrinks_to_a_narrow_screen_or_scrolls(toy_session, decoded):
    html = page(toy_session, "", [Shown("law", decoded, None, None)])
    found = re.findall(
        r'<svg width="(\d+)" viewBox="0 0 (\d+) \d+" style="min-width: ([\d.]+)px"', html
    )
    assert len(found) == len(decoded.calls)
    assert all(width == box and float(least) < int(width) for width, box, least in found)
    assert "svg { display: block; max-width: 100%; height: auto;" in html


def test_the_legend_names_drafts_that_repeat_an_accepted_one(toy_session, decoded):
    call = decoded.calls[0]._replace(path=(1,), live=(1,))
    for live, named in (((1,), False), ((1, 2), True)):
        one = decoded._replace(calls=[call._replace(live=live)])
        html = page(toy_session, "", [Shown("law", one, None, None)])
        assert ("drafts that repeat it" in html) == named


def test_prompts_of_a_file_are_all_checked_before_decoding(toy_session):
    given = ["law", "law " * 30]
    message = r"of \d+ tokens, max_new_tokens=6: \d+ tokens exceed the context 32 of 'target'"
    with pytest.raises(UserError, match=message):
        session.encode_all(toy_session, given)


def test_an_overlong_prompt_of_stdin_is_reported_and_skipped(toy_session, capsys):
    given = iter(["law", "law " * 30, "draft"])
    expected = [(prompt, session.encode(toy_session, prompt)) for prompt in ("law", "draft")]
    assert list(session.encode_all(toy_session, given)) == expected
    assert re.match(r"^skipped: the prompt 'law .* of \d+ tokens, max", capsys.readouterr().err)


def stdin_of(content, errors="strict"):
    return io.TextIOWrapper(io.BytesIO(content), "utf-8", errors=errors)


def test_blank_lines_in_files_and_stdin_are_skipped(tmp_path):
    content = b"law 3\n\n \t\n draft\n"
    (tmp_path / "prompts.txt").write_bytes(content)
    assert prompts.from_file(str(tmp_path / "prompts.txt")) == {1: "law 3", 4: " draft"}
    assert list(prompts.from_stdin(stdin_of(content))) == ["law 3", " draft"]
    with pytest.raises(UserError, match="no prompt on stdin"):
        list(prompts.from_stdin(stdin_of(b"\n\n")))


def test_unreadable_prompts_are_refused(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"la\xff\n")
    with pytest.raises(UserError, match=r"prompts.txt: cannot be read \('utf-8'"):
        prompts.from_file(str(tmp_path / "prompts.txt"))
    with pytest.raises(UserError, match="'~nobody-here/x' cannot expand"):
        prompts.from_file("~nobody-here/x")
    for errors in ("strict", "surrogateescape"):  # In the C locale, stdin uses surrogateescape.
        with pytest.raises(UserError, match=r"stdin cannot be read \('utf-8'"):
            list(prompts.from_stdin(stdin_of(b"la\xff\n", errors)))
    with pytest.raises(UserError, match=r"--prompt='la\\udcff': is not UTF-8"):
        prompts.from_flags(["law", os.fsdecode(b"la\xff")])
    with pytest.raises(UserError, match="no prompt on stdin"):
        prompts.from_stdin(None)  # Raises before the first prompt is read.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--html is empty; name a file"),
        ("/tmp", "--html=/tmp: is a folder; name a file in it"),
        ("/nowhere/page.html", "--html=/nowhere/page.html: is in a folder that does not exist"),
        # Even root cannot write to /proc.
        ("/proc/page.html", "--html=/proc/page.html: cannot be written"),
        ("/dev/null", "--html=/dev/null: is not a file; choose another"),
        ("~nobody-here/page.html", "'~nobody-here/page.html' cannot expand"),
        ("x" * 250, "x: cannot be written .* File name too long"),
    ],
)
def test_unwritable_page_paths_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        checked_path("html", name)


def test_checking_a_page_path_leaves_the_folder_unchanged(tmp_path):
    (tmp_path / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        assert checked_path("html", str(tmp_path / name)) == tmp_path / name
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_a_closed_stdout_gets_no_colour(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert not terminal.wants_colour()


@pytest.mark.slow
def test_sample_compares_every_prompt_and_writes_a_page(toy, tmp_path):
    """Two prompts come from a file. The output has no colours, because it is not a terminal."""
    (tmp_path / "prompts.txt").write_text("law 3\n\ndraft <token> é\n")
    flags = {"file": tmp_path / "prompts.txt", "html": tmp_path / "page.html"}
    # The default draft has another vocabulary than the target, so the baseline decodes it.
    models = {"target": toy.folder / "target", "max_new_tokens": 4}
    command = [sys.executable, "-m", "spectr_jax.sample", "--compare"]
    command += [f"--{name}={value}" for name, value in {**flags, **models}.items()]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    environment = {**os.environ, **ascii_only}  # An ASCII stdout cannot encode é.
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0 and "\033[" not in ended.stdout, ended.stderr
    told = f"no --draft is given for '{toy.folder}/target': the baseline decodes it\n"
    assert ended.stderr == told
    refused = subprocess.run(
        [*command, "--draft_temperature=0.5"], capture_output=True, text=True, env=environment
    )
    assert refused.returncode == 2 and "no draft model is used" in refused.stderr
    line = r"^(\w+): \d+ tokens? in \d calls?, .* a call; [\d,]+ tokens/s"
    assert re.findall(line, ended.stdout, re.M) == ["baseline"] * 4
    html = (tmp_path / "page.html").read_text()
    assert html.count("<article>") == 2
    assert "draft &lt;token&gt; é" in html and "draft <token> ?" in ended.stdout
