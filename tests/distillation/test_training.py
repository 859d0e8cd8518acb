"""Tests distillation: its scores are those of decoding, it resumes, and a student can draft."""

import dataclasses
import itertools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from spectr_jax import Policy, export, generate, get_method, load
from spectr_jax.distillation import labels, programs, students, training
from spectr_jax.distillation import teacher as teaching
from spectr_jax.loading.by_name import LOADERS
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.formats import runs
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama
from spectr_jax.training import metrics
from spectr_jax.training.metrics import read_metrics
from spectr_jax.transport import otm
from spectr_jax.utils.errors import Interrupted, UserError

from .conftest import LENGTH, about, get_config

KEPT = 120


@pytest.fixture(scope="module")
def labelled(teacher, sentences, tmp_path_factory):
    """Returns a folder with labels and features of two sets of sentences, `train` and `heldout`."""
    folder = tmp_path_factory.mktemp("labels")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(teaching, "SHARD", 10)
        patched.setattr(labels, "TOP", teacher.model.vocab_size)
        _write_labels(folder, teacher, sentences)
    return folder


def _write_labels(folder, teacher, sentences):
    fill = teaching.labeller(teacher)
    V, F = teacher.model.vocab_size, teacher.model.config.width
    for name, first, count in (("train", 0, 150), ("heldout", 150, 30)):
        labels.claim_folder(folder / name, about(teacher, features=F))
        texts = teaching.starting_at(teaching.read_texts(sentences, teacher.tokenizer), first)
        teaching.write_labels(folder / name, texts, count, fill, labels.row_type(V, LENGTH, F))


@pytest.fixture
def folder(labelled, all_labels, tmp_path, monkeypatch):
    """Returns a copy of the labels, which a test may change."""
    monkeypatch.setattr(metrics, "plot_curves", lambda *_: None)
    return shutil.copytree(labelled, tmp_path / "labels")


@pytest.fixture
def config(folder):
    """Returns a function that gives the config of a small run with changes."""

    def make(**changes):
        made = get_config("2m")
        model = {
            "layers": 1,
            "width": 16,
            "mlp": 32,
            "heads": 2,
            "kv_heads": 1,
            "head_tokens": KEPT,
            "embed_rank": 6,
        }
        made.model.update(model, dtype="float32")
        made.data.update(
            train=str(folder / "train"), heldout=(str(folder / "heldout"),), heldout_rows=100
        )
        made.update(
            teacher="school:teacher",
            steps=30,
            batch_size=8,
            log_every=10,
            eval_every=30,
            checkpoint_every=10,
        )
        made.optimizer.update(warmup_steps=3)
        made.update_from_flattened_dict(changes)
        return made

    return make


SEES = {"model.width": 24, "model.features": 24}
"""Config fields of a student that sees its teacher's features."""


def scores(workdir):
    return [
        record for record in read_metrics(workdir / "metrics.jsonl") if runs.REJECTION in record
    ][-1]


@pytest.mark.slow
def test_heldout_scores_equal_those_of_whole_distributions(config, folder, teacher):
    """The scores that a run computes from held-out labels equal those of the models' whole
    distributions, over the tokens after which a draft is requested."""
    for path in (folder / "heldout").glob("*.npy"):
        rows = np.load(path)
        likeliest = rows["log_probabilities"][..., 0]
        rows["drafted"] &= likeliest > np.median(
            likeliest[rows["segments"] > 0]
        )  # Drafts are requested only where the teacher is most certain.
        np.save(path, rows)
    training.distil(config(loss="lk", cross_entropy=0.1), folder / "run")
    student, found = load(str(folder / "run")), scores(folder / "run")
    rows = labels.open_labels(str(folder / "heldout"))
    batch = labels.batch_of(rows.take(np.arange(len(rows))))
    call = batch["inputs"], batch["positions"], causal(batch["segments"])
    real = batch["drafted"]
    assert 0 < real.sum() < 0.7 * (batch["segments"] > 0).sum()
    p, q = (
        np.asarray(jax.nn.softmax(each.model.extend(*call)[0]), np.float64)[real]
        for each in (student, teacher)
    )
    assert ((p > 0).sum(axis=1) <= KEPT).all()
    known = p > 0
    drafted = q * known / (q * known).sum(1, keepdims=True)
    nats = (drafted * np.log(np.where(known, drafted, 1) / np.where(known, p, 1))).sum(1)
    best = [otm.acceptance(*each, 4) for each in zip(p, q, strict=True)]
    sums = [np.minimum(p, q).sum(), sum(best), nats.sum(), len(p)]
    assert (
        found["eval_alpha_1_heldout"]
        == pytest.approx(sums[0] / sums[3], abs=2e-3)
        == 1 - found[runs.REJECTION]
    )
    assert found["eval_alpha_4_heldout"] == pytest.approx(sums[1] / sums[3], abs=4e-3)
    assert found["eval_kl_heldout"] == pytest.approx(sums[2] / sums[3], rel=0.01)
    assert sums[0] < sums[1] < sums[3]


