"""Tests every entry point: bad input gives one line on stderr, and the help is complete.

Most programs run in processes forked from one that has imported JAX (`fork_server.py`), because
`python -m` takes seconds. To add an entry point, add a line to `PROGRAMS` and its cases to `CASES`.
"""

import collections
import errno
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from helpers import ROOT
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError, explain

pytestmark = pytest.mark.xdist_group("entry_points")  # All tests share one server.

IMPORTED_BY_THE_SERVER = (
    *("spectr_jax.data.packed", "spectr_jax.utils.hosts", "spectr_jax.training.loop"),
    *(
        f"spectr_jax.experiments.{name}"
        for name in ("auto", "latency", "quality", "tokens_per_call", "trees")
    ),
    "spectr_jax.experiments.figures.acceptance",
)

EAGLE = "smollm2-draft"
"""The name of a draft that sees its target's features."""
PART = "spectr_jax/embedded/target_97m-00002-of-00007.safetensors"

PROGRAMS = {  # The flag of the folder that each program writes to, then its other required flags.
    "spectr_jax.train": ("workdir", "--config=configs/embedded.py"),
    "spectr_jax.eval": ("workdir", "--config=configs/demo.py"),
    "spectr_jax.pack": ("out", "--data=spectr_jax/embedded/prompts.txt"),
    "spectr_jax.label": (
        "out",
        "--text=spectr_jax/embedded/prompts.txt",
        "--teacher=2m",
        "--count=200",
    ),
    "spectr_jax.tabulate": (
        "out",
        "--text=spectr_jax/embedded/prompts.txt",
        "--target=2m",
        "--length=64",
    ),
    "spectr_jax.export": ("out", "--model=/nowhere"),
    "spectr_jax.sample": ("", "--prompt=x"),
    "scripts/prepare_lm1b.py": ("data_dir",),
    "scripts/dev/compile_for.py": ("workdir",),
    "scripts/dev/compile_large.py": ("workdir",),
    "scripts/dev/check_outputs.py": ("workdir",),
    "scripts/dev/compare_llama_cpp.py": ("workdir",),
}
TRAIN, EVAL, PACK, LABEL, TABULATE, EXPORT, SAMPLE, LM1B, *SCRIPTS = PROGRAMS
COMPILE, COMPILE_LARGE, OUTPUTS, LLAMA_CPP = SCRIPTS
EXPERIMENTS = ("trees", "latency", "quality", "auto", "distil", "figures")
TREES, LATENCY, QUALITY, AUTO, DISTIL, FIGURES = (
    f"--config=configs/{name}.py" for name in EXPERIMENTS
)

