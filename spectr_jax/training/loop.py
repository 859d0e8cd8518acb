"""A training run: data, steps, evaluation, checkpoints, and its record in the workdir."""

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import tqdm
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.data import batches
from spectr_jax.data.corpus import content_digest, open_sentences
from spectr_jax.data.packed import open_corpus
from spectr_jax.models.formats import runs
from spectr_jax.models.formats.checkpoint import Checkpoints
from spectr_jax.training import preparation, throughput
from spectr_jax.training.config import train_config
from spectr_jax.training.heldout import evaluate, pack_heldout
from spectr_jax.training.interruption import Interruption
from spectr_jax.training.metrics import Curves, MetricsLog, Window
from spectr_jax.training.programs import Programs, make_programs
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import to_json
from spectr_jax.utils.errors import FULL, Interrupted, UserError, first_line
from spectr_jax.utils.files import write_json

BAR: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "mininterval": 1.0}


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> TrainState:
    """Trains until `config.steps`, from the newest checkpoint in `workdir`, or else from
    `config.init`.

    Writes config.json, inputs.json, tokenizer.model, packed/ (of text), metrics.jsonl, loss.png,
    checkpoints/ and an empty file, lock. With several processes (`hosts.connect`) each calls this
    with the same arguments and a shared workdir. Text of more than 65,536 sentences is packed by
    several processes, which import a program of your own: it needs `if __name__ == "__main__"`.

    A run that has taken its steps stays as it is.

    Raises:
      UserError: the config is invalid, the workdir belongs to another config, the initial
        weights have another shape, the corpus is empty or corrupt, the loss is not finite, or a
        checkpoint cannot be written.
      Interrupted: after Ctrl-C or SIGTERM, once the run is saved.
    """
    preparation.check_train_config(config)
    preparation.check_workdir(config, workdir, train_config())
    mesh = sharding.make_mesh(config.mesh.fsdp)
    tfds_dir = config.data.tfds_dir or None
    corpus = open_corpus(config.data.train, tfds_dir)
    preparation.check_batch_size(config, jax.device_count())
    sentences = open_sentences(config.data.heldout, tfds_dir)
    count = min(config.data.heldout_sentences, len(sentences))
    kept = [sentences[index] for index in range(count)]
    digests = {"data.train": content_digest(corpus), "data.heldout": content_digest(kept)}
    with explained(workdir), preparation.locked(workdir):
        preparation.check_workdir(config, workdir, train_config())  # Another run may have begun.
        preparation.check_inputs(config, workdir, digests)
        tokenizer = preparation.open_tokenizer(config, workdir, corpus)
        heldout = pack_heldout(
            kept,
            tokenizer,
            rows=config.batch_size // config.accumulate,  # Rows that go through the model at once.
            length=config.model.context,
            name=config.data.heldout,
        )
        rows = preparation.open_rows(config, workdir, corpus, tokenizer)
        programs = make_programs(config, mesh)
        return run(
            config,
            workdir,
            mesh,
            programs,
            batches.training_batches([(rows, config.batch_size)], batches.batch_of, config.seed),
            initial=functools.partial(preparation.initial_params, config, tokenizer),
            score=lambda params: evaluate(programs.evaluate, params, heldout, mesh),
            metric=runs.BITS,
            curves=Curves("loss", "eval_nats_per_token", "nats per token"),
        )