@pytest.mark.slow
def test_training_raises_the_acceptance_rate(config, folder):
    training.distil(
        config(loss="lk_hybrid", steps=50, **{"optimizer.learning_rate": 0.03}), folder / "run"
    )
    logged = [
        record["alpha_1"]
        for record in read_metrics(folder / "run/metrics.jsonl")
        if "alpha_1" in record
    ]
    assert logged[-1] > logged[0] + 0.1


@pytest.mark.slow
def test_a_stopped_distillation_resumes_bit_for_bit(config, folder, monkeypatch, capsys):
    whole = training.distil(config(), folder / "whole")
    found = f"alpha_4_heldout {scores(folder / 'whole')['eval_alpha_4_heldout']:.4g},"
    assert re.search(
        f"^step 30, held out: rejection .*{re.escape(found)}", capsys.readouterr().out, re.M
    )
    stop = iter([False] * 14 + [True] * 99)
    with monkeypatch.context() as patched:
        patched.setattr(
            "spectr_jax.training.loop.Interruption.requested", lambda self, step: next(stop)
        )
        with pytest.raises(Interrupted, match="stopped and saved at step 15 of 30"):
            training.distil(config(), folder / "run")
    last, more = (labels.shard_path(folder / "train", number) for number in (14, 15))
    shutil.copy(last, more)  # The resumed run must ignore this new shard.
    resumed = training.distil(config(), folder / "run")
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    with pytest.raises(UserError, match=r"loss='tv': the run in .* has 'kl'"):
        training.distil(config(loss="tv"), folder / "run")
    for path in (more, last):
        path.unlink()
    with pytest.raises(
        UserError, match=r"rows, and had \d+ before; restore its shards, or label again"
    ):
        training.distil(config(), folder / "run")


@pytest.mark.slow
def test_a_trained_student_is_exported_and_loaded(config, folder, monkeypatch):
    training.distil(config(steps=12, eval_every=6), folder / "run")
    flags.FLAGS.mark_as_parsed()
    for dtype in ("bfloat16", "int8"):
        with flagsaver.flagsaver(model=str(folder / "run"), out=str(folder / dtype), dtype=dtype):
            export.main()
    assert not (folder / "int8/tokenizer.model").exists()
    # A run that is killed before its first record has no metrics.jsonl.
    (folder / "run/metrics.jsonl").unlink()
    monkeypatch.chdir(folder / "run")
    with flagsaver.flagsaver(model=".", out=str(folder / "here"), dtype=None):
        export.main()
    assert (folder / "here/run.safetensors").exists() and load(".@best").name == "run"
    specs = str(folder / "int8/run"), str(folder / "run@best")
    _, (stored, best) = load_pair("school:teacher", specs, "float32")
    assert stored.model.config == best.model.config and stored.name == best.name == "run"
    np.testing.assert_array_equal(stored.model.head.tokens[...], best.model.head.tokens[...])
    with pytest.raises(UserError, match="'run' is a draft and has no tokenizer of its own"):
        stored.tokenizer.encode("draft")
    monkeypatch.setattr(
        training, "tokens_by_mass", lambda rows, count: np.arange(count, dtype=np.int32)
    )
    kept = training.distil(config(steps=1, init=str(folder / "bfloat16/run")), folder / "further")
    further = load(str(folder / "further")).model.head.tokens[...]
    np.testing.assert_array_equal(
        further, stored.model.head.tokens[...], "a head keeps its own tokens"
    )
    near = training.distil(config(steps=1), folder / "anew")
    first = np.asarray(stored.model.head.linear.kernel[...])
    moved = [
        np.abs(np.asarray(each.params["head"]["linear"]["kernel"][...]) - first).max()
        for each in (kept, near)
    ]
    assert moved[0] < 0.1 < moved[1]
    with pytest.raises(
        UserError, match=r"has mlp=\d+, the config has 16; take the config of its size"
    ):
        training.distil(
            config(init=str(folder / "bfloat16/run"), **{"model.mlp": 16}), folder / "wider"
        )