CASES = {  # For each program, bad flags and a part of the message.
    TRAIN: {
        "--config.learning_rat=1": "unknown config field 'learning_rat'",
        "--config.steps=many": "flag --config.steps=many",
        "--workdir=gs://bucket/run": "'gs://bucket/run' is a URL; give a local path",
        "--config.data.train=gs://bucket/*": "'gs://bucket/*' is a URL",
        "--config.init=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--config.model=3": "Failed to parse '3' as a ConfigDict",
        "--config.data.train=/nowhere/*.xz": "no text file matches '/nowhere/*.xz'",
        "--config.data.train=": "no text file matches ''; give a file, a folder",
        "--config.data.train=packed:/nowhere": "'/nowhere' is not a packed corpus that can be",
        "--config.early_exit.layer=2": "early_exit.layer=2: must be below model.layers=2; lower",
        "--config.batch_size=0": "batch_size=0: must be at least 1",
        "--config.optimizer.name=sgd": "unknown optimizer.name 'sgd'; known: adamw, muon",
        "--config.optimizer.learning_rate=-1.0": "optimizer.learning_rate=-1.0: must be at least",
        "--config.optimizer.b1=1.5": "optimizer.b1=1.5: must be in [0, 1)",
        "--config.seed=-1": "seed=-1: must be at least 0",
        "--config.kind=students": "unknown kind 'students'; did you mean 'student'?",
        "--config=configs/embedded.py:draft_7m": "unknown model of this ladder 'draft_7m'; did",
        "--config=configs/smal.py:target": "no file 'configs/smal.py'; did you mean 'configs/small",
        "--config.step=5": "unknown config field 'step'; did you mean 'steps'? config.py of",
        "--config=configs/demo.py": "--config: is an evaluation; give one such as",
        "--config=README.md": "the config file fails: SyntaxError",
        "--config=spectr_jax/utils/errors.py": "the config file fails: AttributeError: module",
        "--coordinator=localhost:1234": "--processes is missing; give --coordinator, --processes",
        "--coordinator=localhost:1 --processes=2 --process_id=2": "--process_id=2: must be in",
        "--distributed": "no other processes were found in the environment (TPU pod, Slurm, Open",
        f"{DISTIL} --config.loss=sk": "unknown loss 'sk'; known: cross_entropy, kl, lk",
        f"{DISTIL} --config.data.train=/nowhere": "'/nowhere' has no labels that can be read",
        "--config=configs/distil.py:7m": "unknown student '7m'",
        f"{DISTIL} --import=no_such": "--import=no_such fails (ModuleNotFoundError",
    },
    EVAL: {
        "--workdir=gs://bucket/run": "'gs://bucket/run' is a URL",
        "--config.target=gs://bucket/run": "'gs://bucket/run'",
        "--config.prompts=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--config=configs/ladder.py:98m": "unknown target of a ladder '98m'; did you mean '97m'?",
        "--config.methods=('spectre',)": "unknown method 'spectre'; did you mean 'spectr'?",
        "--config.model_parallel=2": "model=2: must divide the 1 devices; choose a divisor",
        "--config.draft_lengths=(4,-1)": "draft_lengths=-1: must be at least 1",
        "--config.target=7m": "no model at '7m'",
        "--config.target=/nowhere": "no model at '/nowhere'",
        "--config.prompt_tokens=100": "exceed the context 128",
        "--config.experiment=tree": "unknown experiment 'tree'; did you mean 'trees'?",
        "--config=configs/embedded.py": "--config: must be an evaluation with a field",
        "--config.draft_temperature=-2.0": "draft_temperature=-2.0: must be",
        "--config.target=spectr_jax/embedded": "did you mean 'spectr_jax/embedded/draft_20m'?",
        f"--config.target={PART}": "did you mean 'spectr_jax/embedded/target_97m'?",
        f"{TREES} --config.extra_trees=('4,0',)": "tree='4,0': k_2=0",
        "--import=json,no_such.module": "--import=no_such.module fails (ModuleNotFoundError: No",
        "--config=configs/auto.py:small": "configs/auto.py has no variants; drop `:small`",
        "--config=configs/demo.py:half": "unknown size of this table 'half'; known: full, small",
        f"{FIGURES} --config.only=('figure_4',)": "unknown figure 'figure_4'",
        f"{FIGURES} --config.pairs=many": "flag --config.pairs=many",
        f"{LATENCY} --config.models=('2m',) --config.draft={EAGLE}": "reads hidden states of",
        f"{QUALITY} --config.models=('{EAGLE}',) --config.heldout=README.md": "can only draft",
    },
    PACK: {
        "--out=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--tokenizer=gs://bucket/a": "'gs://bucket/a' is a URL",
        "spectr_figure_5": "unexpected argument 'spectr_figure_5'",
        "--data=/nowhere": "no text file matches '/nowhere'",
        "--data=packed:x": "'packed:x' is packed for training, and text is needed here",
        "--data=spectr_jax/embedded/draft_2m.safetensors": "is not UTF-8 text",
        "--vocab_size=100000": "no vocabulary of 100000 pieces can be trained",
        "--vocab_size=3": "; give a larger vocabulary",
        "--vocab_size=0": "flag --vocab_size=0: 0 is not a positive integer",
        "--tokenizer=README.md": "'README.md' is not a SentencePiece model",
        "--length=1": "flag --length=1: 1 is not integer >= 2",
        "--compress true": "unexpected argument 'true'",
    },
    LABEL: {
        "--out=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--teacher=7m": "no model at '7m'",
        "--text=": "--text is missing; give a corpus, or --write=chats",
        "--write=chats": "--text=spectr_jax/embedded/prompts.txt: --write=chats takes no",
        "--write=chats --text=": "the model has no chat template; give an instructed one",
        "--write_dtype=int8": "--write_dtype=int8: ",
        "--length=129": "--length=129: 129 tokens exceed the context 128 of",
        "--temperature=-1": "flag --temperature=-1: -1.0 is not a non-negative number",
        "--text=/nowhere": "no text file matches '/nowhere'",
        "--length=118 --write=continuations": "--length=118: must be at most 117, so that",
        "--count=999999": "--first=0 --count=999999: ",
        "--write=continuations --first=257": "--first=257: ",
        "--temperature=0.5": "--temperature=0.5: ",
        "--text= --write=chats --temperature=0": "--temperature=0: ",
        "--features --labels=false": "--features --labels=false: ",
        f"--count=9 --teacher={EAGLE}": "can only draft for it; give a model that runs alone",
        "--out=a,b": "--out=a,b: a comma",
    },
    EXPORT: {
        "--out=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--out=file:/tmp/a": "'file:/tmp/a' is a URL",
        "--model=gs://bucket/a": "'gs://bucket/a' is a URL",
        "--model=/nowhere@best": "--model=/nowhere@best: is not the workdir of a training run",
        "--model=mine:large": "and only these can be exported; fix the path",
        "--format=onnx": "flag --format=onnx: value should be one of <spectr_jax|llama>",
        "--format=llama --dtype=int8": "--dtype=int8: does not apply to --format=llama",
        "--format=llama --part_mb=3": "--part_mb=3.0: does not apply to --format=llama",
        "--format=llama --model=2m": "--model=2m: must be of the Llama family",
        f"--format=llama --model={EAGLE}": f"--model={EAGLE}: is a draft that",
        "--dtype=int4": "unknown --dtype 'int4'; did you mean 'int8'?",
    },
    SAMPLE: {
        "--model_parallel=2": "--model_parallel=2: JAX finds 1 device; give at most 1",
        "--html=gs://bucket/a.html": "'gs://bucket/a.html' is a URL",
        "--target=https://host/model": "'https://host/model'",
        "--import=no_such": "or name a module that is installed or in the current folder,",
        "--import=scripts.dev.plot_pages --import=none": "--import=none fails",
        f"--target={EAGLE}": "sees the features of a target, and can only draft for it; give a",
        "--target=.": "no model at '.'",
        "--draft=eagle3:/nowhere": "no folder '/nowhere'; give eagle3: and the folder",
        "--chat": "--chat needs a chat template, and 'draft_20m' has none; leave --chat out",
        "--target=gguf:/nowhere.gguf": "no file '/nowhere.gguf'; give gguf: and the path of a",
        "--target=gguf:README.md": "'README.md' is not a GGUF file that can be read",
        "--target=gguf:x --method=spectr": "method 'spectr' needs a draft model with the",
        "--method=spectre": "unknown method 'spectre'; did you mean 'spectr'?",
        "--method=block --num_drafts=4": "it has draft_length; spectr, naive, recursive, spectr+, ",
        "--stop=": "--stop is empty; give a string, or leave it out",
        "--target=mine:large": "smollm2; or --import the module that registers 'mine'",
        "--tree=4,2 --num_drafts=4": "--tree=4,2 and --num_drafts=4 are both given; give one of",
        "--layers=2": "--layers=2: applies to --method=self_speculative only; give both, or",
        "--chat --prompt=": "--prompt is empty: nothing to answer; give --chat a message",
        "--target=": "no model at ''; give random:NAME",
        "--draft=hf:/nowhere": "no folder '/nowhere'; give hf: and the folder of a model",
        "--dtype=half": "dtype='half': must be one of float32, bfloat16, int8",
        "--temperature=-1": "temperature=-1.0: must be",
        "--max_new_tokens=500": "of 3 tokens, max_new_tokens=500: 503 tokens exceed the context",
        "--file=README.md": "--prompt and --file=README.md are both given; give one of them",
        "--html=/nowhere/page.html": "--html=/nowhere/page.html: is in a folder that does not",
        "--slots=4": "--slots: applies to --output only; give both, or leave it out",
        "--logprobs": "--logprobs: applies to --output only; give both, or leave it out",
        "--output=a": "--prompt and --output=a are both given; give one of them",
        "--html=": "--html is empty; name a file",
        "--html=/tmp": "--html=/tmp: is a folder; name a file in it",
        "--prompt=la\udcff": "is not UTF-8; convert it",
        "--seed=100000000000000000000": "flag --seed=100000000000000000000:",
        "--method=recycle --draft=6m": "draft: must be a Bigram to start the table, not a Tra",
        "--method=recycle --draft=smollm2-bigram": "have different vocabularies",
        "--method=recycle --tree=recall:0": "tree='recall:0': size=0: must be a positive",
        "--method=self_speculative --layers=4": "layers=4: must be less",
        **{
            f"--method={name} --{flag}": f"--{flag}: method {name!r} {uses}; leave it out"
            for flag, uses, names in (
                ("draft=/nowhere", "uses no draft model", ("baseline", "self_speculative")),
                ("draft_temperature=0.5", "draws no drafts from a model", ("baseline", "lookup")),
            )
            for name in names
        },
    },
    TABULATE: {
        "--text=": "text='': 'draft_2m' has no chat template; give a corpus",
        "--text=README.md,": "--text=README.md,: a name is empty; remove a comma",
        "--text=/nowhere": "no text file matches '/nowhere'",
        "--length=129": "length=129: 129 tokens exceed the context 128 of",
        "--ranks=0": "flag --ranks=0",
        f"--target={EAGLE}": "can only draft for it; give a model that runs alone",
    },
    LLAMA_CPP: {"--rounds=0": "flag --rounds=0"},
    LM1B: {"--manual_dir=/nowhere": "--manual_dir=/nowhere is not a folder"},
    COMPILE_LARGE: {"--device=v9": "unknown --device 'v9'; known: h100, v5e"},
    COMPILE: {
        "--device=h1000": "unknown --device 'h1000'; did you mean 'h100'?",
        "--only=spectre": "unknown --only 'spectre'; did you mean 'spectr'?",
    },
}

