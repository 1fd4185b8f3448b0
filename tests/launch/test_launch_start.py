"""What happens before the first rank: preloading, the log folder, requests to stop, entries that cannot start."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
from launch_jobs import wait_until

from model_check.errors import LaunchError, UsageError
from model_check.launch import Gpu, launch_job
from model_check.launch.log_files import LogDir
from model_check.launch.programs import ColdFunction
from model_check.launch.signals import (
    KEY_REPEATED_WITHIN_S,
    KEYS,
    REPEATED_WITHIN_S,
    Requests,
    StopBeforeStart,
    StopRequest,
)
from model_check.launch.warmstart import preload, why_not_warm
from model_check.record import RunDir


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with pytest.raises(LaunchError, match=r"no\.such\.module cannot be imported before the ranks start"):
        preload(("json", "no.such.module"))


def test_another_thread_forbids_the_warm_start() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="a-busy-thread")
    thread.start()
    try:
        assert "is running in the launcher" in (why_not_warm() or "")
    finally:
        done.set()
        thread.join()


def test_two_log_folders_of_one_second_are_apart_private_and_linked(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    first, second = LogDir.create(run_dir, tmp_path), LogDir.create(run_dir, tmp_path)
    assert first.path != second.path and run_dir.logs.resolve() == second.path
    assert stat.S_IMODE(second.path.stat().st_mode) == 0o700
    assert second.rank(3).name == "rank-00003.log"


def test_a_log_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    with pytest.raises(LaunchError, match="cannot be made: No such file or directory"):
        LogDir.create(run_dir, tmp_path / "missing")
    run_dir.logs.mkdir()
    with pytest.raises(LaunchError, match="is a folder where the link to the logs belongs"):
        LogDir.create(run_dir, tmp_path)


def test_a_stop_before_the_ranks_raises_and_one_after_is_noted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        with pytest.raises(StopBeforeStart):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    with StopRequest() as stop:
        stop.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, stop.again) == (signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.number, stop.again) == (signal.SIGTERM, signal.SIGINT)
        with pytest.raises(StopBeforeStart):
            stop.disarm()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_repeated_later_ends_the_wait_for_a_save_and_nothing_less_does() -> None:
    warned = Requests()
    warned.note(signal.SIGUSR1)
    with StopRequest() as stop:
        stop.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        asked_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.again is None, "a scheduler repeats itself"
        wait_until(lambda: time.monotonic() > asked_at + REPEATED_WITHIN_S)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.again is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, stop.again) == (signal.SIGTERM, signal.SIGTERM)
    warned.note(signal.SIGTERM)
    assert (warned.number, warned.again) == (signal.SIGUSR1, None), "the first that asks, long after the warning"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_comes_twice_at_once_is_one_request(key: signal.Signals) -> None:
    """`timeout -s INT` signals its command and then the whole group; a wrapper passes on what the terminal sent."""
    with StopRequest(as_received=True) as stop:
        stop.arm()
        os.kill(os.getpid(), key)
        asked_at = time.monotonic()
        os.kill(os.getpid(), key)
        assert (stop.number, stop.again) == (key, None)
        wait_until(lambda: time.monotonic() > asked_at + KEY_REPEATED_WITHIN_S)
        os.kill(os.getpid(), key)
        assert (stop.number, stop.again) == (key, key)


def test_an_entry_that_a_new_interpreter_cannot_find_is_refused() -> None:
    with pytest.raises(LaunchError, match="cannot be started cold"):
        ColdFunction.pickle(lambda context, payload: None, None)


def test_ranks_and_gpus_must_match(tmp_path: Path) -> None:
    gpus = [Gpu(0, "GPU-0", "H200", 100, 0, 0)]
    with pytest.raises(UsageError, match="2 ranks do not fit 1 GPUs"):
        launch_job(print, nproc=2, gpus=gpus, run_dir=RunDir.create(tmp_path / "run"))
