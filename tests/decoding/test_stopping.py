"""Stop sequences end generations, cut strings, and never appear in the text that is shown."""

import types

import jax
import numpy as np
import pytest
import tokenizers

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.decoding import Policy, decode, get_method, stream
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.stopping import (
    MATCHED,
    _transitions,
    before,
    dropped_space,
    prepared,
    settled,
)
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.sampling import chat
from spectr_jax.sampling.session import Session
from spectr_jax.utils.errors import UserError

VOCAB, NEW = 7, 24
TARGET, DRAFT = (TableModel(random_table(seed, VOCAB)) for seed in (0, 1))
PIECES = [b"", b"a", b"b", b"\n", b"b\n", b"\na", "é".encode()]


class Letters(HuggingFaceTokenizer):
    """A tokenizer of a few pieces, some of which extend past the end of a stop string."""

    bos, eos = 0, 0
    pieces = PIECES

    def __init__(self):
        pass

    def decode(self, tokens):
        return b"".join(PIECES[token] for token in tokens if token >= 0).decode(errors="replace")

    def piece(self, token):
        return PIECES[token].decode()


LETTERS = Letters()


def _until(tokens, ends):
    """Returns the shortest prefix of `tokens` for which `ends` is true, or all tokens."""
    for count in range(1, len(tokens) + 1):
        if ends(tokens[:count]):
            return tokens[:count]
    return tokens


@pytest.mark.parametrize("name", ["otm_block", "baseline"])
def test_a_sequence_ends_with_its_first_stop_sequence(name):
    """The output is the same sequence as without `stop`, cut after its first match. Checks stop
    strings, stop tokens and a stream."""
    options = {"tree": "2,2"} if name == "otm_block" else {}
    arguments = get_method(name, **options), Trained("letters", TARGET, LETTERS), DRAFT
    keys = jax.random.split(jax.random.key(0), 40)
    prompts, lengths = np.full((40, 2), 3), np.full(40, 2)
    whole = np.asarray(generate(keys, *arguments, prompts, lengths, NEW).tokens)
    whole = whole[:, 2 : 2 + NEW].tolist()
    stops = ("\n\n", "ab\na"), [[3, 3], [1, 2, 5]], "é"
    for stop in stops:

        def ends(tokens, stop=stop):
            if isinstance(stop[0], list):
                return any(tokens[-len(each) :] == each for each in stop)
            return before(LETTERS.decode(tokens), stop) != LETTERS.decode(tokens)

        out = generate(keys, *arguments, prompts, lengths, NEW, stop=stop)
        ended = 0
        for row, tokens in enumerate(whole):
            expected = _until(tokens, ends)
            assert np.asarray(out.tokens)[row, 2 : int(out.lengths[row])].tolist() == expected
            ended += len(expected) < NEW
        assert ended > 5
    if name != "baseline":  # The streams of other methods take long to compile.
        return
    key = jax.random.key(1)
    single = generate(key, *arguments, prompts[:1], lengths[:1], NEW, stop=stops[0])
    steps = stream(key, *arguments, prompts[0], NEW, stop=stops[0])
    streamed = [token for step in steps for token in step.tokens]
    assert streamed == np.asarray(single.tokens)[0, 2 : int(single.lengths[0])].tolist()


def test_stop_sequences_of_similar_lengths_share_a_program(count_compilations):
    arguments = jax.random.key(0), get_method("baseline"), TARGET, None, [[1]], [1], NEW
    generate(*arguments, stop=[[1, 2]])
    others = [prepared(stop, None, VOCAB) for stop in ([[3, 3], [1, 2, 5]], [[6]])]
    with count_compilations() as compiled:
        for stop in others:
            generate(*arguments, stop=stop)
    assert not compiled


def test_stop_sequences_prepared_inside_jit_work_outside():
    method, rows = get_method("baseline"), (np.array([[1, 2]]), np.array([2]), 9)

    @jax.jit
    def decoded(key, model):
        return decode(key, method, model, None, *rows, stop=prepared([[5, 3]], None, VOCAB))

    inside = decoded(jax.random.key(0), freeze(TARGET))
    outside = generate(jax.random.key(0), method, TARGET, None, *rows, stop=[[5, 3]])
    # `decode` does not pad prompts to a bucket.
    np.testing.assert_array_equal(inside.tokens, outside.tokens[:, :11])