def test_draft_levels_see_the_same_features_as_in_decoding(config, folder, teacher):
    """A student sees the teacher's features up to the first draft, and then its own. The test
    follows the path to each place of packed rows separately."""
    made = config(**SEES)
    shape = training.student_config(made.model, teacher.model.vocab_size, 64)
    student = students.build(shape, np.arange(KEPT, dtype=np.int32), nnx.Rngs(3))
    rows = labels.open_labels(str(folder / "train")).take(np.arange(3))
    batch = labels.batch_of(rows)
    found = np.asarray(jax.jit(students.levels, static_argnums=2)(student, batch, 3))
    for row, level in itertools.product(range(3), range(3)):
        place = (
            batch["inputs"][row : row + 1],
            batch["positions"][row : row + 1],
            causal(batch["segments"][row : row + 1]),
        )
        for at in np.flatnonzero((batch["segments"][row] > 0) & (batch["positions"][row] >= level))[
            ::5
        ]:
            seen = np.roll(batch["features"][row].astype(np.float32), 1, axis=0)
            seen[batch["positions"][row] == 0] = 0
            for back in range(level, -1, -1):
                own = np.asarray(student.hidden(*place, features_BxNxE=seen[None])[0])[0]
                if back:  # The next place sees the student's own features of this one.
                    seen[at - back + 1] = own[at - back]
            np.testing.assert_allclose(found[level, row, at], own[at], atol=2e-5)


def test_scores_count_only_paths_where_drafts_are_requested(config, folder, teacher):
    """A path counts if drafts are requested both at its start and at its end."""
    made = config(**SEES)
    shape = training.student_config(made.model, teacher.model.vocab_size, 64)
    student = students.build(shape, np.arange(KEPT, dtype=np.int32), nnx.Rngs(3))
    number_of = jnp.where(
        jnp.arange(teacher.model.vocab_size) < KEPT, jnp.arange(teacher.model.vocab_size), -1
    )
    rows = labels.open_labels(str(folder / "train")).take(np.arange(3))
    rows["drafted"] &= np.random.default_rng(1).random(rows["drafted"].shape) < 0.5
    batch = labels.batch_of(rows)
    inputs = programs.loss_inputs(student, batch, number_of, 3)
    found = programs.summed_scores(*inputs, batch)["tokens"]
    wanted = [0, 0, 0]
    for row in rows:
        for at, level in itertools.product(np.flatnonzero(row["segments"]), range(3)):
            same = at >= level and row["segments"][at - level] == row["segments"][at]
            wanted[level] += same and row["drafted"][at] and row["drafted"][at - level]
    assert found.tolist() == wanted and wanted[0] > wanted[1] > wanted[2]