Ended = collections.namedtuple("Ended", ["status", "stdout", "stderr"])


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, str(ROOT / "tests/fork_server.py"), *IMPORTED_BY_THE_SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
    }  # A process that forks must have one thread.
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture
def run(server, tmp_path):
    """Returns a function that runs a program in the repository and returns how it ended."""

    def run_program(program, *arguments, environment=None):
        files = {name: str(tmp_path / f"{name}.txt") for name in ("stdout", "stderr")}
        request = {
            "program": str(program),
            "arguments": arguments,
            "environment": environment or {},
            **files,
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return Ended(status, *(pathlib.Path(file).read_text() for file in files.values()))

    return run_program


def arguments_of(program, flags, tmp_path):
    """Returns `flags`, a flag for the folder to write to, and required flags that `flags` lacks."""
    folder, *needed = PROGRAMS[program]
    needed = [flag for flag in needed if flag.split("=")[0] + "=" not in flags]
    return [*needed, *([f"--{folder}={tmp_path / 'written'}"] if folder else []), *flags.split()]


def check_one_line(ended, message):
    lines = ended.stderr.strip().splitlines()
    assert ended.status == 2, ended
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], ended.stderr


def nothing_written(tmp_path):
    return not [path for path in (tmp_path / "written").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("program", "flags"),
    [(program, flags) for program, cases in CASES.items() for flags in cases],
    ids="{}".format,
)
def test_bad_input_gives_one_line_and_exit_status_2(run, tmp_path, program, flags):
    check_one_line(run(program, *arguments_of(program, flags, tmp_path)), CASES[program][flags])
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    "program", [program for program, (folder, *_) in PROGRAMS.items() if folder]
)
def test_unknown_flags_extra_arguments_and_bad_folders_are_refused(run, tmp_path, program):
    """All entry points refuse these in the same words, except prepare_lm1b.py: it runs in the
    environment of TensorFlow and uses argparse."""
    folder, *needed = PROGRAMS[program]
    uses_absl = program != LM1B
    ended = run(program, *arguments_of(program, f"--{folder[:-1]}=x", tmp_path))
    check_one_line(
        ended,
        f"Unknown command line flag '{folder[:-1]}'" if uses_absl else "unrecognized arguments",
    )
    ended = run(program, "extra", *arguments_of(program, "", tmp_path))
    check_one_line(
        ended, "unexpected argument 'extra'" if uses_absl else "unrecognized arguments: extra"
    )
    file = tmp_path / "file"
    file.touch()
    ended = run(program, *needed, f"--{folder}={file}")
    check_one_line(
        ended, f"{str(file)!r} is not a folder; choose another" if uses_absl else "Not a directory"
    )
    if uses_absl:
        check_one_line(run(program, *needed, f"--{folder}="), f"--{folder} is empty; name a folder")
    assert nothing_written(tmp_path)


