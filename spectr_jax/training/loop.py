"""A training run: data, steps, evaluation, checkpoints, and its record in the workdir."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import ml_collections
import tqdm
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.data import batches
from spectr_jax.data.corpus import content_digest, open_sentences
from spectr_jax.data.packed import digest_of, open_corpus
from spectr_jax.models.transformer import TransformerConfig
from spectr_jax.training import preparation, runs, throughput
from spectr_jax.training.checkpoint import Checkpoints
from spectr_jax.training.heldout import evaluate, pack_heldout
from spectr_jax.training.interruption import Interruption
from spectr_jax.training.metrics import Curves, MetricsLog, Window, plot_curves
from spectr_jax.training.optimizer import learning_rate
from spectr_jax.training.programs import Programs, make_programs
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import to_json
from spectr_jax.utils.errors import FULL, Interrupted, UserError, first_line
from spectr_jax.utils.files import write_json

SECONDS_BETWEEN_PLOTS = 10
BAR: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "mininterval": 1.0}


class Task(NamedTuple):
    """What a run learns, and from which data."""

    programs: Programs
    data: grain.DatasetIterator  # Batches, positioned for a new run.
    evaluate: Callable[[Any], dict[str, float]]  # Maps parameters to held-out scores by name.
    metric: str  # The score that the best checkpoint minimises.
    curves: Curves  # The metrics in loss.png.
    flops_per_token: int  # Of a step.
    given: Callable[[], nnx.State | None]  # Initial parameters; None for those of `programs.init`.


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> TrainState:
    """Trains until `config.steps`, from the newest checkpoint in `workdir`, or else from
    `config.init`.

    Writes config.json, inputs.json, tokenizer.model, metrics.jsonl, loss.png, checkpoints/ and an
    empty file, lock. With several processes (`hosts.connect`) each calls this with the same
    arguments and a shared workdir.

    A run that has taken its steps stays as it is.

    Raises:
      UserError: the config is invalid, the workdir belongs to another config, the initial
        weights have another shape, the corpus is empty or corrupt, the loss is not finite, or a
        checkpoint cannot be written.
      Interrupted: after Ctrl-C or SIGTERM, once the run is saved.
    """
    preparation.check_train_config(config)
    preparation.claim_workdir(config, workdir)
    mesh = sharding.make_mesh(config.mesh.fsdp)
    streams = preparation.count_streams(config, jax.device_count(), jax.process_count())
    tfds_dir = config.data.tfds_dir or None
    corpus = open_corpus(config.data.train, tfds_dir)
    heldout_sentences = open_sentences(config.data.heldout, tfds_dir)
    first = min(config.data.heldout_sentences, len(heldout_sentences))
    scored = [heldout_sentences[index] for index in range(first)]
    read = {"data.train": digest_of(corpus), "data.heldout": content_digest(scored)}
    with explained(workdir), preparation.locked(workdir):
        preparation.check_inputs(config, workdir, read)
        tokenizer = preparation.open_tokenizer(config, workdir, corpus)
        heldout = pack_heldout(
            heldout_sentences,
            tokenizer,
            first=config.data.heldout_sentences,
            rows=config.batch_size // config.accumulate,  # Rows that go through the model at once.
            length=config.model.context,
            name=config.data.heldout,
        )
        data = batches.training_batches(
            corpus,
            tokenizer,
            batch=config.batch_size,
            length=config.model.context,
            seed=config.seed,
            streams=streams,
            process=jax.process_index(),
            processes=jax.process_count(),
        )
        programs = make_programs(config, mesh)
        task = Task(
            programs=programs,
            data=iter(data),
            evaluate=lambda params: evaluate(programs.evaluate, params, heldout, mesh),
            metric=runs.BITS,
            curves=Curves("loss", "eval_nats_per_token", "nats per token"),
            flops_per_token=throughput.flops_per_token(TransformerConfig(**config.model)),
            given=functools.partial(preparation.given_params, config, tokenizer),
        )
        return run(config, workdir, mesh, task)


@contextlib.contextmanager
def explained(workdir: pathlib.Path) -> Iterator[None]:
    """A context that turns failures of disks, memory and other processes into `UserError`."""
    try:
        yield
    except OSError as error:
        if not (error.errno in FULL or workdir in pathlib.Path(str(error.filename or "")).parents):
            raise
        raise UserError(
            f"{str(error.filename or workdir)!r} cannot be written ({error.strerror or error}); make room, and give "
            "the same command again: it resumes from the newest checkpoint"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        reason = first_line(error)
        if "RESOURCE_EXHAUSTED" in reason:
            raise UserError(
                f"out of memory ({reason}); raise accumulate, set remat=True, or lower batch_size"
            ) from error
        if jax.process_count() > 1:
            raise UserError(
                f"another process of the run has probably ended ({reason}); see its log, and give "
                "the same command again (all of them): it resumes from the newest checkpoint"
            ) from error
        raise


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, mesh: Mesh, task: Task
) -> TrainState:
    """Takes the remaining steps of a task in a claimed and locked workdir; see `train`."""
    return _Run(config, workdir, mesh, task).go()


class _Run:
    """The mutable state of one run."""

    def __init__(
        self, config: ml_collections.ConfigDict, workdir: pathlib.Path, mesh: Mesh, task: Task
    ):
        self.config, self.workdir, self.mesh, self.task = config, workdir, mesh, task
        self.redraw_at = 0.0
        self.log: MetricsLog | None = None
        self.learning_rate = learning_rate(config.optimizer, config.steps)
        self.checkpoints = Checkpoints(
            workdir / "checkpoints", config.keep_checkpoints, task.metric
        )

    def go(self) -> TrainState:
        """Takes the remaining steps."""
        config, data, step, stopping = self.config, self.task.data, 0, False
        writes = hosts.is_first()
        try:
            state = self._start()
            first = int(state.step)
            if writes:
                if first < config.steps:  # Else nothing is learnt with this config.
                    write_json(self.workdir / runs.CONFIG, to_json(config))
                self.log = MetricsLog(self.workdir / "metrics.jsonl", first)
            hidden = not writes or first >= config.steps
            bar = tqdm.tqdm(total=config.steps, initial=first, disable=hidden, **BAR)
            with Window() as window, Interruption() as interruption, bar:
                for step in range(first + 1, config.steps + 1):
                    with window.waiting_for_data():
                        batch = sharding.put_rows(self.mesh, next(data))
                    state, metrics = self.task.programs.step(state, batch)
                    window.add(metrics)
                    bar.update()
                    stopping = interruption.requested(step)
                    last = stopping or step == config.steps
                    if last or step % config.log_every == 0:
                        bar.set_postfix_str(self._log_steps(step, window), refresh=False)
                    scores = None
                    if step % config.eval_every == 0 or step == config.steps:
                        with window.aside():
                            scores = self._evaluate(step, state)
                    if last or step % config.checkpoint_every == 0 or self._is_best(scores):
                        with window.aside():
                            self._check_finite(step, window)
                            positions = itertools.chain(*hosts.gather(batches.positions_of(data)))
                            self.checkpoints.save(state, [*positions], scores)
                    if stopping:
                        break
            self.checkpoints.wait()
        finally:
            data.close()
            self.checkpoints.close()
        if stopping:
            raise Interrupted(
                f"stopped and saved at step {step} of {config.steps}; the same command resumes"
            )
        return state

    def _start(self) -> TrainState:
        """Returns the state of the newest checkpoint, after moving the data there, or a new one."""
        self.checkpoints.clean()
        if not any(hosts.gather(self.checkpoints.steps())):
            given = self.task.given()
            state = self.task.programs.init(jax.random.key(self.config.seed))
            if given is None:
                return state
            places = jax.tree.map(lambda leaf: leaf.sharding, state.params)
            return dataclasses.replace(state, params=sharding.put(given, places))
        state, positions, damaged = self.checkpoints.restore(self.task.programs.like)
        batches.go_to(self.task.data, positions[hosts.own_share(len(positions))])
        if hosts.is_first():
            aside = str(self.workdir / "damaged")
            for step in damaged:
                tqdm.tqdm.write(f"checkpoint {step} cannot be read and was moved to {aside!r}")
            steps, step = self.config.steps, int(state.step)
            done = step >= steps
            tqdm.tqdm.write(f"finished: {step} steps" if done else f"resuming from step {step}")
        return state

    def _log_steps(self, step: int, window: Window) -> str:
        """Logs the steps of the window, empties it, and returns a short summary."""
        self._check_finite(step, window)
        rate = float(self.learning_rate(step - 1))
        record = {"step": step, **window.means(), "learning_rate": rate}
        summary, speed = f"loss {record['loss']:.3f}", record.get("tokens_per_second")
        if speed is not None:
            record["mfu"] = round(speed * self.task.flops_per_token / throughput.peak_flops(), 4)
            summary += f", {speed:,.0f} tokens/s"
        window.clear()
        if self.log:
            self.log.write(record)
        return summary

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        scores = self.task.evaluate(state.params)
        if not self.log:
            return scores
        self.log.write({"step": step, **scores})
        shown = [f"{name.removeprefix('eval_')} {score:.4g}" for name, score in scores.items()]
        tqdm.tqdm.write(f"step {step}, held out: {', '.join(shown)}")
        # Plotting takes a fifth of a second.
        if step == self.config.steps or time.monotonic() > self.redraw_at:
            plot_curves(self.workdir / "metrics.jsonl", self.workdir / "loss.png", self.task.curves)
            self.redraw_at = time.monotonic() + SECONDS_BETWEEN_PLOTS
        return scores

    def _is_best(self, scores: dict[str, float] | None) -> bool:
        if scores is None:
            return False
        best = self.checkpoints.best()
        return best is None or scores[self.task.metric] < best[1]

    def _check_finite(self, step: int, window: Window) -> None:
        for back, metrics in enumerate(reversed(window.metrics)):
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.checkpoints.wait()
                raise UserError(
                    f"the loss is {loss} and the gradient norm {norm} at step {step - back}; lower "
                    f"optimizer.learning_rate={self.config.optimizer.learning_rate} or raise "
                    "optimizer.warmup_steps, and start in a new workdir (last good checkpoint: "
                    f"{self.checkpoints.latest_step()})"
                )
