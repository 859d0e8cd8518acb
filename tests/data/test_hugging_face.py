"""Tests tokenizers in Hugging Face's files, and chat templates."""

import json
import random
import re

import numpy as np
import pytest
import tokenizers
import transformers

from spectr_jax.data.hugging_face import (
    HuggingFaceTokenizer,
    controls,
    first_added,
    puts_bos,
    read_names,
    read_template,
    read_tokenizer,
)
from spectr_jax.data.tokenizer import BOS, EOS, Tokenizer
from spectr_jax.models.formats.published import EMBEDDED
from spectr_jax.utils.errors import UserError

SENTENCES = [f"Sentence {number} of many, again and again." for number in range(200)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def ours():
    return Tokenizer(EMBEDDED / "tokenizer.model")


@pytest.fixture(scope="module")
def theirs(ours, in_hugging_face):
    return HuggingFaceTokenizer(in_hugging_face(ours), BOS, EOS)


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory):
    """Returns a folder with a GPT-2 tokenizer as tokenizer.json in `new`, and as vocab.json and
    merges.txt in `old`."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(SENTENCES, vocab_size=290, special_tokens=[END])
    folder = tmp_path_factory.mktemp("byte_pairs")
    for form in ("new", "old"):
        (folder / form).mkdir()
    made.save(str(folder / "new" / "tokenizer.json"))
    made.save_model(str(folder / "old"))
    return folder


def _texts():
    rng = random.Random(0)
    letters = [*map(chr, range(32, 127)), *" " * 30, *"éßł½–“”…\u00a0\u3000日本語😀\t"]
    drawn = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(500)]
    return [
        *(EMBEDDED / "prompts.txt").read_text().splitlines()[:100],
        *drawn,
        "",
        " ",
        "  two   spaces  ",
    ]


def test_our_tokenizer_gives_the_same_tokens_in_hugging_face(ours, theirs, tmp_path):
    """`AutoTokenizer` reads what `save` writes."""
    theirs.save(tmp_path, context=128)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (auto.bos_token_id, auto.eos_token_id) == (BOS, EOS)
    for text in _texts():
        tokens = ours.encode(text)
        assert theirs.encode(text) == tokens, text
        assert theirs.decode([BOS, *tokens, EOS]) == ours.decode(tokens), text
    for text in _texts()[:50]:
        assert auto.encode(text) == ours.prompt(text), text


def test_vocabulary_digests_do_not_depend_on_the_file_format(ours, theirs, byte_pairs):
    assert theirs.vocabulary == ours.vocabulary
    new, old = (
        HuggingFaceTokenizer(read_tokenizer(byte_pairs / form), 0, 0) for form in ("new", "old")
    )
    assert new.vocabulary == old.vocabulary != ours.vocabulary
    assert new.vocab_size == old.vocab_size > 256


def test_byte_pair_tokens_decode_to_the_same_string(byte_pairs):
    for form in ("new", "old"):
        tokenizer = HuggingFaceTokenizer(read_tokenizer(byte_pairs / form), 0, 0)
        for text in ("Sentence 7 of many", " again", "日本 😀", ""):
            assert tokenizer.decode([0, *tokenizer.encode(text), 0]) == text
        pieces = [tokenizer.piece(token) for token in tokenizer.encode("Sentence 7 again")]
        assert "".join(pieces) == "Sentence 7 again" and " again" in pieces
        assert tokenizer.piece(0) == END


def test_pieces_are_spelled_as_in_the_text(ours, theirs):
    tokens = ours.encode("The committee will meet \\ again")
    for tokenizer in (ours, theirs):
        assert "".join(map(tokenizer.piece, tokens)) == " The committee will meet \\ again"
        assert tokenizer.piece(EOS) == "</s>"
        assert [tokenizer.piece(token) for token in tokenizer.encode("日")] == [
            " ",
            "<0xE6>",
            "<0x97>",
            "<0xA5>",
        ]


def test_prompts_decode_to_their_strings(ours, byte_pairs):
    """BOS begins each prompt and pads the shorter ones. Tokens after a length are ignored."""
    for tokenizer in (ours, HuggingFaceTokenizer(read_tokenizer(byte_pairs / "new"), 0, 5)):
        texts = ["Sentence 7 of many", "again", ""]
        tokens, lengths = tokenizer.prompts(texts)
        assert tokens.dtype == lengths.dtype == np.int32 and tokens.shape == (3, max(lengths))
        for row, length, text in zip(tokens.tolist(), lengths, texts, strict=True):
            assert row[:length] == [tokenizer.bos, *tokenizer.encode(text)]
            assert set(row[length:]) <= {tokenizer.bos}
        assert tokenizer.texts(tokens, lengths) == texts
        assert (
            tokenizer.texts(
                np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 8), lengths
            )
            == texts
        )
        alone, one = tokenizer.prompts(texts[0])
        assert alone.tolist() == [tokens[0, : lengths[0]].tolist()] and one.tolist() == [lengths[0]]
        with pytest.raises(UserError, match="no prompts; give at least one string"):
            tokenizer.prompts([])


def test_folders_without_a_readable_tokenizer_are_refused(byte_pairs, tmp_path):
    with pytest.raises(
        UserError, match=r"has no tokenizer to be read \(no tokenizer\.json, and not both of vocab"
    ):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer to be read"):
        read_tokenizer(tmp_path)


def _special(tokens=("<|end|>", "<|user|>", "<|stop|>")):
    """Returns a byte-pair tokenizer with control tokens of ids 0, 1, 2."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(SENTENCES, vocab_size=290, special_tokens=list(tokens))
    return tokenizers.Tokenizer.from_str(made.to_str())