def test_missing_flags_prompts_and_files_are_reported(run):
    check_one_line(
        run(PACK, "--data=x"), "Flag --out must have a value other than None; see --help"
    )
    check_one_line(run(SAMPLE), "no prompt on stdin; give --prompt=TEXT or --file=FILE")
    check_one_line(run(SAMPLE, "--file=/nowhere"), "--file=/nowhere: cannot be read")
    check_one_line(run(SAMPLE, "--file=gs://bucket/a"), "'gs://bucket/a' is a URL")
    check_one_line(
        run(TRAIN, "--confg=x"),
        "Unknown command line flag 'confg'. Did you mean: config ?; see --help",
    )


def test_rows_that_are_longer_than_the_text_are_reported(run, tmp_path):
    data = "--data=spectr_jax/embedded/prompts.txt", "--vocab_size=400", "--workers=1"
    ended = run(PACK, *data, "--length=99999", f"--out={tmp_path}/packed")
    assert ended.status == 0 and re.search(
        r"--length=99999: all [\d,]+ tokens fit in one row; give a smaller", ended.stderr
    )


@pytest.mark.parametrize("status", [0, 3])
def test_config_files_and_modules_that_exit_are_reported(run, tmp_path, monkeypatch, status):
    (tmp_path / "leaves.py").write_text(f"import sys\nsys.exit({status})\n")
    ended = run(TRAIN, *arguments_of(TRAIN, f"--config={tmp_path}/leaves.py", tmp_path))
    check_one_line(ended, "the config file calls sys.exit")
    given = absl_flags.FlagValues()
    absl_flags.DEFINE_multi_string("import", ["leaves"], "", flag_values=given)
    given.mark_as_parsed()
    monkeypatch.setattr(cli.flags, "FLAGS", given)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"--import=leaves fails \(SystemExit"):
        cli._import_modules()


