"""A training run: data, steps, evaluation, checkpoints, and the record of it in the workdir."""

import functools
import json
import math
import pathlib
import signal
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm
from flax import nnx
from flax.traverse_util import flatten_dict

from spectr_jax.config import check_fields, check_positive, to_json, train_config
from spectr_jax.data import batches
from spectr_jax.data.corpus import Sentences, open_sentences, sample_sentences
from spectr_jax.data.tokenizer import Tokenizer, train_tokenizer
from spectr_jax.errors import UserError
from spectr_jax.files import write_json, write_whole
from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract
from spectr_jax.training import sharding
from spectr_jax.training.checkpoint import Checkpoints
from spectr_jax.training.metrics import MetricsLog, plot_curves
from spectr_jax.training.optimizer import learning_rate, make_optimizer
from spectr_jax.training.step import EarlyExitLoss, TrainState, eval_step, init_state, train_step

# These may change between two starts of a run; all else would make it another run.
FREE_FIELDS = ("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints")


class _Heldout(NamedTuple):
    batches: list[dict[str, np.ndarray]]
    characters: int


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> TrainState:
    """Trains until `config.steps`, from the newest checkpoint in `workdir` if there is one.

    Writes config.json, tokenizer.model, metrics.jsonl, loss.png and checkpoints/. Ctrl-C saves and returns.

    Raises:
      UserError: a bad config, a workdir of another config, an empty or corrupt corpus, a loss that is not finite.
    """
    check_train_config(config)
    _claim_workdir(config, workdir)
    mesh = sharding.make_mesh(config.mesh.fsdp)
    if config.batch_size % jax.device_count():
        raise UserError(f"batch_size={config.batch_size} does not divide over {jax.device_count()} devices; change it")
    tfds_dir = config.data.tfds_dir or None
    sentences = open_sentences(config.data.train, tfds_dir)
    heldout_sentences = open_sentences(config.data.heldout, tfds_dir)
    tokenizer = _tokenizer(config, workdir, sentences)
    heldout = _heldout(config, heldout_sentences, tokenizer)
    dataset = batches.training_batches(
        sentences,
        tokenizer,
        batch=config.batch_size // jax.process_count(),
        length=config.model.context,
        seed=config.seed,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    write_json(workdir / "config.json", to_json(config))
    run = _Run(config, workdir, mesh, heldout)
    return run.go(iter(dataset))


class _Run:
    """The moving parts of one run."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path, mesh, heldout: _Heldout):
        self.config, self.workdir, self.mesh, self.heldout = config, workdir, mesh, heldout
        optimizer = make_optimizer(config.optimizer, config.steps)
        model_config = TransformerConfig(**config.model)
        self.learning_rate = learning_rate(config.optimizer, config.steps)

        def init(key):
            params_key, run_key = jax.random.split(key)
            return init_state(Transformer(model_config, rngs=nnx.Rngs(params_key)), optimizer, run_key)

        self.graphdef, _ = abstract(model_config)
        shapes = jax.eval_shape(init, jax.random.key(config.seed))
        shardings = sharding.state_sharding(mesh, shapes)
        self.like = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, shardings
        )
        self.init = jax.jit(init, out_shardings=shardings)
        early_exit = EarlyExitLoss(**config.early_exit)
        self.step = jax.jit(functools.partial(train_step, self.graphdef, optimizer, early_exit), donate_argnums=0)
        self.eval_step = jax.jit(functools.partial(eval_step, self.graphdef, exit_layer=early_exit.layer))
        self.checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
        self.stop = False

    def go(self, data) -> TrainState:
        config = self.config
        state = self._start(data)
        first = int(state.step)
        log = MetricsLog(self.workdir / "metrics.jsonl", first)
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        bar = tqdm.tqdm(total=config.steps, initial=first, unit="step", dynamic_ncols=True, mininterval=1.0)
        window: list[dict[str, jax.Array]] = []
        started = time.monotonic()
        try:
            for step in range(first + 1, config.steps + 1):
                state, metrics = self.step(state, sharding.put_batch(self.mesh, next(data)))
                window.append(metrics)
                if step % config.log_every == 0 or step == config.steps or self.stop:
                    record = self._summary(step, window, started)
                    log.write(record)
                    bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")
                    window, started = [], time.monotonic()
                bar.update()
                if step % config.eval_every == 0 or step == config.steps:
                    log.write({"step": step, **self._evaluate(state.params)})
                    plot_curves(self.workdir / "metrics.jsonl", self.workdir / "loss.png")
                    started = time.monotonic()
                if step % config.checkpoint_every == 0 or step == config.steps or self.stop:
                    self._check_finite(step, window)
                    self.checkpoints.save(state, data.get_state())
                if self.stop:
                    tqdm.tqdm.write(f"stopped and saved at step {step}; the same command goes on from there")
                    break
        finally:
            bar.close()
            signal.signal(signal.SIGINT, before)
            self.checkpoints.close()
        return state

    def _start(self, data) -> TrainState:
        if self.checkpoints.latest_step() is None:
            return self.init(jax.random.key(self.config.seed))
        state, data_state = self.checkpoints.restore(self.like)
        data.set_state(data_state)
        tqdm.tqdm.write(f"going on from step {int(state.step)}")
        return state

    def _on_interrupt(self, signum, frame):
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        tqdm.tqdm.write("stopping after this step; once more to stop at once, without saving")

    def _summary(self, step: int, window: list[dict[str, jax.Array]], started: float) -> dict[str, Any]:
        self._check_finite(step, window)  # Waits for the device, so the clock is read after it.
        seconds = time.monotonic() - started
        losses, exit_losses, tokens = (
            np.asarray([float(metrics[name]) for metrics in window]) for name in ("loss", "exit_loss", "tokens")
        )
        exits = {"exit_loss": float(np.sum(exit_losses * tokens) / np.sum(tokens))} if self.config.early_exit.layer else {}
        return {
            "step": step,
            "loss": float(np.sum(losses * tokens) / np.sum(tokens)),
            **exits,
            "grad_norm": float(window[-1]["grad_norm"]),
            "learning_rate": float(self.learning_rate(step - 1)),
            "tokens_per_second": round(float(np.sum(tokens)) / seconds, 1),
            "tokens": int(np.sum(tokens)),
        }

    def _check_finite(self, step: int, window: list[dict[str, jax.Array]]) -> None:
        for back, metrics in enumerate(reversed(window)):
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(
                    f"the loss is {loss} and the gradient norm {norm} at step {step - back}; lower "
                    f"optimizer.learning_rate={self.config.optimizer.learning_rate} or raise optimizer.warmup_steps, "
                    f"and start in a new workdir (last good checkpoint: {self.checkpoints.latest_step()})"
                )

    def _evaluate(self, params) -> dict[str, float]:
        """Nats per token and bits per character of the held-out sentences; a line end counts as a character."""
        sums = np.zeros(3)
        for batch in self.heldout.batches:
            sums += [float(total) for total in self.eval_step(params, sharding.put_batch(self.mesh, batch))]
        nats, exit_nats, tokens = sums
        exits = {"eval_exit_nats_per_token": float(exit_nats / tokens)} if self.config.early_exit.layer else {}
        return {
            "eval_nats_per_token": float(nats / tokens),
            "eval_bits_per_character": float(nats / math.log(2) / self.heldout.characters),
            **exits,
        }


def check_train_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that no run can use."""
    check_fields(config, train_config())
    check_positive(
        config,
        *("steps", "batch_size", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "mesh.fsdp"),
        *("model.layers", "model.width", "model.mlp", "model.heads", "model.context", "data.heldout_sentences"),
    )
    model = config.model
    if model.width % (2 * model.heads):
        raise UserError(f"model.width={model.width} is not a multiple of 2 * model.heads={model.heads}; change one")
    if model.dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.dtype={model.dtype!r} is not known; give 'float32' or 'bfloat16'")
    if not 0.0 <= model.dropout < 1.0:
        raise UserError(f"model.dropout={model.dropout} is not in [0, 1); give a rate such as 0.1")
    if not 0 <= config.early_exit.layer < model.layers:
        raise UserError(
            f"early_exit.layer={config.early_exit.layer} is not one of the layers 1..{model.layers - 1} before the last of "
            f"model.layers={model.layers}; 0 is for none"
        )
    if not config.early_exit.weight >= 0:
        raise UserError(f"early_exit.weight={config.early_exit.weight} is negative; give a weight such as 0.5")
    learning_rate(config.optimizer, config.steps)


def _claim_workdir(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
    """Raises `UserError` if `workdir` holds a run of another config; creates it if need be."""
    path = workdir / "config.json"
    if path.exists():
        try:
            # A field that is newer than the run had its default.
            theirs = flatten_dict({**to_json(train_config()), **json.loads(path.read_text())}, sep=".")
        except ValueError as error:
            raise UserError(f"{str(path)!r} is not JSON ({error}); choose a new --workdir") from error
        ours = flatten_dict(to_json(config), sep=".")
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in FREE_FIELDS and ours.get(name) != theirs.get(name):
                raise UserError(
                    f"workdir {str(workdir)!r} was made with {name}={theirs.get(name)!r}, the config has "
                    f"{ours.get(name)!r}; choose a new --workdir or restore the field"
                )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"workdir {str(workdir)!r} cannot be made ({error.strerror}); choose another") from error


def _tokenizer(config: ml_collections.ConfigDict, workdir: pathlib.Path, sentences: Sentences) -> Tokenizer:
    """The run's tokenizer, trained if it does not exist; the run keeps a copy."""
    own = workdir / "tokenizer.model"
    shared = pathlib.Path(config.data.tokenizer).expanduser() if config.data.tokenizer else own
    if not shared.exists():
        print(f"training a tokenizer of {config.model.vocab_size} pieces: {shared}")
        sample = sample_sentences(sentences, config.data.tokenizer_sentences, config.seed)
        train_tokenizer(sample, shared, config.model.vocab_size)
    tokenizer = Tokenizer(shared)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{str(shared)!r} has {tokenizer.vocab_size} pieces, model.vocab_size is {config.model.vocab_size}; "
            "change one of them"
        )
    if own.exists() and own.read_bytes() != tokenizer.proto:
        raise UserError(f"workdir {str(workdir)!r} was trained with another tokenizer than {str(shared)!r}; restore it")
    write_whole(own, tokenizer.proto)
    return tokenizer


def _heldout(config: ml_collections.ConfigDict, sentences: Sentences, tokenizer: Tokenizer) -> _Heldout:
    """The first held-out sentences that fit the context whole, in full batches (the last one is padded)."""
    length, rows = config.model.context, config.batch_size
    first = (sentences[index] for index in range(min(config.data.heldout_sentences, len(sentences))))
    kept = [sentence for sentence in first if len(tokenizer.encode(sentence)) < length]
    if not kept:
        raise UserError(f"no held-out sentence of {config.data.heldout!r} fits {length} tokens; raise model.context")
    packed = []
    for batch in batches.evaluation_batches(kept, tokenizer, batch=rows, length=length):
        missing = rows - len(batch["inputs"])
        packed.append({name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()})
    share = slice(jax.process_index(), None, jax.process_count())
    local = [{name: array[share] for name, array in batch.items()} for batch in packed]
    return _Heldout(local, sum(len(sentence) + 1 for sentence in kept))
