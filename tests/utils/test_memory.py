"""Tests the settings of glibc's heap.

They last as long as the process, so each test starts processes of its own.
"""

import os
import platform
import subprocess
import sys

import pytest

from spectr_jax.utils.memory import _accelerator_expected

FAULTS = """
import resource, threading
import numpy as np
from spectr_jax.utils.memory import keep_freed_memory

print(keep_freed_memory())

def pages_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

pages_taken()
thread = threading.Thread(target=pages_taken)
thread.start()
thread.join()
"""

PAGES = 2**24 * 8 // os.sysconf("SC_PAGE_SIZE")  # Pages of one array of `FAULTS`.
SMALL_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}


def run(**environment):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    command = [sys.executable, "-c", FAULTS]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=kept | environment | SMALL_PAGES, check=True
    )
    done, *pages = ended.stdout.split()
    return done == "True", [int(count) for count in pages]


@pytest.fixture(scope="module", autouse=True)
def only_glibc_without_an_accelerator():
    if platform.libc_ver()[0] != "glibc" or _accelerator_expected():
        pytest.skip("not Linux with glibc and without an accelerator")


def test_freed_memory_is_reused_by_all_threads():
    done, (of_main, of_thread) = run()
    assert done and of_main < 2 * PAGES and of_thread < PAGES / 30


def test_malloc_settings_of_the_user_take_precedence():
    done, (of_main, _) = run(
        GLIBC_TUNABLES="glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold=1048576"
    )
    assert not done and of_main > 9 * PAGES
    assert not run(MALLOC_ARENA_MAX="4")[0]
    assert run(GLIBC_TUNABLES="glibc.malloc.hugetlb=0")[0]