def test_sentences_of_one_token_are_not_labelled(run, tmp_path):
    """The tokenizer drops a zero-width space, so the prompt is BOS alone."""
    (tmp_path / "text").write_text("\u200b\n" * 3)
    flags = f"--text={tmp_path}/text --count=3"
    ended = run(LABEL, *arguments_of(LABEL, flags, tmp_path))
    check_one_line(ended, f"--text={tmp_path}/text: each of the 3 sentences has one token")
    assert nothing_written(tmp_path)


def test_a_config_without_a_kind_is_refused_with_a_remedy(run, tmp_path):
    file = tmp_path / "config.py"
    file.write_text("import ml_collections\nget_config = lambda: ml_collections.ConfigDict({})")
    ended = run(TRAIN, f"--config={file}", f"--workdir={tmp_path}/written")
    check_one_line(ended, "config field 'kind' is missing; start from train_config or")


def test_a_finished_table_is_reported_in_one_line(run, tmp_path):
    flags = f"{QUALITY} --config.models=('2m',) --config.heldout=spectr_jax/embedded/prompts.txt"
    flags += " --config.sentences=2 --config.batch_size=2 --config.dtypes=('float32',)"
    arguments = arguments_of(EVAL, flags, tmp_path)
    assert run(EVAL, *arguments).status == 0
    table = tmp_path / "written/quality.json"
    written = table.read_text()
    ended = run(EVAL, *arguments)
    assert ended.status == 0 and ended.stdout.startswith(f"{table} is finished: commit ")
    assert len(ended.stdout.splitlines()) == 1 and table.read_text() == written
    assert run(EVAL, *arguments, "--again").status == 0 and table.read_text() != written