def test_chats_render_as_in_transformers(tmp_path):
    """The template has conditions, a system message, BOS, and the beginning of the answer."""
    template = (
        "{{ bos_token }}{% for message in messages %}\n    "
        "{% if loop.first and message.role != 'system' %}<|user|>system"
        "{% endif %}{{ '<|user|>' + message['role'] + '\\n' + message['content'] | trim + '<|stop|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant{% endif %}"
    )
    special = _special()
    ours = HuggingFaceTokenizer(special, 0, (2, 0), template=template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=special, bos_token="<|end|>", eos_token="<|stop|>"
    )
    theirs.chat_template = template
    for messages in (
        [{"role": "user", "content": " Sentence 7? "}],
        [{"role": "system", "content": "Many"}, {"role": "user", "content": "again"}],
    ):
        tokens = ours.chat(messages)
        assert tokens == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert tokens[0] == 0 and 1 in tokens and 2 in tokens
    refusing = HuggingFaceTokenizer(
        special, 0, 2, template="{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(
        UserError, match=r"chat template refuses these messages \(roles must alternate\)"
    ):
        refusing.chat([{"role": "user", "content": ""}])
    with pytest.raises(UserError, match="the model has no chat template"):
        HuggingFaceTokenizer(special, 0, 2).chat([])


def test_templates_see_the_token_names_of_their_settings(tmp_path):
    """`eos_token` is the name in tokenizer_config.json, even if several tokens end a sequence.
    `bos_token` is undefined if it is null there."""
    names = {
        "bos_token": {"content": "<|user|>", "lstrip": False},
        "eos_token": "<|stop|>",
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    assert (
        read_names(tmp_path) == {"bos_token": "<|user|>", "eos_token": "<|stop|>"}
        and read_names(tmp_path / "none") == {}
    )
    messages = [{"role": "user", "content": "hi"}]
    special, template = _special(), "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert special.token_to_id("<|stop|>") == 2
    for given, ends in ((read_names(tmp_path), (1, 2)), (None, (0, 0))):
        tokens = HuggingFaceTokenizer(special, 0, (0, 2), template=template, names=given).chat(
            messages
        )
        assert (tokens[0], tokens[-1]) == ends
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    without = HuggingFaceTokenizer(
        special, 0, (0, 2), template=template, names=read_names(tmp_path)
    )
    assert without.chat(messages) == [*without.encode("hi"), 0]


def test_tokens_declared_outside_tokenizer_json_are_added(tmp_path):
    """As in transformers, tokens of other files are added. They must get the ids given there."""
    special = _special()
    special.save(str(tmp_path / "tokenizer.json"))
    size = special.get_vocab_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": size}))
    declared = {
        str(size + 1): {"content": "<|im_end|>", "special": True},
        "1": {"content": "<|user|>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    read = read_tokenizer(tmp_path)
    assert read.encode("<|new|>again<|im_end|>").ids == [
        size,
        *special.encode("again").ids,
        size + 1,
    ]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": size + 5}))
    with pytest.raises(
        UserError,
        match=r"has no tokenizer to be read \(token '<\|.*\|>' is \d+ in the files next to tokenizer",
    ):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "adds"),
    [
        ({}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}, True),
    ],
)
def test_only_llama_tokenizers_follow_add_bos_token(settings, adds, tmp_path):
    """As in transformers, tokenizers of other classes decide by themselves whether they add BOS."""
    special = _special()
    special.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert puts_bos(tmp_path, special, 1) == adds and first_added(special) == 1
    assert puts_bos(tmp_path, _special(), 1) == (
        settings.get("tokenizer_class") == "LlamaTokenizerFast"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% if tools is not none %}many{% endif %}{% if documents is not none %}many{% endif %}{{ messages[0].content }}",
        "{{ messages | tojson(indent=2, separators=(',', ':'), sort_keys=True) }}{{ messages | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(true, 2) }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_template_functions_and_tags_render_as_in_transformers(template):
    special = _special()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=special)
    theirs.chat_template = template
    messages = [{"role": "user", "content": "again <日>"}, {"role": "assistant", "content": "many"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert HuggingFaceTokenizer(special, 0, 2, template=template).chat(messages) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' + 3 }}", "refuses these messages (can only concatenate str"),
        ("{{ range(10**9) | list }}", "refuses these messages (Range too big"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages (access to attribute '__class__'"),
        ("{{ messages[3].content }}", "refuses these messages (list object has no element 3)"),
        (
            "{% if %}",
            "cannot be read (Expected an expression, got 'end of statement block'); decode "
            "without chat",
        ),
    ],
)
def test_failing_chat_templates_are_refused_with_their_error(template, message):
    with pytest.raises(UserError, match=re.escape(message)):
        HuggingFaceTokenizer(_special(), 0, 2, template=template).chat(
            [{"role": "user", "content": "again"}]
        )


@pytest.mark.parametrize(
    "messages",
    ["", "Why?", ["Why?"], {"role": "user", "content": "Why?"}, [{"content": "Why?"}], None, 5],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(
        UserError,
        match=r"^messages are .*; give a list, such as \[\{'role': 'user', 'content': 'Why\?'\}\]$",
    ):
        HuggingFaceTokenizer(_special(), 0, 2, template="{{ messages }}").chat(messages)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"role": "user", "content": None}, r"messages\[1\]\['content'\]=None: must be a string"),
        ({"role": "user"}, r"messages\[1\]\['content'\]=None: must be a string"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            r"\['content'\]=\[\{'type': 'text'\}\]: must",
        ),
        ({"role": "user", "content": b"Why?"}, r"\['content'\]=b'Why\?': must be a string"),
        ({"role": None, "content": "Why?"}, r"messages\[1\]\['role'\]=None: must be a string"),
    ],
)
def test_messages_of_anything_but_strings_are_refused_with_their_index(wrong, message):
    tokenizer = HuggingFaceTokenizer(_special(), 0, 2, template="{{ messages[1].content }}")
    with pytest.raises(UserError, match=message):
        tokenizer.chat([{"role": "user", "content": "Why?"}, wrong])


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    special, text = _special(), "Sentence 7 of many, again and again."
    whole = special.encode(text).ids
    special.enable_truncation(4)
    special.enable_padding(length=99)
    special.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).encode(text).ids == whole


