"""Tests the speed that a run records, with steps that finish when the test says so."""

import threading
import time

import jax
import numpy as np
import pytest

from spectr_jax.training import throughput
from spectr_jax.training.metrics import Window
from spectr_jax.utils import backend


class _Loss:
    """Stands for a loss that the device is still computing until `done` is set."""

    def __init__(self, value=2.0, done=True):
        self.value, self.done = value, threading.Event()
        if done:
            self.done.set()

    def block_until_ready(self):
        self.done.wait()

    def __array__(self, *_, **__):
        return np.float32(self.value)


def _step(loss, tokens=10):
    return {"loss": loss, "grad_norm": np.float32(1.0), "tokens": tokens}


def test_waiting_for_data_counts_only_while_the_device_idles():
    with Window() as window:
        window.add(_step(_Loss()))
        unfinished = _Loss(done=False)
        window.add(_step(unfinished))
        with window.waiting_for_data():  # Only the host waits here.
            time.sleep(0.1)
        assert window.means()["waiting_for_data"] == 0
        with window.waiting_for_data():  # In the second half the device is idle too.
            time.sleep(0.2)
            unfinished.done.set()
            time.sleep(0.2)
        assert 0.15 < window.means()["waiting_for_data"] < 0.7
        window.clear()
        with window.waiting_for_data():  # The device is idle throughout.
            time.sleep(0.1)
        window.add(_step(_Loss()))
        assert window.means()["waiting_for_data"] > 0.8


def test_throughput_excludes_the_first_step_but_losses_include_it():
    with Window() as window:
        time.sleep(0.5)
        window.add(_step(_Loss(3.0), tokens=1000))
        first = window.means()
        assert first == {"loss": 3.0, "grad_norm": 1.0, "tokens": 1000}
        time.sleep(0.1)
        window.add(_step(_Loss(1.0), tokens=1000))
        both = window.means()
        assert both["loss"] == 2.0 and both["tokens"] == 2000
        assert 1000 / 0.4 < both["tokens_per_second"] <= 1000 / 0.1
        window.clear()
        time.sleep(0.1)
        window.add(_step(_Loss(), tokens=1000))
        assert window.means()["tokens_per_second"] == pytest.approx(1000 / 0.1, rel=0.6)


def test_closing_the_window_stops_its_thread():
    before = threading.enumerate()
    with Window() as window:
        window.add(_step(_Loss()))
        (thread,) = set(threading.enumerate()) - set(before)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_similar_device_names_have_their_own_peak_flops(kind, teraflops, monkeypatch):
    """The longest name that fits decides, whatever the order of the table."""
    wanted = None if teraflops is None else teraflops * 1e12
    for order in (1, -1):
        monkeypatch.setattr(
            throughput, "PEAK_FLOPS", dict(list(throughput.PEAK_FLOPS.items())[::order])
        )
        assert throughput.published_flops(kind) == wanted


@pytest.mark.parametrize(("on_cpu", "products"), [(True, 2), (False, 3)])
def test_an_unknown_accelerator_has_the_speed_of_a_product_on_each_device(
    on_cpu, products, monkeypatch
):
    """The devices of a process share the cores of a CPU."""
    monkeypatch.setattr(backend, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(throughput, "_product_flops", lambda: 1e12)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    assert throughput.peak_flops.__wrapped__() == products * 1e12