def test_bfloat16_students_get_gradients_through_their_cache(config, folder, teacher):
    """Gradients in bfloat16 are close to those in float32, because the cache of `levels` is
    differentiable."""
    batch = labels.batch_of(labels.open_labels(str(folder / "train")).take(np.arange(3)))

    def gradient(dtype):
        made = config(**SEES, **{"model.dtype": dtype})
        shape = training.student_config(made.model, teacher.model.vocab_size, 64)
        student = students.build(shape, np.arange(KEPT, dtype=np.int32), nnx.Rngs(3))
        squares = nnx.grad(lambda model: jnp.sum(jnp.square(students.levels(model, batch, 2)[1])))
        found = nnx.jit(squares)(student)
        return np.asarray(found["blocks"][0]["qkv"]["kernel"][...], np.float32)

    in_float32, in_bfloat16 = gradient("float32"), gradient("bfloat16")
    of_keys_and_values = np.linalg.norm(in_float32[:, in_float32.shape[1] // 2 :])
    assert of_keys_and_values > 0.1 * np.linalg.norm(in_float32)
    assert np.linalg.norm(in_bfloat16 - in_float32) < 0.1 * of_keys_and_values


@pytest.mark.slow
def test_a_student_that_sees_features_drafts_for_its_teacher(
    config, folder, teacher, sentences, monkeypatch
):
    """The student learns at both levels. After export and loading it still drafts."""
    other = teacher._replace(
        model=Llama(dataclasses.replace(teacher.model.config, width=16), rngs=nnx.Rngs(0))
    )
    monkeypatch.setitem(LOADERS, "other", lambda name, dtype: other)
    with pytest.raises(
        UserError, match="teacher='other:teacher': is not the one that made the labels"
    ):
        training.distil(config(teacher="other:teacher", **SEES), folder / "other")
    with pytest.raises(UserError, match=r"model\.features=16: .* has 24 features"):
        training.distil(config(**{"model.features": 16}), folder / "narrow")
    training.distil(config(steps=60, **SEES, **{"optimizer.learning_rate": 0.02}), folder / "run")
    found = scores(folder / "run")
    levels = found["eval_alpha_1_heldout"], found["eval_alpha_1_heldout_level_2"]
    assert min(levels) > 0.45, "the student must learn at both levels"
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(model=str(folder / "run"), out=str(folder / "int8"), dtype="int8"):
        export.main()
    target, (draft,) = load_pair("school:teacher", (str(folder / "int8/run"),), "int8")
    prompts, lengths = target.tokenizer.prompts(sentences[:3])
    method, greedy = get_method("block", draft_length=2), Policy(temperature=0.0)
    expected = generate(
        jax.random.key(0), get_method("baseline"), target, None, prompts, lengths, 8, greedy
    )
    made = generate(jax.random.key(0), method, target, draft, prompts, lengths, 8, greedy)
    np.testing.assert_array_equal(made.tokens, expected.tokens)
    assert made.target_calls.sum() < expected.target_calls.sum()


def test_older_runs_of_another_kind_or_without_counts_are_reported(
    config, folder, monkeypatch, capsys
):
    monkeypatch.setattr(training, "run", lambda *_, **__: None)
    training.distil(config(), folder / "run")
    about = json.loads((folder / "run" / runs.STUDENT).read_text())
    assert sum(about.pop("rows")) > 0
    (folder / "run" / runs.STUDENT).write_text(json.dumps(about))
    (folder / "run" / runs.CONFIG).write_text(config().to_json())
    assert "all rows" not in capsys.readouterr().out
    training.distil(config(), folder / "run")
    assert "does not say how many rows the run began with" in capsys.readouterr().out
    (folder / "run" / runs.CONFIG).write_text('{"seed": 5, "model": {}}')
    with pytest.raises(UserError, match=r"kind='student': the run in .* has 'language_model'"):
        training.distil(config(), folder / "run")


def test_invalid_distillation_configs_and_labels_are_refused(config, folder, teacher):
    cases = {
        "unknown loss 'sk'": {"loss": "sk"},
        "cross_entropy=-1.0: ": {"cross_entropy": -1.0},
        "model.embed_rank=-1: ": {"model.embed_rank": -1},
        "head_tokens=999: must be at most vocab_size": {"model.head_tokens": 999},
        "no labels that can be read": {"data.train": str(folder / "none")},
        "no model at 'none'": {"teacher": "none"},
        "model.width=18: .* model.heads=2": {"model.width": 18},
        r"model.feature_layers=\(1,\): .* online=True": {**SEES, "model.feature_layers": (1,)},
    }
    for message, changes in cases.items():
        with pytest.raises(UserError, match=message):
            training.distil(config(**changes), folder / "refused" / str(len(message)))
    for mlp in (24, 16):  # This start fails before it writes its config.
        with pytest.raises(UserError, match="no model at 'none'"):
            training.distil(config(teacher="none", **{"model.mlp": mlp}), folder / "again")
        assert runs.read_student(folder / "again").shape.mlp == mlp
    with pytest.raises(UserError, match=r"no complete checkpoint in .*; train there first"):
        (folder / "again/config.json").write_text(json.dumps({"teacher": "none"}))
        load(str(folder / "again"))
    with pytest.raises(UserError, match="has two folders of one name"):
        training.distil(config(**{"data.heldout": (str(folder / "heldout"),) * 2}), folder / "run")
    index = json.loads((folder / "heldout" / labels.INDEX).read_text())
    (folder / "heldout" / labels.INDEX).write_text(json.dumps({**index, "vocabulary": "another"}))
    with pytest.raises(UserError, match="labels of another teacher than"):
        training.distil(config(), folder / "run")
    for name, weights in (("heldout", "aaa"), ("train", "bbb")):
        index = json.loads((folder / name / labels.INDEX).read_text())
        index.update(
            vocabulary=teacher.tokenizer.vocabulary, teacher="school:teacher", weights=weights
        )
        (folder / name / labels.INDEX).write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=r"/heldout' has labels of 'school:teacher' \(aaa\) and .* another teacher"
    ):
        training.distil(config(), folder / "run")
