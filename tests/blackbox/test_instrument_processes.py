"""Ranks that are stuck, killed, forked, spawned or installed late: the black box of each is its own and readable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from model_check.blackbox.service import request
from model_check.record import RunDir
from model_check.record.ring import RingTail, open_spans, read_header, read_ring
from tests.blackbox.observed_runs import Runner, free_port, injected_environment, rank_environment

STUCK = """\
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3, 5), op=dist.ReduceOp.MAX)
time.sleep(300)
"""


@contextmanager
def started(path: Path, run_dir: RunDir, world: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, path.name],
            cwd=path.parent,
            env={**injected_environment(run_dir), **rank_environment(rank, world, port)},
        )
        for rank in range(world)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.05)


def test_a_rank_in_a_collective_answers_and_its_ring_survives_sigkill(
    tmp_path: Path, script: Callable[[str], Path]
) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    with started(script(STUCK), run_dir, 2) as ranks:
        tail = RingTail(run_dir.ring(0))
        seen = []

        def is_stuck() -> bool:
            seen.extend(tail.poll())
            return any(c.op == "all_reduce" and c.shape == (3, 5) for c in open_spans(seen))

        wait_for(is_stuck, "the collective that nobody joins")
        socket = read_header(run_dir.ring(0)).service
        assert Path(socket).stat().st_mode & 0o077 == 0, "only its owner may ask a rank"
        # The record is written before the call: give the call itself a moment to reach the flight recorder.
        wait_for(lambda: len(_in_flight(socket)) == 1, "the collective in the flight recorder", 20)
        (entry,) = _in_flight(socket)
        assert entry["profiling_name"] == "gloo:all_reduce" and entry["input_sizes"] == [[3, 5]]
        assert 'train.py", line 8 in <module>' in request(socket, "stacks")["text"]
        os.kill(ranks[0].pid, signal.SIGKILL)
        ranks[0].wait()
    reading = read_ring(run_dir.ring(0))
    (innermost,) = reading.open_spans()
    assert (innermost.site, innermost.op, innermost.shape, innermost.collective_seq, innermost.group) == (
        "train.py:8",
        "all_reduce",
        (3, 5),
        2,
        "default",
    )


def _in_flight(socket: str) -> list[dict[str, object]]:
    return [entry for entry in request(socket, "flight")["entries"] if not entry["retired"]]


def test_asking_a_rank_that_is_gone_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        request(str(tmp_path / "gone.sock"), "flight")
    with pytest.raises(ValueError, match="not for secrets"):
        request(str(tmp_path / "gone.sock"), "secrets")


OWN_RANKS = """\
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.barrier()
    if rank == 1:
        raise KeyError("only here")
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        mp.start_processes(rank_main, args=(os.environ["PORT"],), nprocs=2, start_method=sys.argv[1])
    except mp.ProcessRaisedException as error:
        print("parent saw rank", error.error_index)
