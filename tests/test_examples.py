"""Tests that the programs in examples/ run and do what they say."""

import dataclasses
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.utils.errors import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


def _module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_fewer_than_100_lines():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem for file in files] == [
        "gemma_model",
        "linen_model",
        "lm_eval_model",
        "own_model",
        "plan_alone",
        "policy_gradient",
        "train_draft",
    ]
    assert all(len(file.read_text().splitlines()) < 100 for file in files)


def test_plan_alone_measures_the_exact_acceptance_and_distribution():
    accepted, exact, error = _module("plan_alone").main("kseq")
    assert abs(accepted - exact) < 0.01 and error < 0.01


@pytest.mark.slow
def test_own_model_decodes_several_tokens_per_call():
    assert _module("own_model").main() > 1


@pytest.mark.slow
def test_linen_model_decodes_several_tokens_per_call():
    assert _module("linen_model").main() > 1


def test_gemma_model_decodes_several_tokens_per_call():
    """Its logits, which `main` checks in every kind of call, are those of the package's own call."""
    pytest.importorskip("kauldron", reason="needs: pip install gemma tensorflow-cpu")
    pytest.importorskip("gemma", reason="needs: pip install gemma tensorflow-cpu")
    example = _module("gemma_model")
    assert example.main() > 1
    model = example.model(0)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 1, 50)
    positions = np.broadcast_to(np.arange(16), tokens.shape)
    visible = np.broadcast_to(np.tri(16, dtype=bool), (2, 16, 16))
    logits, _ = model.extend(tokens, positions, visible)
    expected = example.DECODER.apply(model.params, tokens).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_prompt_padding_past_the_context_changes_no_tokens():
    """Flax embeds positions past the context as NaN, and an attention weight of 0 keeps the NaN."""
    target, draft = (
        _module("own_model").Attention(50, 32, context, seed=0) for context in (20, 14)
    )
    arguments = jax.random.key(0), get_method("speculative", draft_length=2), target, draft
    narrow = generate(*arguments, np.ones((2, 10), np.int32), [10, 3], 10)
    wide = generate(*arguments, np.ones((2, 64), np.int32), [10, 3], 10)
    np.testing.assert_array_equal(narrow.tokens[:, :20], wide.tokens[:, :20])
    assert np.all(np.asarray(wide.tokens)[0, :20] >= 0)
    assert int(wide.target_calls[1]) < 10


@pytest.mark.slow
def test_policy_gradient_raises_the_reward():
    first, last, apart = _module("policy_gradient").main(steps=12)
    assert last > first + 0.1 and apart < 1e-4


@pytest.mark.slow
def test_train_draft_raises_tokens_per_call():
    before, after = _module("train_draft").main(steps=25)
    assert after > before + 0.2


@pytest.fixture(scope="module")
def lm_eval_model():
    """Returns the example and the harness. A model's name can be registered once."""
    reason = "needs: pip install lm-eval 'huggingface_hub<1'"
    harness = pytest.importorskip("lm_eval", reason=reason)
    return _module("lm_eval_model"), harness


def _task(folder, documents, **task):
    """Writes documents to a file of a folder, and returns the task."""
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, documents)))
    files = {"data_files": {"test": str(path)}, "cache_dir": str(folder)}
    own = {"task": "own", "test_split": "test", "dataset_path": "json", "dataset_kwargs": files}
    return own | task


@pytest.fixture
def evaluate(lm_eval_model, toy, tmp_path):
    """Returns a function that runs a task on the toy models, and returns the model's answers."""

    def run(documents, options="", **task):
        task = _task(tmp_path, documents, **task)
        models = f"target={toy.folder / 'target'},draft={toy.folder / 'draft'},dtype=float32"
        arguments = f"{models},method=block,draft_length=2,slots=2,seed=5{options}"
        found = lm_eval_model[1].simple_evaluate("spectr_jax", arguments, [task])
        samples = sorted(found["samples"]["own"], key=lambda sample: sample["doc_id"])
        return [answer for sample in samples for (answer,) in sample["resps"]]

    return run