def test_an_empty_prompt_is_decoded_with_a_note(run):
    ended = run(SAMPLE, "--prompt=", "--target=2m", "--method=baseline", "--max_new_tokens=2")
    assert (
        ended.status == 0
        and ended.stderr == "--prompt is empty: the sequence begins from nothing\n"
    )


def test_flags_of_a_file_of_answers_are_checked(run, tmp_path):
    flags = f"--file={ROOT}/spectr_jax/embedded/prompts.txt"
    check_one_line(run(SAMPLE, "--output=a"), "--output=a: takes its prompts from a file; give --f")
    for wrong, message in (
        ("--output=a --compare", "--compare and --output=a are both given; give one of them"),
        ("--output=a --html=b", "--html and --output=a are both given; give one of them"),
        ("--output=a --slots=0", "flag --slots=0"),
        ("--output=", "--output is empty; name a file"),
        ("--output=/proc/a", "--output=/proc/a: cannot be written"),
        ("--output=/nowhere/a", "--output=/nowhere/a: is in a folder that does not exist"),
    ):
        check_one_line(run(SAMPLE, flags, *wrong.split()), message)
    (tmp_path / "a.jsonl").write_text('"fine"\n"torn\n')
    ended = run(SAMPLE, f"--file={tmp_path}/a.jsonl", f"--output={tmp_path}/b")
    check_one_line(ended, f"--file={tmp_path}/a.jsonl: line 2 is not JSON (")
    assert not (tmp_path / "b").exists()