def test_the_stop_automaton_finds_the_first_of_random_patterns():
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 6, rng.integers(1, 4))
        patterns = tuple(tuple(rng.integers(0, 2, length).tolist()) for length in lengths)
        table, word, state = _transitions(patterns, 2), rng.integers(0, 2, 12).tolist(), 0
        seen = False
        for count, symbol in enumerate(word, start=1):
            state = table[state, symbol]
            seen |= any(tuple(word[:count][-len(each) :]) == each for each in patterns)
            assert (state == MATCHED) == seen


def test_overlapping_stop_strings_are_found():
    """After a mismatch the automaton continues from the longest prefix that it has read. After a
    match it stays in its state."""
    stop = prepared(("aab", "abc", "x"), _Bytes(), 256)
    for text in ("aaab", "aabc", "abab", "ab", "cabc", "aac", "ax", "abcdef"):
        tokens = np.array([list(text.encode())], np.int32)
        states = np.asarray(stop.follow(np.zeros(1, np.int32), tokens))
        prefixes = [text[:count] for count in range(1, len(text) + 1)]
        expected = [before(prefix, ("aab", "abc", "x")) != prefix for prefix in prefixes]
        assert (states[0] == MATCHED).tolist() == expected


def test_strings_are_cut_at_the_first_match_to_be_completed_whatever_the_tokens():
    """Of the matches that end with the same character, the longest counts. The device stops at the
    token that completes the match, and what follows changes nothing."""
    assert before("xabcd", ("abcd", "bc")) == "xa" and before("xabc", ("bc", "abc")) == "x"
    rng = np.random.default_rng(0)
    matched = 0
    for _ in range(100):
        letters = [rng.choice(list("abc"), rng.integers(1, 5)) for _ in range(9)]
        pieces, strings = (["".join(each) for each in part] for part in (letters[:6], letters[6:]))
        stop = prepared(strings, types.SimpleNamespace(pieces=[p.encode() for p in pieces]), 6)
        tokens = rng.integers(0, 6, (1, 8))
        states = np.asarray(stop.follow(np.zeros(1, np.int32), tokens.astype(np.int32)))[0]
        text = "".join(pieces[token] for token in tokens[0])
        ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in strings)]
        if not ends:
            assert MATCHED not in states and before(text, strings) == text
            continue
        longest = max((s for s in strings if text[: ends[0]].endswith(s)), key=len)
        expected = text[: ends[0] - len(longest)]
        count = states.tolist().index(MATCHED) + 1
        read = "".join(pieces[token] for token in tokens[0, :count])
        assert len(read) >= ends[0] > len(read) - len(pieces[tokens[0, count - 1]])
        assert before(text, strings) == before(read, strings) == expected
        matched += 1
    assert matched > 50


def test_a_stop_string_that_names_a_control_token_is_that_token():
    made = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|endoftext|>", "<|im_end|>"]
    made.train_from_iterator(["a b"], vocab_size=300, special_tokens=controls, show_progress=False)
    tokenizer = HuggingFaceTokenizer(made._tokenizer, 0, 0)
    stop = prepared(("<|im_end|>", "ab"), tokenizer, tokenizer.vocab_size)
    others = [*tokenizer.encode("a <|im_en"), 0]
    tokens = np.array([[*others, 1, *others]], np.int32)
    states = np.asarray(stop.follow(np.zeros(1, np.int32), tokens))[0]
    assert states.tolist().index(MATCHED) == len(others)
    spelled = [token for name in "<|im_end|>" for token in tokenizer.encode(name)]
    states = np.asarray(stop.follow(np.zeros(1, np.int32), np.array([spelled], np.int32)))[0]
    assert states[-1] == MATCHED and MATCHED not in states[:-1]


def test_a_stop_string_can_begin_with_the_space_that_decoding_drops(toy):
    tokenizer = load(toy.folder / "target", "float32").tokenizer
    tokens, stop = tokenizer.encode("draft target"), " draft"
    text = tokenizer.decode(tokens)
    assert text == "draft target"
    space = dropped_space(tokenizer, tokens, text, stop)
    assert space == " " and before(space + text, stop) == "" and settled(" dra", stop) == 0
    assert dropped_space(tokenizer, tokens, text, None) == ""
    assert dropped_space(tokenizer, tokens, " " + text, stop) == ""


class _Bytes:
    pieces = [bytes([byte]) for byte in range(256)]


