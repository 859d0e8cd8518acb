"""Tests that timers return positive times. No test asserts a speed."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from flax import nnx

from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure import bench
from spectr_jax.experiments.measure.call_times import call_runs, call_timer, timed
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import backend


@pytest.fixture(scope="module")
def model():
    return Transformer(TransformerConfig(1, 16, 32, 2, vocab_size=13, context=80), rngs=nnx.Rngs(0))


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, "table", auto_config(), [])


def test_the_call_timer_returns_a_positive_time(model):
    assert call_timer(model, 2, 3, context=8)() > 0


def test_call_runs_reuses_the_donated_cache(model):
    run = call_runs(model, 2, 3, context=8)
    assert run() > 0 and run() > 0


def test_all_timers_compile_before_any_measures(journal):
    events = []

    def make(name: str):
        events.append(f"make {name}")
        return lambda: events.append(f"call {name}") or 1.0

    tasks = {name: functools.partial(make, name) for name in "ab"}
    assert timed(journal, "both", tasks) == {"a": 1.0, "b": 1.0}
    assert sorted(events[:2]) == ["make a", "make b"] and events[2:] == ["call a", "call b"]
    assert timed(journal, "both", tasks) == {"a": 1.0, "b": 1.0} and len(events) == 4


@pytest.mark.parametrize(("on_cpu", "at_once"), [(True, 2), (False, 8)])
def test_programs_for_an_accelerator_compile_on_every_core(on_cpu, at_once, monkeypatch):
    pools = []

    def pool(workers):
        pools.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(bench, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(backend, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    tasks = [functools.partial(pow, 2, power) for power in range(8)]
    assert list(bench.compiled_in_parallel(tasks)) == [2**power for power in range(8)]
    assert pools == [at_once]