def test_a_file_of_prompts_is_answered_once(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('"The committee"\n{"prompt": "She opened"}\n')
    flags = [f"--file={tmp_path}/a.jsonl", f"--output={tmp_path}/b", "--slots=2", "--target=2m"]
    flags += ["--method=baseline", "--max_new_tokens=2"]
    ended = run(SAMPLE, *flags)
    line = f"{tmp_path}/b is finished, 2 answers"
    assert ended.status == 0 and ended.stdout.startswith(
        f"{line}; of this run 2, baseline: 4 tokens in 4 calls, 1.00 a call; "
    )
    assert "2/2" in ended.stderr and "tokens/s" in ended.stderr
    answers = [json.loads(answer) for answer in (tmp_path / "b").read_text().splitlines()[1:]]
    assert [answer["prompt"] for answer in answers] == ["The committee", "She opened"]
    assert run(SAMPLE, *flags) == Ended(0, f"{line}\n", "")
    check_one_line(run(SAMPLE, *flags, "--logprobs"), "with logprobs=False, and this run has logpr")


@pytest.mark.parametrize("flag", ["--verbos", "--verb=1", "--v"])
def test_abbreviations_of_verbose_are_refused(run, tmp_path, flag):
    """`-v` is the short form of absl's --verbosity, which takes a number."""
    ended = run(PACK, *arguments_of(PACK, flag, tmp_path))
    check_one_line(
        ended,
        "Missing value for flag --v"
        if flag == "--v"
        else f"flag '{flag.split('=')[0].strip('-')}'",
    )


def test_verbose_shows_the_traceback(run, tmp_path):
    cases = (("--config.batch_size=0", "batch_size=0: must be"), ("--nonsense", "flag 'nonsense'"))
    for flags, message in cases:
        ended = run(TRAIN, *arguments_of(TRAIN, f"{flags} --verbose", tmp_path))
        lines = ended.stderr.strip().splitlines()
        assert ended.status == 2 and lines[0].startswith("Traceback (most recent call last):")
        assert lines[-1].startswith("error: ") and message in lines[-1]


PROGRAM = '''"""A program."""
import os, signal, sys
from absl import flags
from spectr_jax.utils import cli
from spectr_jax.utils.errors import Interrupted, UserError
OUT = flags.DEFINE_string("out", "out", "Where.")
def main():
    {body}
cli.run(main, output=OUT)
'''


@pytest.fixture
def run_body(run, tmp_path):
    """Returns a function that runs a program whose `main` is one line."""

    def run_program(body, **kwargs):
        (tmp_path / "program.py").write_text(PROGRAM.format(body=body))
        return run(tmp_path / "program.py", f"--out={tmp_path / 'written'}", **kwargs)

    return run_program


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise UserError('two\\nlines; fix them')", "error: two lines; fix them"),
        (
            "open('/dev/full', 'w', buffering=1).write('\\n')",
            "error: 'a file' cannot be written (No space left on device)",
        ),
        (
            "open('/etc/passwd/x', 'w')",
            "error: '/etc/passwd/x' cannot be used (Not a directory); choose another path",
        ),
        ("os.mkdir('/etc')", "error: '/etc' cannot be used (File exists)"),
        (
            "open(OUT.value + '/gone', 'w')",
            "/written/gone' cannot be used (No such file or directory)",
        ),
        (
            "sys.modules['gguf'] = None; import gguf",
            "error: gguf is not installed; run pip install 'spectr_jax[hf]'",
        ),
        (  # This import comes before flags are parsed.
            "sys.modules['ml_collections'] = None; import spectr_jax.eval",
            "error: ml_collections is not installed; run pip install 'spectr_jax[train]'",
        ),
        ("bytearray(2**60)", "error: out of memory (host); use a smaller batch_size"),
    ],
)
def test_user_errors_print_one_line(run_body, body, message):
    check_one_line(run_body(body), message)


@pytest.mark.parametrize(
    "body",
    [
        "1 / 0",
        "open('no/such/file')",
        "{}['name']",
        "raise ConnectionError('gone')",
        "import nothing",
    ],
)
def test_a_bug_shows_its_traceback(run_body, body):
    ended = run_body(body)
    assert (
        ended.status == 1
        and "Traceback (most recent call last):" in ended.stderr
        and "error: " not in ended.stderr
    )


def test_help_shows_defaults_and_valid_values(run):
    text = " ".join(run(PACK, "--help").stdout.split())
    assert "(default: '8192') (a positive integer)" in text
    assert (
        "--[no]verbose: Print the traceback of an error above its one-line message. (default: "
        "'false')" in text
    )


def test_exit_status_tells_success_from_interruptions(run_body):
    assert run_body("print('done')") == Ended(0, "done\n", "")
    assert run_body("raise Interrupted('saved')") == Ended(75, "", "saved\n")
    stopped = run_body("os.kill(os.getpid(), signal.SIGINT)")
    assert stopped == Ended(75, "", "interrupted; the same command resumes\n")
    assert run_body("os.kill(os.getpid(), signal.SIGTERM)") == stopped


