"""Tests Spec-Bench on a few questions and small models.

The tests cover the arithmetic of the protocol, resumption, and bad configs.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.data.questions import Question, read_questions, spread
from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.experiments import spec_bench
from spectr_jax.experiments.config import spec_bench_config
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.spec_bench import plot, run
from spectr_jax.loading import by_name
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Why?", "Why not?"]},
    {"question_id": 2, "category": "qa", "turns": ["Who?"]},
    {"question_id": 3, "category": "stem", "turns": ["What?", "So?"]},
]
NEW = 10


@pytest.fixture(scope="module")
def models():
    made = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        ["Why and why not"], vocab_size=270, special_tokens=controls, show_progress=False
    )
    tokenizer = HuggingFaceTokenizer(made._tokenizer, 1, (2, 0), adds_bos=False, template=TEMPLATE)
    shape = {"layers": 1, "width": 16, "mlp": 32, "heads": 2, "kv_heads": 1, "head_width": 8}
    shape = LlamaConfig(**shape, vocab_size=tokenizer.vocab_size, context=300)
    return {
        name: Trained(name, Llama(shape, rngs=nnx.Rngs(seed)), tokenizer)
        for seed, name in enumerate(("large", "small"))
    }


@pytest.fixture
def config(models, tmp_path, monkeypatch):
    """Returns a config that pads all prompts to 128 tokens, so that each method has one program."""
    monkeypatch.setitem(by_name.LOADERS, "mine", lambda name, dtype: models[name])
    monkeypatch.setattr(spec_bench, "LONG", 128)
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n")
    config = spec_bench_config()
    config.update(
        target="mine:large",
        draft="mine:small",
        table="",
        dtype="float32",
        questions=str(path),
        max_new_tokens=NEW,
        runs=2,
    )
    config.temperatures = (0.0, 1.0)
    config.methods = ("lookup chain:3", "block chain:1", "recycle recall:2")
    return config


@pytest.mark.slow
def test_a_stopped_run_resumes_and_matches_separate_conversations(
    config, models, tmp_path, monkeypatch
):
    """The run is stopped at the third question and resumes. A fake clock makes each answer of the
    baseline take two seconds, and the others one."""
    converse, asked, now, step = spec_bench.converse, [], 0, 1

    def clock():
        nonlocal now
        now += step
        return now

    monkeypatch.setattr(spec_bench.time, "perf_counter", clock)

    def stopped(setup, label, question, temperature, key):
        nonlocal step
        step = 2 if label == "baseline" else 1
        asked.append((question.identity, temperature, label))
        if len(asked) == 18:
            raise KeyboardInterrupt
        return converse(setup, label, question, temperature, key)

    monkeypatch.setattr(spec_bench, "converse", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")
    result = run(config, tmp_path / "run")
    assert asked.count(("1", 0.0, "block chain:1")) == 2 and asked.count(("2", 0.0, "baseline")) > 2
    rows = {(row["temperature"], row["task"], row["method"]): row for row in result["rows"]}
    tasks = ("multi-turn conversation", "question answering", "overall")
    assert set(rows) == {
        (t, task, m) for t in (0.0, 1.0) for task in tasks for m in ("baseline", *config.methods)
    }
    first, second = (_greedy(models["large"], question["turns"]) for question in QUESTIONS[:2])
    third = _greedy(models["large"], QUESTIONS[2]["turns"])
    for method in ("baseline", *config.methods):
        row = rows[0.0, "overall", method]
        per_second = [
            np.mean([len(answer) for answer in answers]) for answers in (first, second, third)
        ]
        seconds = 2 if method == "baseline" else 1
        assert row["tokens_per_second"] == pytest.approx(np.mean(per_second) / seconds)
        assert row["speedup"] == pytest.approx(2 / seconds)
        assert rows[0.0, tasks[0], method]["tokens_per_second"] == pytest.approx(
            (per_second[0] + per_second[2]) / 2 / seconds
        )
        assert rows[0.0, tasks[1], method]["questions"] == 1
    for row in rows.values():
        emitted = 1 + (
            sum(row["accepted_at"]) / sum(row["calls"]) if row["method"] != "baseline" else 0
        )
        assert row["tokens_per_call"] <= emitted + 1e-9
        assert sum(row["accepted"]) == sum(row["accepted_at"]) and sum(row["reached"]) == sum(
            row["chosen_at"]
        )
        assert (
            len(row["reached"])
            == {"baseline": 0, "lookup chain:3": 3, "block chain:1": 1, "recycle recall:2": 2}[
                row["method"]
            ]
        )
    assert sum(rows[0.0, "overall", "lookup chain:3"]["accepted"]) > 0
    written = json.loads((tmp_path / "run" / "spec_bench.json").read_text())
    assert written == result and (tmp_path / "run" / "spec_bench.png").exists()
    assert not (tmp_path / "run" / "spec_bench.part.jsonl").exists()
    lines = [
        line.split("|")
        for line in (tmp_path / "run" / "spec_bench.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    cell = next(line for line in lines if line[1].strip() == "overall" and line[2].strip() == "3")[
        4
    ].strip()
    assert cell == f"{rows[0.0, 'overall', 'lookup chain:3']['tokens_per_call']:.2f}"


def test_edited_questions_are_not_mixed_with_older_answers(config, tmp_path, monkeypatch):
    calls = []

    def answered(setup, question, number, temperature):
        calls.append(question)
        if len(calls) == 2:
            raise KeyboardInterrupt
        positions = {name: [1] for name in ("calls", "chosen_at", "accepted_at")}
        positions |= {"reached": [1], "accepted": [1]}
        one = {"runs": [{"tokens": 1, "calls": 1, "seconds": 1.0}], "positions": positions}
        return dict.fromkeys(setup.methods, one)

    monkeypatch.setattr(spec_bench, "measure_question", answered)
    path = pathlib.Path(config.questions)
    before = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")
    path.write_text(before.replace('"writing"', '"coding"').replace("Why?", "How?"))
    with pytest.raises(UserError, match="other inputs"):
        run(config, tmp_path / "run")
    path.write_text(before)
    run(config, tmp_path / "run")
    path.write_text(before.replace("Why?", "How?"))
    with pytest.raises(UserError, match="is a table of other prompts, questions"):
        run(config, tmp_path / "run")
    assert run(config, tmp_path / "run", again=True)["questions"] == 3


def _greedy(target, turns):
    """Returns the tokens of the greedy answers, each decoded after the conversation so far."""
    messages, answers = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = target.tokenizer.chat(messages)
        policy = Policy(0.0, eos=target.tokenizer.eos)
        out = generate(
            jax.random.key(0),
            get_method("baseline"),
            target,
            None,
            [prompt + [0] * (128 - len(prompt))],
            [len(prompt)],
            NEW,
            policy,
        )
        answers.append(np.asarray(out.tokens)[0, len(prompt) : int(out.lengths[0])].tolist())
        messages.append({"role": "assistant", "content": target.tokenizer.decode(answers[-1])})
    return answers


def test_selected_questions_are_evenly_spaced():
    questions = [
        Question(str(number), "one" if number < 8 else "two", ("?",)) for number in range(11)
    ]
    assert [question.identity for question in spread(questions, 2)] == ["0", "4", "8", "9"]
    assert spread(questions, 0) == questions and len(spread(questions, 5)) == 8


def test_benchmark_categories_are_grouped_into_six_tasks(tmp_path):
    path = tmp_path / "questions.jsonl"
    categories = [
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ]
    categories += ["translation", "summarization", "qa", "math_reasoning", "rag"]
    lines = [
        {"question_id": number, "category": name, "turns": ["?"]}
        for number, name in enumerate(categories)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len({question.task for question in read_questions(str(path))}) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": ""}, "questions='': names no file"),
        ({"questions": "nowhere.jsonl"}, "questions='nowhere.jsonl': cannot be read"),
        ({"methods": ("lookup 2,x",)}, "tree='2,x'"),
        ({"methods": ("block 2,1",)}, "methods='block 2,1': 'block' does not draft the tree '2,1'"),
        ({"methods": ("baseline",)}, "methods='baseline': drafts nothing"),
        ({"methods": ("lookup",)}, "draft='mine:small': none of the methods uses one"),
        (
            {"methods": ("block",), "table": "mine:small"},
            "table='mine:small': none of the methods uses one",
        ),
        ({"methods": ("recycle", "block"), "table": "mine:small"}, "draft: must be a Bigram"),
        ({"methods": ("recycle", "block"), "table": "/nowhere"}, "no model at '/nowhere'"),
        ({"temperatures": (-1.0,)}, "temperature=-1.0"),
        ({"questions_per_task": -1}, "questions_per_task=-1"),
        (
            {"max_new_tokens": 200},
            "max_new_tokens=200, question 1: .* exceed the context 300 of 'large'",
        ),
    ],
)
def test_bad_configs_are_refused_before_any_work(config, tmp_path, changes, message):
    config.update(changes)
    with pytest.raises(UserError, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 lacks question_id"),
        ('{"question_id": 1, "category": "qa"}', "line 1 lacks question_id"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "line 1 has turns"),
        (
            '{"question_id": 1, "category": "qa", "turns": ["?"]}\n' * 2,
            "line 2 repeats question_id 1",
        ),
        ("\n", "has no questions"),
        ("[" * 100_000, "line 1 lacks question_id"),
        ('{"question_id": 1, "category": ["qa"], "turns": ["?"]}', "line 1 has category"),
        ('{"question_id": 1, "category": "overall", "turns": ["?"]}', "line 1 has category"),
        ('{"question_id": 1, "category": "qa", "turns": ["\\ud800"]}', "of invalid Unicode"),
    ],
    ids=[
        *("invalid JSON", "no turns", "empty turns", "a repeated question_id", "an empty file"),
        *("a deep nesting", "a list as category", "the name of all tasks"),
        "a surrogate",
    ],
)
def test_bad_question_files_are_refused(tmp_path, line, message):
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        read_questions(str(path))


def test_names_of_tasks_are_not_read_as_formulas(tmp_path):
    counts = {"accepted": [1], "reached": [2], "accepted_at": [1, 0], "chosen_at": [2, 1]}
    tasks = ("price $\\x$ and _{", "_hidden", "overall")
    rows = [{"task": task, "method": "block", "temperature": 0.0, **counts} for task in tasks]
    plot({"config": {"temperatures": [0.0]}, "rows": rows}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000


def test_questions_may_contain_unusual_line_ends(tmp_path):
    """A JSON string may hold U+2028 and U+0085. Windows adds a byte-order mark."""
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": number, "category": "a|b\nc", "turns": [f"one{end}two"]}
        for number, end in enumerate("\u2028\u0085\x0b")
    ]
    path.write_bytes(
        "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode("utf-8-sig")
    )
    found = read_questions(str(path))
    assert [question.turns for question in found] == [tuple(line["turns"]) for line in lines]
    table = report.markdown_table(["Task", "Questions"], [[found[0].task, 3]])
    assert r"a\|b c" in table and len(table.splitlines()) == 3


def test_a_target_without_a_chat_template_is_refused(config, models, tmp_path, monkeypatch):
    tokenizer = HuggingFaceTokenizer(models["large"].tokenizer._tokenizer, 1, 2)
    monkeypatch.setitem(
        by_name.LOADERS, "mine", lambda name, dtype: models[name]._replace(tokenizer=tokenizer)
    )
    with pytest.raises(UserError, match="target='mine:large': has no chat template"):
        run(config, tmp_path / "run")
