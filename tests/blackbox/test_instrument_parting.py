"""A script whose last collective is barely done ends with its own exit code, not with an abort of torch's."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from model_check.blackbox.backend_shutdown import let_backends_finish
from tests.blackbox.observed_runs import Runner

LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* Gloo's thread has told the script that a collective is done, and does not get on from there for LATE_MS. */
int pthread_cond_broadcast(pthread_cond_t *condition) {
  int (*broadcast)(pthread_cond_t *) = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
  int result = broadcast(condition);
  char name[17] = {0};
  prctl(PR_GET_NAME, name);
  if (strstr(name, "gloo_runloop")) {
    struct timespec from, now;
    clock_gettime(CLOCK_MONOTONIC, &from);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - from.tv_sec) * 1000000000L + now.tv_nsec - from.tv_nsec < atol(getenv("LATE_MS")) * 1000000L);
  }
  return result;
}
"""

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
"""


@pytest.fixture
def late_threads(tmp_path: Path) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("makes gloo's threads late with a library that needs gcc")
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("late_ms", [3, *(pytest.param(ms, marks=pytest.mark.slow) for ms in (1, 2, 5, 8))])
def test_a_thread_that_still_holds_a_tensor_does_not_abort_the_exit(
    run: Runner, late_threads: Path, late_ms: int
) -> None:
    # torch by itself aborts here in some of these, which ones depends on how fast the interpreter ends
    outcome = run(SCRIPT, env={"LD_PRELOAD": str(late_threads), "LATE_MS": str(late_ms)})
    assert (outcome.codes, outcome.errors) == ([0], [""])


def _work_as(name: str, ready: threading.Event, rounds: int) -> None:
    ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
    ready.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)  # without the interpreter's lock, as C++ code


@pytest.mark.parametrize(("name", "awaited"), [("pt_gloo_runloop", True), ("pt_autograd_0", False)])
def test_only_threads_of_the_backend_are_waited_for(name: str, awaited: bool) -> None:
    ready = threading.Event()
    worker = threading.Thread(target=_work_as, args=(name, ready, 1_000_000))
    worker.start()
    ready.wait()
    let_backends_finish(most_s=30)
    assert worker.is_alive() is not awaited
    worker.join()


def test_the_wait_has_an_end() -> None:
    ready = threading.Event()
    worker = threading.Thread(target=_work_as, args=("pt_gloo_runloop", ready, 3_000_000))
    worker.start()
    ready.wait()
    let_backends_finish(most_s=0.05)
    assert worker.is_alive()
    worker.join()