@pytest.mark.parametrize(
    "body", ["print('one')", "print('two', flush=True)", "print('x' * 100_000); print('three')"]
)
def test_a_closed_stdout_pipe_exits_quietly_with_141(run_body, body):
    """The program finds the pipe closed when it writes, when it flushes, or when it exits."""
    buffered = "sys.stdout = open(1, 'w', closefd=False); "  # Overrides PYTHONUNBUFFERED.
    piped = "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); " + buffered
    assert run_body(piped + body) == Ended(141, "", "")


@pytest.mark.parametrize(
    "unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"]
)
def test_help_into_a_closed_pipe_exits_quietly(unbuffered):
    """The program runs without the server, which skips the flush at Python's exit."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", PACK, "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= unbuffered
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_explain_describes_user_errors_and_leaves_bugs():
    """These errors are constructed: a test cannot fill or remove a device, and root may write
    anywhere."""
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore"
    assert explain(RuntimeError(full)).startswith(
        "out of memory (RESOURCE_EXHAUSTED: Out of memory while"
    )
    assert "JAX_PLATFORMS" in explain(RuntimeError("Unable to initialize backend 'cuda': nothing"))
    refused = PermissionError(errno.EACCES, "Permission denied", "runs/x")
    assert "'runs/x' cannot be used (Permission denied)" in explain(refused)
    assert explain(
        FileNotFoundError(errno.ENOENT, "No such file", "runs/x/y"), output="runs/x"
    ).startswith("'runs/x/y' cannot")
    for bug in (
        FileNotFoundError(errno.ENOENT, "No such file", "runs/z"),
        OSError("own"),
        ValueError("bad"),
        RuntimeError("x"),
    ):
        assert explain(bug, output="runs/x") is None
    assert explain(UserError("told")) == "told"


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_lists_every_flag_and_exit_status(run, program):
    ended = run(program, "--help")
    assert ended.status == 0 and not ended.stderr
    path = ROOT / (program if program.endswith(".py") else f"{program.replace('.', '/')}.py")
    path = path if path.exists() else path.with_suffix("") / "__main__.py"
    source = path.read_text()
    if program != LM1B:
        assert ended.stdout.startswith(source.removeprefix('"""').splitlines()[0])
        assert all(part in ended.stdout for part in ("--[no]verbose:", "Exit status:"))
    called = program.replace(".py", ".sh")
    called = called if (ROOT / called).exists() else program
    for flag in re.findall(r'DEFINE_\w+\(\s*"(\w+)"|add_argument\("--(\w+)"', source):
        assert re.search(rf"--(\[no\])?{flag[0] or flag[1]}\b", ended.stdout)
    assert re.search(rf"^ *(python -m |python |){re.escape(called)} ", ended.stdout, re.M)
    if "config_flags" in source:
        assert "--coordinator: HOST:PORT" in ended.stdout and "--config.FIELD=VALUE" in ended.stdout
        assert "--config: " in ended.stdout and "spectr_jax/training" in ended.stdout


@pytest.mark.parametrize("program", [program for program in PROGRAMS if "spectr_jax" in program])
def test_help_imports_neither_jax_nor_numpy(program):
    """`-X importtime` lists every import on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", program, "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = {line.split("|")[-1].strip() for line in ended.stderr.splitlines()}
    assert ended.returncode == 0 and "Exit status:" in ended.stdout
    assert "absl.flags" in imported and not imported & {"jax", "numpy"}


def test_python_m_reports_bad_input_in_one_line(tmp_path):
    """`CASES` run in the server, which has imported the package before."""
    command = [
        sys.executable,
        "-m",
        EVAL,
        *arguments_of(EVAL, "--config.methods=('spectre',)", tmp_path),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    check_one_line(
        Ended(ended.returncode, ended.stdout, ended.stderr),
        "unknown method 'spectre'; did you mean 'spectr'?",
    )
