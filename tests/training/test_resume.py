"""Tests which runs may resume in a workdir, and runs that share a tokenizer."""

import contextlib
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import ml_collections
import pytest

from spectr_jax.data import packing
from spectr_jax.data.corpus import open_sentences
from spectr_jax.models.formats import runs
from spectr_jax.training import loop, preparation
from spectr_jax.training.loop import train
from spectr_jax.training.preparation import open_tokenizer
from spectr_jax.utils.config import config_hash
from spectr_jax.utils.errors import UserError


def test_the_content_of_data_decides_whether_a_run_resumes(config, corpus, tmp_path):
    """Files may move, and may not change. A run of an older version knows paths only."""
    old, new = (
        {"data.train": f"{tmp_path}/{name}/a.txt", "data.heldout": f"{tmp_path}/{name}/b.txt"}
        for name in ("old", "new")
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old/a.txt").write_text((corpus / "train.txt").read_text())
    (tmp_path / "old/b.txt").write_text((corpus / "heldout.txt").read_text())
    train(config(steps=2, **old), tmp_path / "run")
    (tmp_path / "old").rename(tmp_path / "new")
    train(config(steps=3, **new), tmp_path / "run")
    for name, field in (("a.txt", "data.train"), ("b.txt", "data.heldout")):
        file, before = tmp_path / "new" / name, (tmp_path / "new" / name).read_text()
        file.write_text(before.replace(before.splitlines()[7], "an edited sentence"))
        with pytest.raises(UserError, match=f"{field}='{file}': its content has changed"):
            train(config(steps=4, **new), tmp_path / "run")
        file.write_text(before)
    (tmp_path / "run/inputs.json").unlink()
    with pytest.raises(UserError, match=r"data.heldout='.*': the run in .* has"):
        train(config(steps=4, **old), tmp_path / "run")
    assert int(train(config(steps=4, **new), tmp_path / "run").step) == 4
    assert set(json.loads((tmp_path / "run/inputs.json").read_text())) == set(new)


def test_text_is_packed_once_into_the_workdir(config, losses, tmp_path, monkeypatch):
    """A start that stops while it packs keeps its shards. Another run can train on them."""
    monkeypatch.setattr(packing, "SENTENCES_A_SHARD", 200)
    monkeypatch.setattr(packing, "_cores", lambda: 1)
    made, pack_rows = [], packing.pack_rows

    def counted(sentences, **options):
        made.extend([sentences] if sentences else [])  # Without sentences: the form of rows.
        if len(made) == 3 and sentences:
            raise KeyboardInterrupt
        return pack_rows(sentences, **options)

    monkeypatch.setattr(packing, "pack_rows", counted)
    with pytest.raises(KeyboardInterrupt):
        train(config(), tmp_path / "run")
    (tmp_path / "other.txt").write_text("a sentence of another corpus\n" * 300)
    with pytest.raises(UserError, match=r"data.train='.*': its content has changed"):
        train(config(**{"data.train": f"{tmp_path}/other.txt"}), tmp_path / "run")
    train(config(steps=7), tmp_path / "run")
    assert len(made) == 3 + 1
    train(config(), tmp_path / "run")
    packed = {"data.train": f"packed:{tmp_path}/run/packed"}
    packed["data.tokenizer"] = f"{tmp_path}/run/tokenizer.model"
    train(config(**packed), tmp_path / "other")
    assert len(made) == 3 + 1 and losses(tmp_path / "other") == losses(tmp_path / "run")


def test_a_process_that_does_not_see_the_packed_text_is_refused(tmp_path, monkeypatch):
    """Only the first process packs."""
    monkeypatch.setattr(preparation.hosts, "is_first", lambda: False)
    with pytest.raises(UserError, match=r"packed' is not there, .* --workdir that all processes"):
        preparation.pack_once(tmp_path / "packed", (tmp_path / "packed").mkdir)
    assert not (tmp_path / "packed").exists()


def test_a_run_that_begins_while_another_reads_its_corpus_is_refused(config, tmp_path, monkeypatch):
    read = loop.open_corpus

    def slow(*arguments):
        (tmp_path / "config.json").write_text(config(seed=1).to_json())
        return read(*arguments)

    monkeypatch.setattr(loop, "open_corpus", slow)
    with pytest.raises(UserError, match=r"seed=0: the run in .* has 1"):
        train(config(steps=2), tmp_path)


def test_runs_of_older_versions_have_no_kind_and_are_recognised(config, losses, tmp_path):
    train(config(), tmp_path / "whole")
    train(config(steps=7), tmp_path / "run")
    file = tmp_path / "run/config.json"
    stored = json.loads(file.read_text())
    assert stored.pop("kind") == "language_model"
    stored["data"]["streams"] = 8
    file.write_text(json.dumps(stored))
    assert runs.open_run(tmp_path / "run").student is None
    train(config(), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert json.loads(file.read_text())["kind"] == "language_model"
    stored["data"].pop("streams")  # The hash depends on it.
    assert config_hash(config(steps=7)) == config_hash(ml_collections.ConfigDict(stored))


@pytest.mark.parametrize(
    ("schedule", "taken", "steps", "jumps"),
    [
        ("cosine", 50, 200, True),
        ("cosine", 50, 80, True),
        ("cosine", 3, 200, False),  # In the warm-up.
        ("cosine", 0, 200, False),
        ("constant", 50, 200, False),
        ("constant", 50, 63, False),  # `decay` of scripts/dev/gpu_draft.sh.
        ("constant", 90, 200, True),  # The rate has begun to fall.
        ("rsqrt", 50, 200, False),
    ],
)
def test_more_steps_must_not_make_the_learning_rate_jump(
    config, tmp_path, schedule, taken, steps, jumps
):
    made = config(steps=100, **{"optimizer.schedule": schedule})
    (tmp_path / "config.json").write_text(made.to_json())
    (tmp_path / "checkpoints" / str(taken)).mkdir(parents=True)
    made.steps = steps
    with pytest.raises(UserError, match=f"steps={steps}: ") if jumps else contextlib.nullcontext():
        preparation.check_workdir(made, tmp_path, made)


def test_runs_that_start_together_train_one_tokenizer(config, corpus, tmp_path, monkeypatch):
    trained, make = [], preparation.train_tokenizer

    def slow(*arguments):
        trained.append(arguments)
        time.sleep(0.3)
        return make(*arguments)

    monkeypatch.setattr(preparation, "train_tokenizer", slow)
    sentences = open_sentences(str(corpus / "train.txt"))
    shared = config(**{"data.tokenizer": str(tmp_path / "tokenizer.model")})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor() as pool:
        open_one = functools.partial(open_tokenizer, shared, corpus=sentences)
        first, second = pool.map(open_one, (tmp_path / "one", tmp_path / "two"))
    assert len(trained) == 1 and first.proto == second.proto
    (tmp_path / "tokenizer.model").unlink()  # Its folder moved; the run has a copy.
    assert open_one(tmp_path / "one").proto == first.proto and len(trained) == 1
