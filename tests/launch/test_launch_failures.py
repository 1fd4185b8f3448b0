"""Which rank failed first."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.record import JsonlWriter, RunDir
from model_check.record.error_texts import is_lost_peer
from model_check.record.events.crashes import UncaughtException
from model_check.record.rank_exits import (
    RankExit,
    describe,
    first_failure,
    read_error,
    signal_name,
    weigh,
)

NO_LOG = Path("/nonexistent")


def _exit(rank: int, at: float, code: int | None = 1, number: int | None = None, told: float | None = None) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, code=code, signal=number, t=at, signalled_at=told)


def _error(message: str, t: float, **more: str) -> UncaughtException:
    return UncaughtException(type="RuntimeError", message=message, t=t, **more)


LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


@pytest.mark.parametrize(
    "text",
    [
        LOST,
        "recv, Connection reset by peer",
        "writev [10.0.0.1]:99: Broken pipe",
        "NCCL error: remote process exited or there was a network error, ncclRemoteError",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "Application timeout caused pair closure",
    ],
)
def test_texts_of_a_lost_peer(text: str) -> None:
    assert is_lost_peer(text)


@pytest.mark.parametrize("text", ["CUDA out of memory", "boom", "index 7 is out of bounds", "No space left on device"])
def test_texts_of_a_rank_in_trouble_of_its_own(text: str) -> None:
    assert not is_lost_peer(text)


def test_a_victim_that_died_first_is_not_the_first_failure() -> None:
    victim = weigh(_exit(0, at=1.0), _error(LOST, 0.9), NO_LOG)
    culprit = weigh(_exit(1, at=1.2), _error("boom", 0.8), NO_LOG)
    assert first_failure([victim, culprit]) is culprit


def test_a_silent_death_beats_every_victim() -> None:
    victim = weigh(_exit(0, at=1.0), _error(LOST, 0.9), NO_LOG)
    killed = weigh(_exit(2, at=1.1, code=None, number=signal.SIGKILL), None, NO_LOG)
    assert first_failure([victim, killed]) is killed


def test_the_oldest_exception_of_the_chain_decides() -> None:
    cleanup = weigh(_exit(1, 1.0), _error(LOST, 0.9, root_type="ValueError", root_message="boom"), NO_LOG)
    wrapped = weigh(_exit(0, 0.9), _error("step 3 failed", 0.8, root_type="RuntimeError", root_message=LOST), NO_LOG)
    assert (cleanup.victim, wrapped.victim) == (False, True)


def test_a_rank_that_we_ended_is_no_cause_unless_its_trouble_came_before() -> None:
    told = weigh(_exit(0, at=2.0, code=None, number=signal.SIGTERM, told=1.5), None, NO_LOG)
    first = weigh(_exit(1, at=1.4), _error("boom", 1.3), NO_LOG)
    earlier = weigh(_exit(2, at=2.0, told=1.5), _error("the real one", 1.0), NO_LOG)
    assert first_failure([told, first]) is first
    assert first_failure([told, first, earlier]) is earlier


def test_only_victims_leave_the_earliest_as_the_first() -> None:
    later, sooner = (weigh(_exit(r, at=t), _error(LOST, t), NO_LOG) for r, t in ((0, 2.0), (1, 1.0)))
    assert first_failure([later, sooner]) is sooner
    assert first_failure([]) is None


@given(st.permutations(range(4)), st.integers(0, 3))
def test_the_only_rank_without_a_lost_peer_is_named_in_any_order(order: list[int], culprit: int) -> None:
    failed = [
        weigh(_exit(rank, at=float(place)), _error("boom" if rank == culprit else LOST, float(place)), NO_LOG)
        for place, rank in enumerate(order)
    ]
    found = first_failure(failed)
    assert found is not None and found.exit.rank == culprit


def test_without_a_record_the_log_speaks_for_an_abort_and_for_a_script(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"terminate called: {LOST}\n" + "#0 frame\n" * 50)
    assert weigh(_exit(0, 1.0, code=None, number=signal.SIGABRT), None, log).victim
    assert not weigh(_exit(0, 1.0), None, log).victim
    log.write_text(f"Traceback (most recent call last):\n  x\nRuntimeError: {LOST}\n")
    assert weigh(_exit(0, 1.0), None, log).victim
    assert not weigh(_exit(0, 1.0, code=7), None, log).victim


def test_an_error_belongs_to_the_process_that_wrote_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    writer = JsonlWriter(run_dir.events(1))
    writer.write({"event": "exception", "pid": 999, "type": "ValueError", "message": "an earlier attempt"})
    writer.write({"event": "group", "pid": 101})
    writer.write({"event": "exception", "pid": 101, "type": "ValueError", "message": "this one"})
    writer.close()
    error = read_error(run_dir, _exit(1, 1.0))
    assert error is not None and error.message == "this one"
    assert read_error(run_dir, _exit(2, 1.0)) is None


def test_the_error_file_of_torchs_record_is_read(tmp_path: Path) -> None:
    body = {"message": {"message": "ValueError: boom: twice", "extraInfo": {"py_callstack": "Traceback …"}}}
    (tmp_path / "error.json").write_text(json.dumps(body))
    error = read_error(RunDir.create(tmp_path / "run"), _exit(0, 1.0), tmp_path / "error.json")
    assert error == UncaughtException(type="ValueError", message="boom: twice", traceback="Traceback …")


def test_descriptions_name_rank_and_reason() -> None:
    assert describe(_exit(1, 1.0), _error("boom\nmore", 1.0), "GPU1") == (
        "rank 1 (GPU1, pid 101) failed with RuntimeError: boom"
    )
    assert describe(_exit(1, 1.0, code=7), None, "GPU1") == "rank 1 (GPU1, pid 101) exited with code 7"
    killed = _exit(1, 1.0, code=None, number=9)
    assert describe(killed, None, "GPU1") == "rank 1 (GPU1, pid 101) was killed by SIGKILL"
    assert killed.exit_code == 137 and signal_name(99) == "signal 99"
