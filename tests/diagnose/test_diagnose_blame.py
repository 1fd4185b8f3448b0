"""The launcher, which names the first failure, and the verdict blame the same rank for the same words."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from staging import Stage

from model_check.record.rank_exits import RankExit, first_failure, read_error, weigh

GLOO = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:31722"
LOADER = [{"file": "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "line": 9, "function": "get"}]

VICTIMS: list[tuple[str, str, dict[str, Any]]] = [
    ("RuntimeError", GLOO, {}),
    ("RuntimeError", "writev [10.0.0.1]:99: Broken pipe", {}),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", {}),
    ("RuntimeError", "Rank 0 failed to pass monitoredBarrier in 30000 ms", {}),
    ("RuntimeError", "Socket Timeout", {}),
    ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0/0", {}),
    ("DistNetworkError", "The client socket has timed out after 60000ms", {}),
    ("DistBackendError", "NCCL error: remote process exited or there was a network error, ncclRemoteError", {}),
    ("DistBackendError", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", {}),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", {}),
    ("TrainingFailed", "step 3 failed", {"root_type": "RuntimeError", "root_message": GLOO}),
]
CULPRITS: list[tuple[str, str, dict[str, Any]]] = [
    ("ValueError", "boom", {}),
    ("RuntimeError", GLOO, {"root_type": "ValueError", "root_message": "boom"}),
    ("RuntimeError", "enforce fail at pair.cc:466. op.preamble.length <= op.nbytes. 16 vs 8. gloo/transport", {}),
    ("DistNetworkError", "The server socket has failed to listen on any local network address. EADDRINUSE", {}),
    ("DistBackendError", "Watchdog caught collective operation timeout: CUDA error: uncorrectable ECC error", {}),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", {"frames": LOADER}),
    ("TypeError", "TCPStore.__init__() got an unexpected keyword argument 'adress'", {}),
]


def log_of(stage: Stage, rank: int) -> Path:
    return stage.run_dir.logs / f"rank-{rank:05d}.log"


def blamed(stage: Stage) -> tuple[int, int]:
    """The rank that the launcher names, and the first that the verdict names."""
    exits = [
        RankExit(t=actor.t, rank=actor.rank, pid=actor.pid, code=actor.ended[0], signal=actor.ended[1])
        for actor in stage.actors
        if actor.ended is not None
    ]
    failed = [weigh(exit, read_error(stage.run_dir, exit), log_of(stage, exit.rank)) for exit in exits]
    first = first_failure(failed)
    assert first is not None
    return first.exit.rank, stage.first(after=0.1).ranks[0]


@pytest.mark.parametrize(
    ("kind", "message", "more", "guilty"), [(*v, 1) for v in VICTIMS] + [(*c, 0) for c in CULPRITS]
)
def test_an_exception(stage: Stage, kind: str, message: str, more: dict[str, Any], guilty: int) -> None:
    a, b = stage.ranks(2)
    stage.train(4)
    a.fails(kind, message, 40, **more)
    a.exits(1)
    b.t = a.t + 0.5
    b.fails("KeyError", "'labels'", 34)
    b.exits(1)
    assert blamed(stage) == (guilty, guilty)


@pytest.mark.parametrize(
    ("code", "number", "text", "guilty"),
    [
        (None, signal.SIGABRT, f"terminate called: {GLOO}\n" + "frame #0: c10::Error (0x7f in libc10.so)\n" * 200, 1),
        (None, signal.SIGABRT, "terminate called without an active exception\n", 0),
        (1, None, f"Traceback (most recent call last):\n  x\nRuntimeError: {GLOO}\n", 1),
        (1, None, f"RuntimeError: {GLOO}\nValueError: boom\n", 0),
        (7, None, f"RuntimeError: {GLOO}\n", 0),
    ],
)
def test_a_death_without_a_record(stage: Stage, code: int | None, number: int | None, text: str, guilty: int) -> None:
    a, b = stage.ranks(2)
    stage.train(4)
    log = log_of(stage, 0)
    log.parent.mkdir(exist_ok=True)
    log.write_text(text)
    a.exits(code, signal=number)
    b.t = a.t + 0.5
    b.fails("KeyError", "'labels'", 34)
    b.exits(1)
    assert blamed(stage) == (guilty, guilty)