def test_vocab_and_merges_files_load_only_for_gpt2(byte_pairs, tmp_path):
    """These files do not say how text is split before byte pairing, and other models split it
    differently."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((byte_pairs / "old" / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert read_tokenizer(tmp_path).get_vocab_size() > 256
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match=r"no tokenizer\.json, .*qwen2"):
        read_tokenizer(tmp_path)


def test_saved_tokenizers_remember_whether_bos_is_added(tmp_path):
    """GGUF metadata state whether BOS is added; tokenizer.json needs a post-processor for it."""
    for adds in (True, False):
        tokenizer = HuggingFaceTokenizer(_special(), 1, 2, adds_bos=adds)
        tokenizer.save(tmp_path, 64)
        read = read_tokenizer(tmp_path)
        assert (first_added(read) == 1) == adds
        assert read.encode("again", add_special_tokens=True).ids == tokenizer.prompt("again")


def test_chat_templates_are_read_from_either_file(tmp_path):
    assert read_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    for given, found in (
        ({"chat_template": "one"}, "one"),
        (
            {
                "chat_template": [
                    {"name": "tool", "template": "no"},
                    {"name": "default", "template": "two"},
                ]
            },
            "two",
        ),
        ({"chat_template": ["one"]}, None),
        ({}, None),
    ):
        settings.write_text(json.dumps(given))
        assert read_template(tmp_path) == found
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_template(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja' cannot be read"):
        read_template(tmp_path)


def test_several_eos_tokens_and_prompts_without_bos_work():
    special = _special()
    tokenizer = HuggingFaceTokenizer(special, 1, (2, 0), adds_bos=False)
    words = tokenizer.encode("Sentence 7")
    assert tokenizer.prompt("Sentence 7") == words and tokenizer.prompt("") == [1]
    assert [tokenizer.ends(token) for token in (0, 1, 2)] == [True, False, True]
    assert (
        tokenizer.decode([1, *words, 0, 2, -1]) == "Sentence 7" and tokenizer.piece(2) == "<|stop|>"
    )
    assert tokenizer.piece(-1) == "<none>"
    tokens, lengths = tokenizer.prompts(["Sentence 7", ""])
    assert lengths.tolist() == [len(words), 1] and tokens[1, 0] == 1
    assert first_added(special) != 1
    special.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    assert first_added(special) == 1


def test_bos_and_eos_are_read_from_config_files(tmp_path):
    assert controls(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, 9) == (1, 2)
    assert controls(tmp_path, {"eos_token_id": 2}, 9) == (2, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null, "bos_token_id": null}')
    assert controls(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, 9) == (1, 2)
    assert controls(tmp_path, {"eos_token_id": 2}, 9, first=5) == (5, 2)
    for damaged in ("[]", '{"eos_token_id": [2, 0]'):
        (tmp_path / "generation_config.json").write_text(damaged)
        with pytest.raises(
            UserError, match=r"generation_config\.json' (is not a JSON object|cannot be read)"
        ):
            controls(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert controls(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, 9) == (1, (7, 8))
    with pytest.raises(
        UserError, match=r"has eos_token_id=\[7, 8\]: must be a token of its vocabulary"
    ):
        controls(tmp_path, {"bos_token_id": 1}, 8)
    with pytest.raises(UserError, match="has bos_token_id=True: must be a token"):
        controls(tmp_path, {"bos_token_id": True}, 9)