def test_tokenizer_pieces_spell_the_text(toy, in_hugging_face):
    """Checks SentencePiece, the same model in Hugging Face's format, and byte-level BPE. WordPiece
    is refused, because its pieces do not spell the text."""
    text = "draft target\n\ntoken é 日本 law  two"
    ours = load(toy.folder / "target", "float32").tokenizer
    made = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "</s>"]
    made.train_from_iterator([text], vocab_size=300, special_tokens=special, show_progress=False)
    saved = HuggingFaceTokenizer(in_hugging_face(ours), 1, 2)
    for tokenizer in (ours, saved, HuggingFaceTokenizer(made._tokenizer, 0, 1)):
        tokens = tokenizer.prompt(text)
        spelled = b"".join(tokenizer.pieces[token] for token in tokens).decode()
        assert spelled.lstrip() == tokenizer.decode(tokens)
    wordpiece = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    wordpiece.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UserError, match="does not say what its tokens spell"):
        prepared("b", HuggingFaceTokenizer(wordpiece, 0, 1), 2)


@pytest.mark.parametrize(
    "stop", ["", ["a", ""], ["a", [1]], [[]], [[7]], [[-1]], [1, 2], 3, [[1.5]], b"a"], ids=repr
)
def test_invalid_stop_values_are_refused(stop):
    with pytest.raises(UserError, match=r"stop=.*: must be strings, or sequences of tokens 0\.\.6"):
        prepared(stop, LETTERS, VOCAB)


def test_stop_strings_need_a_tokenizer_and_a_limited_length():
    with pytest.raises(UserError, match="strings need a tokenizer"):
        generate(jax.random.key(0), get_method("baseline"), TARGET, None, [[1]], [1], 4, stop="a")
    with pytest.raises(UserError, match="has 2,000 bytes or tokens"):
        prepared("a" * 2000, LETTERS, VOCAB)
    with pytest.raises(UserError, match="has 1,200 bytes or tokens"):
        prepared("é" * 600, LETTERS, VOCAB)
    assert prepared((), None, VOCAB) is None


def test_before_cuts_and_settled_holds_back_stop_strings():
    assert before("one\n\ntwo###", ("###", "\n\n")) == "one"
    assert before("one", ()) == before("one", None) == "one"
    shown = [settled(text, ("\n\n", "###")) for text in ("ab", "ab\n", "ab\n\nc", "ab##", "")]
    assert shown == [2, 2, 2, 2, 0]


def test_a_chat_does_not_show_the_stop_string():
    models = freeze(TARGET), freeze(DRAFT)
    method, trained = get_method("speculative", draft_length=2), Trained("letters", TARGET, LETTERS)
    open_ended = Session(method, trained, trained, *models, NEW, Policy(), None)
    for seed in range(4):
        answers, shown = [], []
        for stop in ((), ("\n\n", "ab")):
            shown.append([])
            session = open_ended._replace(stop=stop)
            answers.append(chat.answer(session, [3, 3], jax.random.key(seed), shown[-1].append))
        assert answers[1].text == before(answers[0].text, ("\n\n", "ab"))
        assert "".join(token.text for token in shown[1]) == answers[1].text
        assert answers[1].whole == (answers[1].text != answers[0].text)


class Spaced(Letters):
    """Drops the space before a text, as SentencePiece does, and has a silent token besides EOS."""

    eos = ()
    pieces = [b"", b" a", b" b", b"c", b"d", b"e", b"f"]
    tokens = ["<end>", " a", " b", "c", "d", "e", "f"]

    def decode(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode().removeprefix(" ")

    def piece(self, token):
        return self.tokens[token]


def test_a_chat_stops_at_a_dropped_space_and_at_a_control_token():
    trained, new = Trained("spaced", TARGET, Spaced()), 6
    arguments = get_method("baseline"), trained, None, freeze(TARGET), None, new, Policy(), None
    first, last = 0, 0
    for seed in range(60):
        key = jax.random.key(seed)
        out = generate(key, get_method("baseline"), TARGET, None, [[3, 3]], [2], new)
        tokens = np.asarray(out.tokens)[0, 2 : 2 + new].tolist()
        for stop, end in ((" a", 1), ("<end>", 0)):
            shown: list = []
            answer = chat.answer(Session(*arguments, stop=(stop,)), [3, 3], key, shown.append)
            count = tokens.index(end) if end in tokens else new
            text = trained.tokenizer.decode(tokens[:count])
            assert answer.text == "".join(token.text for token in shown) == text
            assert answer.whole == (end in tokens)
            first += tokens[0] == end == 1
            last += count == new - 1 and end == 0
    assert first and last