def _scores(target, tokens):
    """Returns the log-probabilities [N] of all tokens but the first, and the most probable ones."""
    N = len(tokens) - 1
    visible = np.tri(N, dtype=bool)[None]
    logits, _ = target.model.extend(np.array([tokens[:-1]]), np.arange(N)[None], visible)
    table = np.asarray(jax.nn.log_softmax(logits[0]))
    return table[np.arange(N), tokens[1:]], table.argmax(-1)


@pytest.mark.parametrize("output", ["multiple_choice", "loglikelihood_rolling"])
def test_lm_eval_scores_equal_those_of_forward_passes(evaluate, toy, output):
    """The third text exceeds the context. A context is then cut from the left, and all tokens of a
    text on its own are predicted from as many tokens before them as fit."""
    target = load(toy.folder / "target", "float32")
    bos, encode, room = target.tokenizer.bos, target.tokenizer.encode, target.model.context
    texts = [toy.prompts[0], "", " ".join(toy.prompts)]
    assert len(encode(texts[2])) > 2 * room
    documents, choices = [{"text": text} for text in texts], ["target", "token 7 law of draft"]

    def logprob(tokens, new):
        return float(_scores(target, tokens[-room - 1 :])[0][-new:].sum())

    if output == "multiple_choice":
        found = evaluate(
            documents,
            output_type=output,
            doc_to_text="text",
            doc_to_target=0,
            doc_to_choice=choices,
        )
        expected = [
            logprob([bos, *encode(text), *encode(choice)], len(encode(choice)))
            for text in texts
            for choice in choices
        ]
        assert not any(greedy for _, greedy in found)
        found = [each for each, _ in found]
    else:
        found = evaluate(documents, output_type=output, doc_to_text="", doc_to_target="{{text}}")
        expected = []
        for text in texts:
            tokens, total = [bos, *encode(text)], 0
            for start in range(1, len(tokens), room):
                end = min(start + room, len(tokens))
                total += logprob(tokens[:end], end - start)
            expected.append(total)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_lm_eval_finds_the_greedy_continuation(lm_eval_model, toy):
    model = lm_eval_model[0].SpectrJax(str(toy.folder / "target"), method="baseline")
    prompt = model.tokenizer.prompt(toy.prompts[0])
    arguments = get_method("baseline"), model.session.target, None, [prompt], [len(prompt)], 4
    out = generate(jax.random.key(0), *arguments, Policy(0.0))
    new = np.asarray(out.tokens)[0, len(prompt) : len(prompt) + 4].tolist()
    others = [[*new[:place], new[place] - 1, *new[place + 1 :]] for place in range(4)]
    found = model._loglikelihood_tokens([(None, prompt, each) for each in (new, *others)])
    assert [greedy for _, greedy in found] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, Policy(0.0)),
        ({"do_sample": False, "temperature": 0.7}, Policy(0.0)),
        ({"do_sample": True, "top_k": 5}, Policy(1.0, top_k=5)),
        ({"temperature": 0.7, "top_p": 0.9}, Policy(0.7, top_p=0.9)),
    ],
)
def test_lm_eval_answers_equal_those_of_generate(evaluate, toy, given, policy):
    """Each answer ends before a stop string, and a prompt that is too long is cut from the left."""
    models = [load(toy.folder / name, "float32") for name in ("target", "draft")]
    tokenizer, texts, new = models[0].tokenizer, [*toy.prompts[:3], " ".join(toy.prompts)], 12
    whole, method = [], get_method("block", draft_length=2)
    for index, text in enumerate(texts):
        prompt = tokenizer.prompt(text)[-(models[0].model.context - new) :]
        key = jax.random.fold_in(jax.random.key(5), index)
        arguments = key[None], method, *models, [prompt], [len(prompt)], new
        out = generate(*arguments, dataclasses.replace(policy, eos=tokenizer.eos))
        (text,) = tokenizer.texts(out.tokens, out.lengths)
        whole.append(text[len(tokenizer.decode(prompt)) :])
    until = [whole[0][5:7], whole[1][-3:], ""]
    expected = [min((text.partition(stop)[0] for stop in until[:2]), key=len) for text in whole]
    assert 0 < len(expected[0]) < len(whole[0]) and 0 < len(expected[1]) < len(whole[1])
    task = {"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "text"}
    task["generation_kwargs"] = {"until": until, "max_gen_toks": new, **given}
    assert evaluate([{"text": text} for text in texts], **task) == expected


def test_lm_eval_groups_requests_by_their_arguments(lm_eval_model, toy):
    """Request i has the key i of all requests, whichever group it is in."""
    example, Instance = lm_eval_model[0], importlib.import_module("lm_eval.api.instance").Instance
    paths = [str(toy.folder / name) for name in ("target", "draft")]
    model = example.SpectrJax(*paths, method="speculative", slots=2)
    given = [{"max_gen_toks": 5 + index % 2, "temperature": 1.0} for index in range(5)]
    requests = [
        Instance("generate_until", {}, ("draft target", each), index)
        for index, each in enumerate(given)
    ]
    answers = model.generate_until(requests)
    alone = [
        model.generate_until([requests[0]] * index + [requests[index]])[-1] for index in (2, 4)
    ]
    assert alone == [answers[2], answers[4]] and len(set(answers)) > 2


def test_lm_eval_refuses_bad_input_in_one_line(lm_eval_model, evaluate, toy):
    task = {"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "text"}

    def message(options="", **given):
        with pytest.raises(UserError) as caught:
            evaluate([{"text": "draft"}], options, **task, generation_kwargs={"until": "."} | given)
        return str(caught.value)

    assert message(",drafts=2").startswith("method 'block' has no option 'drafts'")
    assert message(",slots=0") == "slots=0: must be a positive integer"
    assert message(num_beams=2) == "generation_kwargs: 'num_beams' is not supported; leave it out"
    assert message(temperature=-1).startswith("temperature=-1")
    assert "exceed the context 32 of the target" in message(max_gen_toks=32)


@pytest.mark.slow
def test_lm_eval_answers_a_chat(lm_eval_model, monkeypatch):
    """An answer may begin with given words (`gen_prefix`). BOS is not added to a template's own."""
    pytest.importorskip("jinja2")
    example, Instance = lm_eval_model[0], importlib.import_module("lm_eval.api.instance").Instance
    model = example.SpectrJax("smollm2", dtype="int8", slots=1)
    monkeypatch.setattr(model.tokenizer, "_adds_bos", True)  # As Llama 3's does.
    messages = [{"role": "user", "content": "Name a color of the sky."}]
    text = model.apply_chat_template(messages)
    assert model.tok_encode(text) == model.tokenizer.chat(messages)
    begun = [*messages, {"role": "assistant", "content": "The color is"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == text + "The color is"
    given = {"max_gen_toks": 16, "until": ["\n"]}
    request = Instance("generate_until", {}, (text, given), 0)
    prompt, session = model.tokenizer.chat(messages), model.session
    arguments = session.method, session.target, session.draft, [prompt], [len(prompt)], 16
    out = generate(jax.random.key(0), *arguments, Policy(0.0, eos=model.tokenizer.eos))
    expected = model.tokenizer.decode(np.asarray(out.tokens)[0, len(prompt) : int(out.lengths[0])])
    assert model.generate_until([request]) == [expected.partition("\n")[0]] != [""]


@pytest.mark.slow
def test_lm_eval_model_runs_as_a_program(lm_eval_model, toy, tmp_path):
    """It takes a folder with task files, and says in one line what is wrong."""
    given = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    task = _task(tmp_path, [{"text": text} for text in toy.prompts], **given)
    (tmp_path / "own.yaml").write_text(json.dumps(task))  # JSON is YAML.
    program = [sys.executable, str(FOLDER / "lm_eval_model.py"), "--model=spectr_jax"]

    def run(target):
        models = f"--model_args=target={toy.folder / target},method=baseline"
        command = [*program, models, f"--tasks={tmp_path}"]
        return subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True)

    assert "|own  |" in run("target").stdout
    ended = run("targets")
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("error: no model at")
