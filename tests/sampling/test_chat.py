"""Tests conversations: what is shown and counted, and which are refused."""

import re

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.frozen import freeze
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.sampling import chat, terminal
from spectr_jax.sampling.session import Session, encode_all
from spectr_jax.utils.errors import UserError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "Why 日本?"}]
NEW = 12


@pytest.fixture(scope="module")
def session():
    made = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        ["Why 日本 and why not"], vocab_size=270, special_tokens=controls, show_progress=False
    )
    tokenizer = HuggingFaceTokenizer(made._tokenizer, 1, (2, 0), adds_bos=False, template=TEMPLATE)
    sizes = {"width": 16, "mlp": 32, "heads": 2, "kv_heads": 1, "head_width": 8, "context": 64}
    shape = LlamaConfig(layers=1, vocab_size=tokenizer.vocab_size, **sizes)
    models = [Llama(shape, rngs=nnx.Rngs(seed)) for seed in range(2)]
    target, draft = (
        Trained(name, model, tokenizer)
        for name, model in zip(("target", "draft"), models, strict=True)
    )
    policy, frozen = Policy(eos=tokenizer.eos), map(freeze, models)
    return Session(
        get_method("speculative", draft_length=2), target, draft, *frozen, NEW, policy, None
    )


def test_a_chat_answer_equals_the_output_of_generate(session):
    """The displayed pieces join to the text of the answer. The last line reports its counts."""
    tokenizer = session.target.tokenizer
    for seed in range(4):
        shown: list = []
        tokens = chat.encode_message(session, MESSAGES[0]["content"])
        made = chat.answer(session, tokens, jax.random.key(seed), shown.append)
        prompt = np.array([tokens])
        models, lengths = (session.target_model, session.draft_model), [prompt.shape[1]]
        whole = generate(
            jax.random.key(seed), session.method, *models, prompt, lengths, NEW, session.policy
        )
        new = whole.tokens[0, prompt.shape[1] : int(whole.lengths[0])].tolist()
        assert (made.tokens, made.calls) == (len(new), int(whole.target_calls[0]))
        assert made.text == tokenizer.decode(new)
        text = "".join(token.text for token in shown)
        assert text == made.text
        assert {token.origin for token in shown} <= {"accepted", "correction", "bonus"}
        assert [token.call for token in shown] == sorted(token.call for token in shown)
        assert made.whole == tokenizer.ends(new[-1])
        line = terminal.answered("speculative", made)
        counts = f"{len(new)} tokens in {made.calls} calls, {len(new) / made.calls:.2f} a call"
        assert line.startswith(f"speculative: {counts}; ")
        assert line.endswith("cut off by --max_new_tokens") != made.whole


def test_missing_chat_templates_and_overlong_messages_are_refused(session):
    chat.check(session)
    bare = HuggingFaceTokenizer(session.target.tokenizer._tokenizer, 1, 2)
    with pytest.raises(UserError, match=r"--chat .* 'target' has none"):
        chat.check(session._replace(target=session.target._replace(tokenizer=bare)))
    with pytest.raises(
        UserError, match=r"the prompt 'why why .* exceed the context 64 of 'target'"
    ):
        chat.encode_message(session, "why " * 40)


def test_an_overlong_message_of_stdin_is_reported_and_skipped(session, capsys):
    """The conversation continues without it: the next answer is as if it had not been given."""
    long = "why " * 40

    def run(*given):
        return [made.text for made in chat.answers(session, iter(given), jax.random.key(0), len)]

    assert len(run(long, "Why?", long, "Why not?")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("skipped: the prompt 'why why") for line in lines) == 2
    assert run(long, "Why?", long, "Why not?") == run("Why?", "Why not?")
    found = list(encode_all(session, iter([long, "Why?"]), chat.encode_message))
    assert found == [("Why?", chat.encode_message(session, "Why?"))]


@pytest.mark.parametrize(("new", "removed"), [(1, 1), (NEW, 2)])
def test_the_oldest_turns_of_an_overlong_conversation_are_left_out(session, capsys, new, removed):
    session, chat_tokens = session._replace(max_new_tokens=new), session.target.tokenizer.chat
    roles, asked = ("user", "assistant"), {"role": "user", "content": "z"}
    given = [{"role": roles[index % 2], "content": "abcdef"[index]} for index in range(6)]
    expected, whole = [*given[2 * removed :], asked], len(chat_tokens([*given, asked]))
    messages = list(given)
    assert chat.encode_next(session, messages, "z") == chat_tokens(expected)
    assert messages == expected
    line = (
        rf"^the conversation has {whole} tokens, .* more than the 64 .* oldest {removed} of its 3"
    )
    assert re.match(line, capsys.readouterr().err)
    messages += [{"role": "assistant", "content": "y"}]
    expected = list(messages)
    with pytest.raises(UserError, match="the prompt 'why why"):
        chat.encode_next(session, messages, "why " * 40)
    assert messages == expected and not capsys.readouterr().err


@pytest.mark.parametrize("alone", [True, False], ids=["list of prompts", "prompts of stdin"])
def test_each_message_is_encoded_once_with_its_history(session, monkeypatch, alone):
    """Each prompt of a list starts a conversation of its own. Prompts of stdin continue one."""
    said = {"role": "assistant", "content": "So."}
    turns = [{"role": "user", "content": text} for text in ("Why?", "Why not?")]
    conversations = [turns[:1], turns[1:]] if alone else [turns[:1], [turns[0], said, turns[1]]]
    encoded, answered = [], []
    make = session.target.tokenizer.chat
    monkeypatch.setattr(
        session.target.tokenizer,
        "chat",
        lambda messages: encoded.append(list(messages)) or make(messages),
    )
    made = chat.Answer(said["content"], 1, 1, 0.0, 0.0, True)
    monkeypatch.setattr(
        chat, "answer", lambda session, prompt, key, show: answered.append(prompt) or made
    )
    prompts = [turn["content"] for turn in turns]
    given = prompts if alone else iter(prompts)
    assert list(chat.answers(session, given, jax.random.key(0), print)) == [made, made]
    assert encoded == conversations and answered == [make(messages) for messages in conversations]


def test_encode_all_frames_messages_with_the_chat_template(session):
    """`sample --chat --compare` encodes its prompts this way."""
    (found,) = encode_all(session, ["Why 日本?"], chat.encode_message)
    assert found == ("Why 日本?", session.target.tokenizer.chat(MESSAGES))
    with pytest.raises(UserError, match=r"the prompt 'why why"):
        # This is raised before the first message is answered.
        encode_all(session, ["Why?", "why " * 40], chat.encode_message)
