"""Tests students whose teacher labels sequences during training.

The labels must equal those that `label` stores, and a stopped run must resume bit for bit.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import load
from spectr_jax.distillation import labels, losses, online, programs, students, training
from spectr_jax.distillation import teacher as teaching
from spectr_jax.models.formats import runs
from spectr_jax.models.formats.weights import save_weights
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import LlamaConfig
from spectr_jax.models.vocabulary import Constant
from spectr_jax.training import metrics
from spectr_jax.training.metrics import read_metrics
from spectr_jax.training.optimizer import make_schedule
from spectr_jax.utils.errors import Interrupted, UserError

from .conftest import LENGTH, about, get_config

KEPT = 120


@pytest.fixture
def config(all_labels, teacher, sentences, tmp_path, monkeypatch):
    """Returns a function that gives the config of a small run with changes.

    Its sources are a corpus and a folder of labelled rows.
    """
    monkeypatch.setattr(metrics, "plot_curves", lambda *_: None)
    (tmp_path / "train.txt").write_text("\n".join(sentences[:150]))
    (tmp_path / "heldout.txt").write_text("\n".join(sentences[150:]))
    labels.claim_folder(tmp_path / "chats", about(teacher))
    row_type = labels.row_type(teacher.model.vocab_size, LENGTH)
    texts = teaching.starting_at(teaching.read_texts(sentences, teacher.tokenizer), 150)
    monkeypatch.setattr(teaching, "SHARD", 10)
    teaching.write_labels(tmp_path / "chats", texts, 50, teaching.labeller(teacher), row_type)

    def make(**changes):
        made = get_config("online")
        model = {
            "layers": 1,
            "width": 24,
            "mlp": 32,
            "heads": 2,
            "kv_heads": 1,
            "head_tokens": KEPT,
            "embed_rank": 6,
        }
        made.model.update(model, features=24, feature_layers=(1,), dtype="float32")
        made.data.update(
            train=f"{tmp_path / 'train.txt'},{tmp_path / 'chats'}", shares=(3, 1), length=LENGTH
        )
        made.data.update(
            heldout=(str(tmp_path / "heldout.txt"), str(tmp_path / "chats")), heldout_rows=9
        )
        made.update(
            teacher="school:teacher", teacher_dtype="float32", steps=12, batch_size=16, depth=2
        )
        made.update(log_every=4, eval_every=6, checkpoint_every=4)
        made.optimizer.update(warmup_steps=2, learning_rate=0.02)
        made.update_from_flattened_dict(changes)
        return made

    return make


def test_online_batches_mix_sources_and_match_stored_labels(config, teacher, sentences, tmp_path):
    made = online.OnlineRows(config(), teacher)
    chat_rows = len(labels.open_labels(config().data.train.split(",")[1]))
    assert made.counts == (150, chat_rows)
    with pytest.raises(UserError, match=r"data\.train: names 2 sources, and named 1 when"):
        online.OnlineRows(config(), teacher, (150,))
    batch = made.batches(config(), tmp_path)(0, slice(None))
    assert set(batch) == {"inputs", "segments", "positions", "targets", "drafted"}
    corpus, chats = (
        {tuple(teacher.tokenizer.prompt(sentence)[:LENGTH]) for sentence in part}
        for part in (sentences[:150], sentences[150:])
    )
    origins = []  # For each row, the sources that contain all its sequences.
    for tokens, segments in zip(batch["inputs"], batch["segments"], strict=True):
        numbers = range(1, segments.max() + 1)
        row = {tuple(tokens[segments == number].tolist()) for number in numbers}
        origins.append(
            [name for name, part in (("corpus", corpus), ("chats", chats)) if row <= part]
        )
    assert len({row.tobytes() for row in batch["inputs"]}) == 16, "an epoch has each row once"
    assert origins == [["corpus"]] * 12 + [["chats"]] * 4
    found = jax.jit(teaching.with_labels, static_argnums=2)(made.frozen, batch, (1,))
    rows = np.zeros(16, labels.row_type(teacher.model.vocab_size, LENGTH, 24))
    rows["tokens"], rows["segments"] = batch["inputs"], batch["segments"]
    fill = teaching.labeller(teacher)
    for part in np.split(rows, 4):
        fill(part)
    real = batch["segments"] > 0
    np.testing.assert_array_equal(np.asarray(found["top"])[real][:, 0], rows["top"][real][:, 0])
    np.testing.assert_allclose(
        np.asarray(found["log_probabilities"])[real], rows["log_probabilities"][real], atol=6e-3
    )
    np.testing.assert_allclose(
        np.asarray(found["features"])[real][:, :24], rows["features"][real], atol=4e-3
    )
    assert found["features"].shape[-1] == 48


def test_online_labels_cover_every_token_that_the_head_scores(config, teacher, tmp_path):
    """The acceptance rate in a training step is sum min(p, q) over the whole vocabulary."""
    made = online.OnlineRows(config(), teacher)
    batch = made.batches(config(), tmp_path)(0, slice(None))
    tokens = np.arange(0, 2 * KEPT, 2, dtype=np.int32)
    labelled = teaching.with_labels(made.frozen, batch, (1,), jnp.asarray(tokens))
    place = batch["inputs"], batch["positions"], causal(batch["segments"])
    q = jax.nn.softmax(made.frozen.merge().extend(*place)[0])
    np.testing.assert_allclose(jnp.exp(labelled["log_probabilities"]), q[..., tokens], atol=1e-5)
    shape = training.student_config(config().model, made.vocab_size, 64)
    student = students.build(shape, tokens, nnx.Rngs(3))
    number_of = np.full(made.vocab_size, -1, np.int32)
    number_of[tokens] = np.arange(KEPT)
    _, places = programs.loss_inputs(student, labelled, jnp.asarray(number_of), 1)
    p = jax.nn.softmax(student.head.linear(students.levels(student, labelled, 1)[0]))
    wanted = np.minimum(p, q[..., tokens]).sum(-1)
    found = jax.vmap(jax.vmap(losses.acceptance))(jax.tree.map(lambda part: part[0], places))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_target_features_of_several_layers_are_projected_and_summed(config, teacher, tmp_path):
    """A student with features of two layers has the same hidden states as a student with one layer
    that gets the projected sum. Both use their own features along a drafted path."""
    made = online.OnlineRows(config(), teacher)
    read = made.batches(config(), tmp_path)(0, slice(None))
    batch = teaching.with_labels(made.frozen, read, (1,))
    shape = training.student_config(config().model, made.vocab_size, 64)
    deep = students.build(shape, np.arange(KEPT, dtype=np.int32), nnx.Rngs(3))
    deep.fuse.kernel[...] = jax.random.normal(jax.random.key(0), deep.fuse.kernel.shape)
    plain = students.build(
        dataclasses.replace(shape, feature_layers=()), np.arange(KEPT, dtype=np.int32), nnx.Rngs(0)
    )
    kept = nnx.state(plain).flat_state()
    nnx.update(
        plain,
        nnx.State.from_flat_path(
            {path: dict(nnx.state(deep).flat_state())[path] for path, _ in kept}
        ),
    )
    last, output = np.split(np.asarray(batch["features"]), 2, axis=-1)
    summed = (
        last
        + output
        / np.sqrt((output**2).mean(-1, keepdims=True) + shape.norm_epsilon)
        @ deep.fuse.kernel[...]
    )
    found = students.levels(deep, batch, 3)
    wanted = students.levels(plain, {**batch, "features": summed}, 3)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    assert np.abs(students.levels(plain, {**batch, "features": last}, 3)[2] - wanted[2]).max() > 0.1


@pytest.mark.slow
def test_a_stopped_online_run_resumes_bit_for_bit(config, tmp_path, monkeypatch):
    whole = training.distil(config(), tmp_path / "whole")
    found = [
        record
        for record in read_metrics(tmp_path / "whole/metrics.jsonl")
        if runs.REJECTION in record
    ][-1]
    assert {"eval_alpha_1_heldout", "eval_alpha_4_heldout_level_2", "eval_alpha_1_chats"} <= set(
        found
    )
    stop = iter([False] * 6 + [True] * 99)
    with monkeypatch.context() as patched:
        patched.setattr(
            "spectr_jax.training.loop.Interruption.requested", lambda self, step: next(stop)
        )
        with pytest.raises(Interrupted, match="stopped and saved at step 7 of 12"):
            training.distil(config(), tmp_path / "run")
    resumed = training.distil(config(), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    jax.tree.map(np.testing.assert_array_equal, resumed.opt_state, whole.opt_state)
    (tmp_path / "train.txt").write_text("one sentence\n" * 30)
    with pytest.raises(
        UserError, match=r"train.txt': has 30 sentences, and had 150 before; restore the corpus"
    ):
        training.distil(config(), tmp_path / "run")


@pytest.mark.slow
def test_training_adds_a_feature_layer_to_a_trained_draft(config, teacher, tmp_path):
    """Training starts from the draft and learns to use the added layer."""
    tokens = np.arange(KEPT, dtype=np.int32)
    shape = LlamaConfig(
        1,
        24,
        32,
        2,
        1,
        12,
        teacher.model.vocab_size,
        64,
        embed_rank=6,
        head_tokens=KEPT,
        features=24,
    )
    draft = students.build(shape, tokens, nnx.Rngs(5))
    save_weights(tmp_path / "one", draft, teacher.tokenizer.vocabulary, {})
    state = training.distil(
        config(init=str(tmp_path / "one"), steps=1, **{"optimizer.learning_rate": 0.0}),
        tmp_path / "as",
    )
    stored = load(str(tmp_path / "one")).model
    assert not np.asarray(state.params["fuse"]["kernel"][...]).any()
    np.testing.assert_array_equal(state.params["join"]["kernel"][...], stored.join.kernel[...])
    training.distil(config(init=str(tmp_path / "one")), tmp_path / "run")
    learnt = load(str(tmp_path / "run"))
    assert learnt.model.feature_layers == (1,) and np.asarray(learnt.model.fuse.kernel[...]).any()
    np.testing.assert_array_equal(
        learnt.model.head.tokens[...], nnx.state(draft, Constant)["head"]["tokens"][...]
    )


def test_online_training_reads_rows_without_labels(config, teacher, sentences, tmp_path):
    """`label --labels=false` writes rows without labels. Training without `online` refuses them."""
    texts = teaching.starting_at(teaching.read_texts(sentences, teacher.tokenizer), 150)
    for name, labelled, fill in (
        ("bare", False, lambda rows: None),
        ("full", True, teaching.labeller(teacher)),
    ):
        labels.claim_folder(tmp_path / name, about(teacher, labelled=labelled))
        row_type = labels.row_type(teacher.model.vocab_size, LENGTH, labelled=labelled)
        teaching.write_labels(tmp_path / name, texts, 10, fill, row_type)
    bare, full = (labels.open_labels(str(tmp_path / name)) for name in ("bare", "full"))
    assert not bare.labelled and bare[0].nbytes < 0.01 * full[0].nbytes
    options = [
        config(**{"data.train": str(tmp_path / name), "data.shares": (1,)})
        for name in ("bare", "full")
    ]
    first, second = (
        online.OnlineRows(made, teacher).batches(made, tmp_path)(0, slice(None)) for made in options
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    changes = {"data.train": str(tmp_path / "bare"), "model.feature_layers": ()}
    with pytest.raises(
        UserError, match="must have labels, which `label --labels=false` leaves out"
    ):
        training.distil(config(online=False, **changes), tmp_path / "labels")


def test_invalid_online_configs_are_refused(config, tmp_path):
    cases = {
        r"data.shares=\(1, 2\): must divide batch_size=16 among the 2 sources": {
            "data.shares": (1, 2)
        },
        "needs 30; label again with the teacher": {"data.length": 30},
        "teacher='': ": {"teacher": ""},
        "no text file matches": {"data.train": str(tmp_path / "none"), "data.shares": (1,)},
        "model.features=12: .* has 24 features": {"model.features": 12},
        r"model.feature_layers=\(1, 2\): .* has 1 layers": {"model.feature_layers": (1, 2)},
    }
    for message, changes in cases.items():
        with pytest.raises(UserError, match=message):
            training.distil(config(**changes), tmp_path / "refused")


@pytest.mark.parametrize(
    ("changes", "lines", "message"),
    [
        ({"data.length": 1}, {}, "data.length=1: "),
        ({}, {"train": ["of"] * 40}, r"data.train='.*train.txt': has only sentences of one token"),
        ({}, {"heldout": ["of"] * 9}, r"data.heldout='.*heldout.txt': its first 9 sentences"),
    ],
    ids=["length 1", "one-token text", "one-token held-out text"],
)
def test_text_without_anything_to_learn_is_refused(
    config, teacher, tmp_path, monkeypatch, changes, lines, message
):
    """Such text has no rows."""
    prompt = teacher.tokenizer.prompt
    monkeypatch.setattr(
        teacher.tokenizer, "prompt", lambda text: prompt(text)[: 1 + (text != "of")]
    )
    for name, sentences in lines.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(sentences))
    with pytest.raises(UserError, match=message):
        training.distil(config(**changes), tmp_path / "refused")
    assert not (tmp_path / "refused" / runs.CONFIG).exists()


def test_the_content_of_sources_decides_whether_a_run_resumes(
    config, teacher, tmp_path, monkeypatch
):
    """Another corpus with the same number of sentences, and another teacher, are refused."""
    monkeypatch.setattr(training, "run", lambda *_, **__: None)
    monkeypatch.setattr(training, "make_programs", lambda *_: types.SimpleNamespace(evaluate=None))
    folder = tmp_path / "run"
    training.distil(config(), folder)
    (folder / runs.CONFIG).write_text(config().to_json())
    training.distil(config(), folder)
    heldout = tmp_path / "heldout.txt"
    heldout.rename(tmp_path / "moved.txt")
    moved = {"data.heldout": (str(tmp_path / "moved.txt"), str(tmp_path / "chats"))}
    training.distil(config(**moved), folder)
    for name in ("train.txt", "moved.txt"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before.replace(before.splitlines()[3], "emits a prefix"))
        with pytest.raises(UserError, match=f"{name}.*: its content has changed"):
            training.distil(config(**moved), folder)
        (tmp_path / name).write_text(before)
    teacher.model.head.kernel[...] *= 2
    with pytest.raises(UserError, match="teacher='school:teacher': its content has changed"):
        training.distil(config(**moved), folder)
    teacher.model.head.kernel[...] /= 2


def test_a_constant_learning_rate_decays_at_the_end():
    """A lower `steps` moves the decay and changes nothing else."""
    options = get_config("online").optimizer
    options.update(schedule="constant", learning_rate=0.5, warmup_steps=10)
    long, short = (make_schedule(options, steps) for steps in (200, 100))
    assert [float(long(step)) for step in (5, 10, 160)] == [0.25, 0.5, 0.5] and float(
        long(200)
    ) == 0.0
    assert [round(float(short(step)), 6) for step in (10, 80, 90, 100)] == [0.5, 0.5, 0.25, 0.0]


def test_metric_names_are_short_forms_of_source_paths():
    found = map(
        online.short_name,
        ("a/heldout-00000-of-00001.txt.xz", "my/held*", "tfds:lm1b:test", "labels/chats"),
    )
    assert list(found) == ["heldout_00000_of_00001", "held", "tfds_lm1b_test", "chats"]