@contextlib.contextmanager
def explained(workdir: pathlib.Path) -> Iterator[None]:
    """A context that turns failures of disks, memory and other processes into `UserError`."""
    try:
        yield
    except OSError as error:
        if not (error.errno in FULL or workdir in pathlib.Path(str(error.filename or "")).parents):
            raise
        full = error.errno in FULL
        what, remedy = (
            ("written", "make room") if full else ("used", "restore it, or its permissions")
        )
        raise UserError(
            f"{str(error.filename or workdir)!r} cannot be {what} ({error.strerror or error}); "
            f"{remedy}, and give the same command again: it resumes from the newest checkpoint"
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
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    mesh: Mesh,
    programs: Programs,
    data: batches.Batches,
    *,
    initial: Callable[[], nnx.State | None],
    score: Callable[[Any], dict[str, float]],
    metric: str,
    curves: Curves,
) -> TrainState:
    """Takes the remaining steps in a workdir, and returns the last state; see `train`.

    The caller has compared its config (`check_workdir`), holds it (`locked`), and has compared the
    data (`check_inputs`).

    `data` has the batches. `initial` returns the parameters of a new run, or None for those of
    `programs.init`. `score` maps parameters to held-out scores by name, and the best checkpoint
    minimises `metric` among them. loss.png has the `curves`.
    """
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints, metric)
    step, stopping = 0, False
    try:
        state = _start(config, workdir, programs, checkpoints, initial)
        first = int(state.step)
        shows = hosts.is_first() and first < config.steps
        if shows:  # Else nothing is learnt with this config.
            write_json(workdir / runs.CONFIG, to_json(config))
        log = MetricsLog(workdir, first, curves)
        bar = tqdm.tqdm(total=config.steps, initial=first, disable=not shows, **BAR)
        mine = hosts.own_share(config.batch_size)
        reader = contextlib.closing(batches.read_ahead(data, mine, first, config.steps))
        with Window() as window, Interruption() as interruption, bar, reader as upcoming:
            for step in range(first + 1, config.steps + 1):
                with window.waiting_for_data():
                    batch = sharding.put_rows(mesh, next(upcoming))
                state, metrics = programs.step(state, batch)
                window.add(metrics)
                bar.update()
                done = step == config.steps
                stopping = interruption.requested(step) and not done
                if stopping or done or step % config.log_every == 0:
                    _check_finite(config, checkpoints, step, window)
                    record = {"step": step, **_record(programs, step, window)}
                    window.clear()
                    log.write(record)
                    bar.set_postfix_str(_summary(record), refresh=False)
                scores = None
                if done or step % config.eval_every == 0:
                    with window.aside():
                        scores = score(state.params)
                        log.write_scores(step, scores, redraw=done)
                best = scores is not None and checkpoints.would_be_best(scores)
                if stopping or done or best or step % config.checkpoint_every == 0:
                    with window.aside():
                        _check_finite(config, checkpoints, step, window)
                        checkpoints.save(state, scores)
                if stopping:
                    break
        checkpoints.wait()
    finally:
        checkpoints.close()
    if stopping:
        raise Interrupted(
            f"stopped and saved at step {step} of {config.steps}; the same command resumes"
        )
    return state


def _start(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    programs: Programs,
    checkpoints: Checkpoints,
    initial: Callable[[], nnx.State | None],
) -> TrainState:
    """Returns the state of the newest checkpoint, or a new one."""
    checkpoints.clean()
    if not any(hosts.gather(checkpoints.steps())):
        params = initial()
        state = programs.init(jax.random.key(config.seed))
        if params is None:
            return state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state.params)
        return dataclasses.replace(state, params=sharding.put(params, shardings))
    state, damaged = checkpoints.restore(programs.like)
    if hosts.is_first():
        aside = str(workdir / "damaged")
        for step in damaged:
            tqdm.tqdm.write(f"checkpoint {step} cannot be read and was moved to {aside!r}")
        step = int(state.step)
        done = step >= config.steps
        tqdm.tqdm.write(f"finished: {step} steps" if done else f"resuming from step {step}")
    return state


def _record(programs: Programs, step: int, window: Window) -> dict[str, Any]:
    """Returns the means of a window that ends at `step`, its learning rate and its MFU."""
    record = {**window.means(), "learning_rate": float(programs.schedule(step - 1))}
    if (speed := record.get("tokens_per_second")) is not None:
        record["mfu"] = round(speed * programs.flops_per_token / throughput.peak_flops(), 4)
    return record


def _summary(record: dict[str, Any]) -> str:
    speed = record.get("tokens_per_second")
    return f"loss {record['loss']:.3f}" + ("" if speed is None else f", {speed:,.0f} tokens/s")


def _check_finite(
    config: ml_collections.ConfigDict, checkpoints: Checkpoints, step: int, window: Window
) -> None:
    """Raises `UserError` for the first loss or gradient of a window that is not finite. The window
    ends at `step`."""
    for at, metrics in enumerate(window.metrics, step + 1 - len(window.metrics)):
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            checkpoints.wait()
            raise UserError(
                f"the loss is {loss} and the gradient norm {norm} at step {at}; lower "
                f"optimizer.learning_rate={config.optimizer.learning_rate} or raise "
                "optimizer.warmup_steps, and start in a new workdir (last good checkpoint: "
                f"{checkpoints.latest_step()})"
            )
