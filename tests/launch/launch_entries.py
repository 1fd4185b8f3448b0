"""What the ranks of the launch tests do."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from model_check.errors import DataError
from model_check.record.rank_context import RankContext


def _mark(context: RankContext, name: str) -> None:
    (context.run_dir / name).touch()


def _join() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist


def _sum_over_ranks(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def sums(context: RankContext, payload: Any) -> None:
    dist = _join()
    print(f"sum {_sum_over_ranks(context.rank + 1):g} of {context.world_size} as {context.label} on {context.device}")
    dist.destroy_process_group()


def fails_while_peers_wait(context: RankContext, payload: dict[str, Any]) -> None:
    """Rank `culprit` fails in the way `how`; the others are in a collective by then."""
    _join()
    _sum_over_ranks(1.0)
    if context.rank != payload["culprit"]:
        _sum_over_ranks(1.0)
        return
    how = payload["how"]
    if how == "raise":
        raise ValueError("boom at the source")
    if how == "user error":
        raise DataError("the shard is empty", remedy="name another")
    if how == "sys.exit":
        sys.exit(7)
    if how == "os._exit":
        os._exit(7)
    if how == "wrapped":
        try:
            raise ValueError("boom at the source")
        finally:
            raise RuntimeError("Connection closed by peer")
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(60)


def deaf_after_failure(context: RankContext, payload: Any) -> None:
    """Rank 1 fails; rank 0 ignores SIGTERM, so only SIGKILL ends it."""
    if context.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _mark(context, "deaf")
        time.sleep(60)
    while not (context.run_dir / "deaf").exists():
        time.sleep(0.01)
    raise ValueError("rank 1 fails")


def fails_on_first_attempt(context: RankContext, payload: Any) -> None:
    dist = _join()
    _sum_over_ranks(1.0)
    if context.attempt == 0 and context.rank == 1:
        raise ValueError("only the first time")
    print(f"attempt {context.attempt} sum {_sum_over_ranks(1.0):g}")
    dist.destroy_process_group()


def sleeps(context: RankContext, payload: Any) -> None:
    _mark(context, f"ready-{context.rank}")
    time.sleep(60)


def saves_on_sigterm(context: RankContext, payload: Any) -> None:
    def save(number: int, frame: object) -> None:
        _mark(context, f"saved-{context.rank}")
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    _mark(context, f"ready-{context.rank}")
    time.sleep(60)


def ignores_sigterm(context: RankContext, payload: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _mark(context, f"ready-{context.rank}")
    time.sleep(60)


def one_fails_on_sigterm(context: RankContext, payload: Any) -> None:
    """Rank 1 fails instead of saving; rank 0 waits for it, as in a collective that nothing interrupts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if context.rank == 0 else lambda *_: sys.exit(3))
    _mark(context, f"ready-{context.rank}")
    time.sleep(60)


def has_children(context: RankContext, payload: Any) -> None:
    """A forked child (as a loader worker is) and a spawned program; their pids go to a file."""
    import subprocess

    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    spawned = subprocess.Popen(["sleep", "60"])
    scratch = context.run_dir / f".children-{context.rank}"
    scratch.write_text(f"{forked} {spawned.pid}")
    scratch.rename(context.run_dir / f"children-{context.rank}")
    time.sleep(60)


def leaves_children(context: RankContext, payload: Any) -> None:
    import subprocess

    spawned = subprocess.Popen(["sleep", "60"])
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    Path(context.run_dir / f"left-{context.rank}").write_text(f"{spawned.pid} {forked}")


def prints_a_lot(context: RankContext, payload: int) -> None:
    for number in range(payload):
        stream = sys.stdout if number % 2 else sys.stderr
        print(f"line {number} of rank {context.rank} " + "x" * (number % 97), file=stream)
    print(f"[{context.label}] Step [0/1] | already labelled")
    os.write(1, b"bytes \xff\xfe and \x1b[31mred\x1b[0m and \x1b]0;title\x07done\n")
    os.write(1, b"1%\r50%\r100%\n")
    os.write(1, b"y" * 200_000 + b"\n")
    os.write(1, b"the last line has no end")


def tells_its_environment(context: RankContext, payload: Any) -> None:
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "EXTRA")
    print(" ".join(f"{name}={os.environ.get(name)}" for name in names))
    own_session = os.getsid(0) == os.getpid()
    print(f"threads={torch.get_num_threads()} device={context.device} own session={own_session}")


def says_goodbye(context: RankContext, payload: Any) -> None:
    atexit.register(print, "goodbye")


def tells_if_warm(context: RankContext, payload: Any) -> None:
    print(f"warm={'torch._dynamo' in sys.modules} payload={payload}")
