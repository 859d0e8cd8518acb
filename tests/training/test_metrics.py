"""The speed in the record, measured on steps that the test finishes."""

import threading
import time

import numpy as np
import pytest

from spectr_jax.training import throughput
from spectr_jax.training.metrics import Window


class _Loss:
    """A loss that the device computes until `done` is set."""

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


def test_only_an_idle_device_is_waiting_for_data():
    with Window() as window:
        window.add(_step(_Loss()))
        at_work = _Loss(done=False)
        window.add(_step(at_work))
        with window.waiting_for_data():  # Only the host waits.
            time.sleep(0.1)
        assert window.means()["waiting_for_data"] == 0
        with window.waiting_for_data():  # In the second half the device waits too.
            time.sleep(0.2)
            at_work.done.set()
            time.sleep(0.2)
        assert 0.15 < window.means()["waiting_for_data"] < 0.7
        window.clear()
        with window.waiting_for_data():  # The device waits all the time.
            time.sleep(0.1)
        window.add(_step(_Loss()))
        assert window.means()["waiting_for_data"] > 0.8


def test_compilation_is_left_out_and_the_first_loss_is_not():
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


def test_the_thread_ends_with_the_window():
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
def test_devices_whose_names_begin_alike(kind, teraflops, monkeypatch):
    """The order of the table does not matter."""
    wanted = None if teraflops is None else teraflops * 1e12
    for order in (1, -1):
        monkeypatch.setattr(
            throughput, "PEAK_FLOPS", dict(list(throughput.PEAK_FLOPS.items())[::order])
        )
        assert throughput.published_flops(kind) == wanted