"""


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_that_starts_its_own_ranks(tmp_path: Path, script: Callable[[str], Path], how: str) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    path = script(OWN_RANKS)
    parent = subprocess.run(
        [sys.executable, path.name, how],
        cwd=path.parent,
        env={**injected_environment(run_dir), "PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert parent.returncode == 0, parent.stderr
    assert parent.stdout == "parent saw rank 1\n"
    headers = [read_header(run_dir.ring(rank)) for rank in (0, 1)]
    assert [(h.rank, h.world_size) for h in headers] == [(0, 2), (1, 2)]
    assert headers[0].pid != headers[1].pid
    events = [_events(run_dir, rank) for rank in (0, 1)]
    (failure,) = [e for e in events[1] if e["event"] == "exception"]
    assert (failure["type"], failure["user_frame"]["line"]) == ("KeyError", 14)
    # The parent ends the other rank with SIGTERM, which may come before its last line.
    assert {e["via"] for e in events[0] if e["event"] == "exit"} <= {"return"}
    ops = [
        c.op for c in read_ring(run_dir.ring(0)).crumbs if c.event == "begin" and c.phase in ("collective", "barrier")
    ]
    assert ops == ["all_reduce", "barrier"]


def _events(run_dir: RunDir, rank: int) -> list[dict[str, object]]:
    from model_check.record import read_jsonl

    return read_jsonl(run_dir.events(rank)).records


@pytest.mark.slow
def test_a_lone_script_is_rank_0_of_1_once_it_trains(run: Runner) -> None:
    seen = run(
        "import torch\n"
        "net = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.ones(2)).sum().backward()\n"
        "    opt.step()\n",
        world=None,
    )
    assert seen.codes == [0], seen.errors
    assert (seen.ring().header.rank, seen.ring().header.world_size) == (0, 1)
    assert [c.step for c in seen.crumbs(event="point", phase="step")] == [0, 1, 2]
    assert [c.detail for c in seen.crumbs(event="begin", phase="forward")] == ["Linear", "Linear"]


@pytest.mark.slow
def test_a_lone_script_trains_on_where_its_ring_has_no_room(run: Runner) -> None:
    seen = run(
        "import resource\n"
        "import torch\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))\n"
        "net = torch.nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.ones(2)).sum().backward()\n"
        "    opt.step()\n"
        "print('trained')\n",
        world=None,
    )
    assert (seen.codes, seen.outputs) == ([0], ["trained\n"]), seen.errors


LATE = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from model_check.blackbox.install import install
from model_check.blackbox.spans import span

install(sys.argv[1], rank=0, world_size=1, role="rank")
with span("eval", "validation"):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    all_reduce(torch.ones(7))
dist.destroy_process_group()
"""


def test_installed_after_torch_as_our_trainer_does(tmp_path: Path, script: Callable[[str], Path]) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    path = script(LATE)
    done = subprocess.run(
        [sys.executable, path.name, str(run_dir.root)], cwd=path.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    begun = [(c.phase, c.op, c.site) for c in read_ring(run_dir.ring(0)).crumbs if c.event == "begin"]
    assert begun[0][0] == "eval"
    assert ("collective", "all_reduce", "train.py:11") in begun, "the name was taken before it was wrapped"


HELPED = """\
import os, subprocess, sys
import torch
import torch.distributed as dist

def start_helper():
    # An evaluator that knows nothing of the job: its ranks are numbered from 0 again.
    command, pipe = [sys.executable, "helper.py", str(SIZE)], subprocess.PIPE
    return [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe) for rank in range(SIZE)]

first = os.environ["RANK"] == "0"
helpers = start_helper() if first and WHEN == "before" else []
for helper in helpers:
    assert helper.stdout.readline() == b"up\\n"
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if first and WHEN == "after":
    helpers = start_helper()
for helper in helpers:
    helper.stdin.close()
assert [helper.wait() for helper in helpers] == [0] * len(helpers)
dist.all_reduce(torch.ones(2))
print(os.getpid())
"""
HELPER = """\
import sys
import torch
import torch.distributed as dist

size, rank = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"file://{sys.path[0]}/store", rank=rank, world_size=size)
dist.broadcast(torch.ones(3, 3), src=0)
print("up", flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("size", "when"),
    [
        (1, "after"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "before"), (2, "before"), (3, "before"), (4, "after"))
        ),
    ],
)
def test_a_helper_with_a_process_group_of_its_own_is_no_rank(
    script: Callable[[str, str], Path], run: Runner, size: int, when: str
) -> None:
    script(HELPER, "helper.py")
    seen = run(f"SIZE, WHEN = {size}, {when!r}\n" + HELPED, world=2, timeout=120)  # up to six processes import torch
    assert seen.codes == [0, 0], seen.errors
    assert sorted(path.name for path in seen.run_dir.blackbox_dir.glob("*.ring")) == [
        "rank-00000.ring",
        "rank-00001.ring",
    ]
    for rank in (0, 1):
        assert seen.ring(rank).header.pid == int(seen.outputs[rank])
        assert [c.op for c in seen.crumbs(rank, event="begin", phase="collective")] == ["all_reduce"] * 2
