"""Tests what training runs learn, which files they write and which configs they refuse."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx

from spectr_jax import export
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.packing import pack
from spectr_jax.data.tokenizer import Tokenizer, train_tokenizer
from spectr_jax.loading.by_name import load
from spectr_jax.models.formats.weights import load_weights, save_weights, weight_files
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.leaves import cast, named_leaves
from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract
from spectr_jax.training import preparation, throughput
from spectr_jax.training.config import train_config
from spectr_jax.training.heldout import evaluate, pack_heldout
from spectr_jax.training.interruption import Interruption
from spectr_jax.training.loop import train
from spectr_jax.training.metrics import read_metrics
from spectr_jax.training.preparation import open_tokenizer
from spectr_jax.training.programs import make_programs
from spectr_jax.training.step import eval_step, init_state, summed_loss, train_step
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError


@pytest.mark.own_programs
def test_a_run_lowers_the_loss_and_writes_its_files(config, losses, tmp_path):
    train(config(steps=60, eval_every=30, checkpoint_every=30), tmp_path / "run")
    curve = losses(tmp_path / "run")
    assert list(curve) == list(range(1, 61))
    assert curve[60] < curve[1] - 1
    evaluated = [
        record
        for record in read_metrics(tmp_path / "run/metrics.jsonl")
        if "eval_nats_per_token" in record
    ]
    assert [record["step"] for record in evaluated] == [30, 60]
    assert evaluated[1]["eval_bits_per_character"] < evaluated[0]["eval_bits_per_character"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json",
        "inputs.json",
        "tokenizer.model",
        "metrics.jsonl",
        "loss.png",
        "checkpoints",
        "packed",
        "lock",
    }
    assert load(str(tmp_path / "run")).model.vocab_size == 320


@pytest.mark.slow
def test_an_early_exit_is_trained_with_the_model(config, corpus, tmp_path):
    changes = {"steps": 40, "eval_every": 40, "checkpoint_every": 40, "model.layers": 2}
    train(config(**changes, **{"early_exit.layer": 1}), tmp_path / "exit")
    train(config(**changes), tmp_path / "none")
    logged = [
        record for record in read_metrics(tmp_path / "exit/metrics.jsonl") if "exit_loss" in record
    ]
    assert len(logged) == 40 and logged[-1]["exit_loss"] < logged[0]["exit_loss"] - 0.5
    assert not any(
        "exit_loss" in record for record in read_metrics(tmp_path / "none/metrics.jsonl")
    )
    nats_after_one = {}

    @nnx.jit
    def scored(model, batch):
        call = batch["inputs"], batch["positions"], causal(batch["segments"])
        return *summed_loss(model, batch, exit_layer=1), *(
            model.extend(*call, layers=layers)[0] for layers in (2, 1)
        )

    for name in ("exit", "none"):
        model = load(str(tmp_path / name)).model
        sentences = (corpus / "heldout.txt").read_text().splitlines()
        tokens = jnp.asarray(
            [load(str(tmp_path / name)).tokenizer.encode(" ".join(sentences))[:20]]
        )
        positions = jnp.arange(19)[None]
        segments = jnp.ones_like(positions)
        batch = {
            "inputs": tokens[:, :-1],
            "positions": positions,
            "segments": segments,
            "targets": tokens[:, 1:],
        }
        nats, exit_nats, count, *logits_of_layers = scored(model, batch)
        for ours, logits in zip((nats, exit_nats), logits_of_layers, strict=True):
            theirs = -jnp.take_along_axis(
                jax.nn.log_softmax(logits), batch["targets"][..., None], -1
            ).sum()
            assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
        assert count == 19
        nats_after_one[name] = float(exit_nats)
        evaluated = read_metrics(tmp_path / name / "metrics.jsonl")[-1]
        assert ("eval_exit_nats_per_token" in evaluated) == (name == "exit")
    assert nats_after_one["exit"] < nats_after_one["none"]


def test_a_resumed_run_equals_an_uninterrupted_one(config, losses, tmp_path):
    """The second start has a larger `steps` than the first."""
    whole = train(config(), tmp_path / "whole")
    train(config(steps=7), tmp_path / "parts")
    resumed = train(config(), tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for ours, theirs in zip(
        jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_finished_run_stays_as_it_is(config, tmp_path, capsys):
    train(config(steps=2, eval_every=2), tmp_path)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert int(train(config(steps=2, eval_every=2), tmp_path).step) == 2
    out, error = capsys.readouterr()
    assert (out, error) == ("finished: 2 steps\n", "")
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_a_signal_in_the_last_step_lets_the_run_finish(config, tmp_path, monkeypatch):
    monkeypatch.setattr(Interruption, "requested", lambda self, step: step == 2)
    assert int(train(config(steps=2, eval_every=2), tmp_path).step) == 2


def test_a_second_run_in_the_same_workdir_is_refused(config, tmp_path):
    with (
        preparation.locked(tmp_path),
        pytest.raises(UserError, match="another process trains there"),
    ):
        train(config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with preparation.locked(tmp_path):
        pass


@pytest.mark.slow
def test_the_newest_and_the_best_checkpoint_are_kept(config, losses, tmp_path):
    """A growing learning rate ruins the model, so an early checkpoint is the best."""
    changes = {
        "steps": 60,
        "eval_every": 5,
        "checkpoint_every": 5,
        "keep_checkpoints": 2,
        "optimizer.warmup_steps": 400,
    }
    train(config(**{**changes, "optimizer.learning_rate": 20.0}), tmp_path)
    evaluated = [
        record
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if "eval_bits_per_character" in record
    ]
    best = min(evaluated, key=lambda record: record["eval_bits_per_character"])
    assert best["step"] < 55
    assert {int(path.name) for path in (tmp_path / "checkpoints").iterdir()} == {
        best["step"],
        55,
        60,
    }
    kept = load(f"{tmp_path}@best").model
    assert _nats(kept, tmp_path) == pytest.approx(best["eval_nats_per_token"], rel=1e-5)
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(model=f"{tmp_path}@best", out=f"{tmp_path}/out", part_mb=0.015):
        export.main()
    other = f"has the best checkpoint as '{tmp_path.name}', and --model names the newest one"
    newest = flagsaver.flagsaver(model=str(tmp_path), out=f"{tmp_path}/out")
    with newest, pytest.raises(UserError, match=other):
        export.main()
    exported = load(str(tmp_path / "out" / tmp_path.name)).model
    files = weight_files(tmp_path / "out" / tmp_path.name)
    assert len(files) == 2
    wanted = named_leaves(cast(nnx.state(kept), "bfloat16"))
    for name, ours in named_leaves(nnx.state(exported)).items():
        np.testing.assert_array_equal(ours, wanted[name].astype("float32"))
    assert _nats(load(str(tmp_path)).model, tmp_path) == pytest.approx(
        evaluated[-1]["eval_nats_per_token"], rel=1e-5
    )


def _nats(model, workdir):
    config = train_config("draft_2m")
    config.update(json.loads((workdir / "config.json").read_text()))
    sentences = open_sentences(config.data.heldout)
    tokenizer = Tokenizer(workdir / "tokenizer.model")
    heldout = pack_heldout(
        sentences, tokenizer, rows=config.batch_size, length=config.model.context
    )
    graphdef, params = nnx.split(model)
    score = jax.jit(functools.partial(eval_step, graphdef))
    return evaluate(score, params, heldout, sharding.make_mesh())["eval_nats_per_token"]


def test_metrics_record_mfu_and_time_waiting_for_data(config, tmp_path):
    train(config(steps=4), tmp_path)
    record = read_metrics(tmp_path / "metrics.jsonl")[3]
    programs = make_programs(config(), sharding.make_mesh())
    used = record["tokens_per_second"] * programs.flops_per_token
    assert record["mfu"] == pytest.approx(used / throughput.peak_flops(), abs=6e-5)
    assert 0 < record["mfu"] < 1 and 0 <= record["waiting_for_data"] < 1


def test_flops_per_token_match_a_count_by_hand():
    """A token costs 6 FLOPs per parameter outside the embedding, plus those of attention."""
    width, mlp, vocab, layers = 768, 3072, 8192, 12
    weights = (
        layers * (4 * width * width + 2 * width * mlp + mlp + width + 4 * width)
        + 2 * width
        + vocab * width
        + vocab
    )
    programs = make_programs(train_config("target_97m"), sharding.make_mesh())
    assert programs.flops_per_token == 6 * weights + 12 * layers * width * 128


@pytest.mark.own_programs
def test_training_compiles_nothing_after_step_two(
    config, tmp_path, monkeypatch, count_compilations
):
    """The steps that are checked evaluate and save checkpoints too."""
    seen = []
    after = Interruption.requested
    monkeypatch.setattr(
        Interruption,
        "requested",
        lambda self, step: (seen.append(len(compiled)), after(self, step))[1],
    )
    with count_compilations() as compiled:
        train(config(steps=12, eval_every=2, checkpoint_every=2), tmp_path)
    assert seen[0] > 0 and len(seen) == 12
    assert seen[2] == seen[-1] == len(compiled)


def test_accumulated_gradients_equal_those_of_the_whole_batch(config):
    """The parts have different numbers of tokens, so a plain mean of their gradients is wrong."""
    shape = TransformerConfig(**{**config().model, "dropout": 0.0})
    graphdef, _ = abstract(shape)
    optimizer = optax.sgd(1.0)
    state = init_state(Transformer(shape, rngs=nnx.Rngs(0)), optimizer, jax.random.key(0))
    rng = np.random.default_rng(0)
    segments = np.arange(32) < rng.integers(1, 32, (8, 1))
    tokens = rng.integers(4, 300, (2, 8, 32))
    batch = {
        "inputs": tokens[0],
        "targets": tokens[1],
        "segments": segments * 1,
        "positions": np.tile(np.arange(32), (8, 1)),
    }
    results = []
    for options in ({}, {"accumulate": 4}, {"accumulate": 2, "remat": True}):
        step = functools.partial(train_step, graphdef, optimizer, config(**options))
        results.append(jax.jit(step)(state, batch))
    whole, metrics = results[0]
    moved = jax.tree.map(
        lambda new, old: float(jnp.abs(new - old).max()), whole.params, state.params
    )
    assert max(jax.tree.leaves(moved)) > 0.01
    for parts, theirs in results[1:]:
        np.testing.assert_allclose(theirs["loss"], metrics["loss"], rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), parts.params, whole.params
        )


def test_a_changed_config_is_refused_without_touching_the_run(config, tmp_path):
    train(config(steps=4), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"optimizer.learning_rate=0.02: the run in .* has 0.01; choose a new"
    ):
        train(config(**{"optimizer.learning_rate": 0.02}), tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1: must be at least 1"),
        ({"model.heads": 3}, "model.width=16: must be a multiple of 2 \\* model.heads=3"),
        ({"model.dtype": "float8"}, "model.dtype='float8': must be 'float32'"),
        ({"model.dropout": 1.0}, r"model.dropout=1.0: must be in \[0, 1\)"),
        ({"optimizer.schedule": "rsqr"}, "unknown optimizer.schedule 'rsqr'; did you mean 'rsqrt'"),
        ({"mesh.fsdp": 64}, "mesh.fsdp=64: must divide"),
        ({"init": "/nowhere/model"}, "init='/nowhere/model': is not a model; give a file"),
        ({"data.train": "/nowhere/*.txt"}, "no text file matches '/nowhere/"),
        ({"model.vocab_size": 90_000}, "no vocabulary of 90000 pieces can be trained"),
    ],
)
def test_invalid_config_values_are_refused_before_training(config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(config(**changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_init_starts_training_from_given_weights(config, corpus, losses, tmp_path):
    train(config(steps=20), tmp_path / "first")
    before = load(str(tmp_path / "first"))
    file, *_ = save_weights(tmp_path / "given", before.model, before.tokenizer.proto, {})
    given = {"init": str(file)}
    with pytest.raises(UserError, match=r"init=.*: there is no tokenizer at .*tokenizer\.model'"):
        train(config(**given), tmp_path / "refused" / "tokenizer")
    (tmp_path / "tokenizer.model").write_bytes(before.tokenizer.proto)
    still = train(config(steps=1, **given, **{"optimizer.learning_rate": 0.0}), tmp_path / "still")
    kept, _ = load_weights(file)
    jax.tree.map(np.testing.assert_array_equal, still.params, nnx.state(kept))
    train(config(**given, seed=1), tmp_path / "second")
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[1] < first[10] and losses(tmp_path / "still")[1] < first[10]

    parts = tmp_path / "parts"
    train(config(steps=5, **given, seed=1), parts)
    resumed = train(
        config(**given, seed=1), parts
    )  # The run continues from its checkpoint instead of loading the weights again.
    assert losses(parts) == second and int(resumed.step) == 12

    train_tokenizer(
        list(open_sentences(str(corpus / "train.txt")))[:300], tmp_path / "own.model", 320
    )
    for changes, message in (
        ({"model.layers": 2}, r"model.layers=2: init=.* has 1; change one of them"),
        ({"data.tokenizer": str(tmp_path / "own.model")}, r"init='.*data\.tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            train(config(**{**given, **changes}), tmp_path / "refused" / next(iter(changes)))
    assert not list(tmp_path.glob("refused/*/config.json"))


def test_a_run_resumes_without_the_weights_that_it_began_with(config, tmp_path):
    before = train(config(steps=1), tmp_path / "first")
    tokenizer = (tmp_path / "first/tokenizer.model").read_bytes()
    (tmp_path / "given").mkdir()
    (tmp_path / "given/tokenizer.model").write_bytes(tokenizer)
    save_weights(tmp_path / "given/model", load(str(tmp_path / "first")).model, tokenizer, {})
    given = config(init=str(tmp_path / "given/model"), steps=2)
    train(given, tmp_path / "run")
    shutil.rmtree(tmp_path / "given")
    given.steps = 3
    assert int(train(given, tmp_path / "run").step) == 3 == int(before.step) + 2


def test_an_unknown_config_field_is_refused_with_a_suggestion(config, tmp_path):
    wrong = config()
    with wrong.unlocked():
        wrong.optimizer.learning_rat = 0.1
    with pytest.raises(
        UserError,
        match=r"unknown config field 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'",
    ):
        train(wrong, tmp_path)


def test_a_shared_tokenizer_is_trained_once_and_reported(config, corpus, tmp_path, capsys):
    shared, sentences = tmp_path / "tokenizer.model", open_sentences(str(corpus / "train.txt"))
    for name, said in (
        ("one", "training a tokenizer of 320 pieces"),
        ("two", "using the tokenizer that is there"),
        ("two", ""),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        open_tokenizer(config(**{"data.tokenizer": str(shared)}), tmp_path / name, sentences)
        assert capsys.readouterr().out == (f"{said}: {shared}\n" if said else "")


def test_a_packed_corpus_trains_only_with_its_own_tokenizer(config, corpus, losses, tmp_path):
    sentences = open_sentences(str(corpus / "train.txt"))
    tokenizer = train_tokenizer(sentences, tmp_path / "tokenizer.model", 320)
    pack(sentences, tokenizer, tmp_path / "packed", length=32)
    packed = {
        "data.train": f"packed:{tmp_path}/packed",
        "data.tokenizer": str(tmp_path / "packed/tokenizer.model"),
    }
    whole = train(config(**packed), tmp_path / "run")
    train(config(steps=7, **packed), tmp_path / "parts")
    resumed = train(config(**packed), tmp_path / "parts")
    assert losses(tmp_path / "run")[12] < losses(tmp_path / "run")[1]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    other = tmp_path / "other.model"
    train_tokenizer(list(sentences)[:300], other, 320)
    for tokenizer_path in (other, tmp_path / "none.model", ""):
        with pytest.raises(
            UserError,
            match=r"is not (there, and should be )?the tokenizer that .* was packed with; give data.tokenizer=",
        ):
            train(config(**{**packed, "data.tokenizer": str(tokenizer_path)}), tmp_path / "refused")
    with pytest.raises(UserError, match=r"model.context=24: .* has rows of 32 tokens"):
        train(config(**packed, **{"model.context": 24}), tmp_path / "refused")


@pytest.mark.slow
def test_muon_equalises_singular_values_of_kernel_updates(config, tmp_path):
    """Muon updates the head as AdamW does, except for Nesterov's momentum."""
    start = make_programs(config(), sharding.make_mesh()).init(jax.random.key(0)).params
    moved = {}
    for name in ("adamw", "muon"):
        options = {
            "optimizer.name": name,
            "optimizer.weight_decay": 0.0,
            "optimizer.clip_norm": 0.0,
            "steps": 2,
        }
        made = config(**options, **{"optimizer.warmup_steps": 1, "eval_every": 9})
        ended = train(made, tmp_path / name).params
        moved[name] = jax.tree.map(lambda after, before: np.asarray(after - before), ended, start)
    updates = {name: named_leaves(tree) for name, tree in moved.items()}
    for path, update in updates["muon"].items():
        if not (path.startswith("blocks/") and update.ndim == 2):
            continue
        ours, theirs = (
            np.linalg.svd(updates[name][path], compute_uv=False) for name in ("muon", "adamw")
        )
        assert np.median(ours) / ours[0] > 0.6 > np.median(theirs) / theirs[0]
        assert np.sqrt(np.mean(update**2)) == pytest.approx(0.2 * 0.01, rel=0.35)
    ours, theirs = (updates[name]["head/kernel/value"] for name in ("muon", "adamw"))
    assert np.mean(np.sign(ours) == np.sign(theirs)) > 0.9
    assert np.sqrt(np.mean(ours**2)) == pytest.approx(np.sqrt(np.mean(theirs**2)), rel=0.3)
    with pytest.raises(UserError, match=r"optimizer.name 'sgd'"):
        train(config(**{"optimizer.name": "sgd"}), tmp_path / "sgd")
