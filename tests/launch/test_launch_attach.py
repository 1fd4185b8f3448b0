"""Attaching to jobs that know nothing of us: who is a rank, where it stands, who waits for whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_check.cli.main import main
from model_check.errors import UsageError
from model_check.record import RunDir, read_json, read_jsonl
from model_check.record.stacks import Frame
from model_check.supervise import processes
from model_check.supervise.attach import JobPicture, RankPosition, describe, look_at, merge
from model_check.supervise.job_finder import FoundJob, FoundRank, find_jobs, jobs_of

# Stand-ins with torch's paths and names: positions are read from stacks, and these stacks look the same.
_COLLECTIVES = "import os\ndef all_reduce():\n    os.read(os.pipe()[0], 1)\n"
_LOADER = "import os\ndef next_batch():\n    os.read(os.pipe()[0], 1)\n"
_SCRIPT = """\
import os, sys, time
sys.path.insert(0, {library!r})
import distributed_c10d, dataloader

class work:
    wait = time.sleep  # C code without a frame of its own, as in torch

def train(rank):
    open({folder!r} + f"/up-{{rank}}", "w").close()
    if {loader_rank} == rank:
        dataloader.next_batch()
    elif {sleeper} == rank:
        time.sleep(100)
    elif {waiter} == rank:
        work.wait(100)
    else:
        distributed_c10d.all_reduce()

train(int(os.environ["RANK"]) if "RANK" in os.environ else int(sys.argv[1]))
"""


class HangingJob:
    def __init__(
        self,
        folder: Path,
        nproc: int,
        *,
        loader_rank: int = -1,
        sleeper: int = -1,
        waiter: int = -1,
        environment: bool = True,
    ):
        library = folder / "site-packages" / "torch"
        for path, code in (("distributed", _COLLECTIVES), ("utils/data", _LOADER)):
            (library / path).mkdir(parents=True)
            name = "distributed_c10d.py" if path == "distributed" else "dataloader.py"
            (library / path / name).write_text(code)
        both = [str(library / "distributed"), str(library / "utils" / "data")]
        chosen = {"loader_rank": loader_rank, "sleeper": sleeper, "waiter": waiter}
        code = _SCRIPT.format(library=both[0], folder=str(folder), **chosen)
        self.script = folder / "train.py"
        self.script.write_text(
            code.replace("import distributed", f"sys.path.insert(0, {both[1]!r})\nimport distributed")
        )
        self.ranks = [self._start(rank, nproc, environment) for rank in range(nproc)]
        end = time.monotonic() + 20.0
        while not all((folder / f"up-{rank}").exists() for rank in range(nproc)):
            assert time.monotonic() < end, "the ranks did not start"
            time.sleep(0.01)

    def _start(self, rank: int, nproc: int, environment: bool) -> subprocess.Popen[bytes]:
        told = {"RANK": str(rank), "WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
        env = {k: v for k, v in os.environ.items() if k not in told} | (told if environment else {})
        return subprocess.Popen([sys.executable, str(self.script), str(rank)], stdin=subprocess.PIPE, env=env)

    def line(self, text: str) -> str:
        number = next(n for n, line in enumerate(self.script.read_text().splitlines(), 1) if text in line)
        return f"{self.script}:{number}"

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Callable[..., HangingJob]]:
    jobs: list[HangingJob] = []

    def start(*args: Any, **options: Any) -> HangingJob:
        jobs.append(HangingJob(tmp_path, *args, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        for rank in job.ranks:
            rank.kill()
            rank.communicate()


def test_the_rank_in_the_loader_is_what_the_others_wait_for(tmp_path: Path, hang: Callable[..., HangingJob]) -> None:
    hanging = hang(4, loader_rank=1)
    (job,) = jobs_of(hanging.pids)
    assert [(r.rank, r.pid) for r in job.ranks] == list(enumerate(hanging.pids))
    run_dir = RunDir.create(tmp_path / "run")
    picture = look_at(job, run_dir=run_dir)
    assert picture.awaited == (1,)
    assert picture.sentence == "rank 1 is what the others wait for"
    assert [(p.where, p.doing, p.ranks) for p in picture.positions] == [
        (hanging.line("distributed_c10d.all_reduce()"), "all_reduce", (0, 2, 3)),
        (hanging.line("dataloader.next_batch()"), "the data loader", (1,)),
    ]
    dump = read_json(run_dir.stacks_dir / "rank-00001.2.json")
    assert (dump["rank"], dump["process"], dump["pid"]) == (1, "rank", hanging.pids[1])
    samples = [r for r in read_jsonl(run_dir.supervisor_events).records if r["event"] == "sample"]
    assert len(samples) == 2 and set(samples[0]["ranks"]) == {"0", "1", "2", "3"}
    assert "3 ranks stand at" in describe(picture)


def test_a_rank_that_waits_for_its_own_message_is_a_waiting_one(hang: Callable[..., HangingJob]) -> None:
    job = hang(3, waiter=1)
    picture = look_at(jobs_of(job.pids)[0])
    assert [s.kind for s in picture.ranks] == ["waiting"] * 3
    assert picture.sentence.startswith("every rank waits, but not at the same place: ranks 0, 2 in all_reduce at ")
    assert picture.sentence.endswith(
        f"rank 1 in the wait for a call that it started before at {job.line('work.wait(100)')}"
    )


def test_diagnose_tells_what_attach_saw(
    tmp_path: Path, hang: Callable[..., HangingJob], capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = hang(2, loader_rank=1)
    folder = str(tmp_path / "run")
    told = []
    for words in (["attach", "--run-dir", folder, *map(str, hanging.pids)], ["diagnose", folder]):
        with pytest.raises(SystemExit) as done:
            main(words)
        assert done.value.code == 0
        told.append(capsys.readouterr().out)
    assert "→ rank 1 is what the others wait for" in told[1]
    assert told[0] == told[1] + f"stacks and samples: {folder}\n"


def test_ranks_that_end_while_we_look_are_not_said_to_stand_anywhere(hang: Callable[..., HangingJob]) -> None:
    hanging = hang(2, sleeper=0)
    (job,) = jobs_of(hanging.pids)

    def end_them(_: float) -> None:
        for rank in hanging.ranks:
            rank.kill()
            rank.wait()

    picture = look_at(job, pause=end_them)
    assert [s.kind for s in picture.ranks] == ["ended", "ended"]
    assert describe(picture).splitlines()[1:] == [
        "  2 ranks ended while we looked (ranks 0, 1)",
        "  → the job ended while we looked",
    ]


def test_a_stopped_rank_is_called_stopped_and_stays_stopped(hang: Callable[..., HangingJob]) -> None:
    hanging = hang(2, sleeper=0)
    os.kill(hanging.pids[0], signal.SIGSTOP)
    (job,) = jobs_of(hanging.pids)
    picture = look_at(job)
    assert (picture.ranks[0].kind, picture.ranks[0].state) == ("stopped", "T")
    assert picture.awaited == (0,)
    stat = processes.read_stat(hanging.pids[0])
    assert stat is not None and stat.state == "T"


def test_ranks_without_a_variable_are_known_by_their_local_variable(hang: Callable[..., HangingJob]) -> None:
    hanging = hang(2, sleeper=1, environment=False)
    (job,) = jobs_of(list(reversed(hanging.pids)))
    assert [(r.rank, r.pid) for r in job.ranks] == list(enumerate(hanging.pids))
    assert look_at(job).awaited == (1,)


def test_a_child_with_the_environment_of_its_rank_is_no_rank(hang: Callable[..., HangingJob]) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print('up', flush=True); sys.stdin.read(); child.kill()\n"
    )
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"up\n"
        (job,) = [job for job in find_jobs() if job.name == f"localhost:{os.getpid()}"]
        assert [r.pid for r in job.ranks] == [rank.pid]
        rank.communicate()


def test_the_command_prints_json_and_refuses_a_pid_that_is_gone(
    hang: Callable[..., HangingJob], capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = hang(2, loader_rank=0)
    with pytest.raises(SystemExit) as done:
        main(["attach", "--json", *map(str, hanging.pids)])
    assert done.value.code == 0
    (picture,) = json.loads(capsys.readouterr().out)
    assert (picture["awaited"], picture["world_size"], picture["job"]) == ([0], 2, "127.0.0.1:29777")
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(SystemExit) as refused:
        main(["attach", str(gone.pid)])
    assert refused.value.code == 2
    assert f"there is no process {gone.pid}" in capsys.readouterr().err


def _position(rank: int, kind: Any, line: int, doing: str = "all_reduce", **more: Any) -> RankPosition:
    told = {"state": "S", "busy": False, "moving": False, **more}
    return RankPosition(rank, 100 + rank, kind, doing, Frame("train.py", line, "main"), **told)


def _merge(*positions: RankPosition, world_size: int | None = None) -> JobPicture:
    ranks = tuple(FoundRank(s.pid, s.rank, ()) for s in positions)
    return merge(FoundJob("a job", world_size, ranks), positions)


def test_a_minority_at_another_collective_is_named() -> None:
    picture = _merge(*(_position(r, "waiting", 41) for r in (0, 2, 3)), _position(1, "waiting", 50, "barrier"))
    assert picture.awaited == (1,)
    assert "rank 1 in barrier at train.py:50" in picture.sentence


def test_of_two_ranks_at_two_collectives_neither_is_blamed() -> None:
    picture = _merge(_position(0, "waiting", 41), _position(1, "waiting", 50, "barrier"))
    assert picture.awaited == ()
    assert picture.sentence.startswith("every rank waits, but not at the same place")


def test_ranks_on_other_hosts_are_not_forgotten() -> None:
    picture = _merge(_position(0, "waiting", 41), _position(1, "waiting", 41), world_size=4)
    assert "4 ranks belong to the job and 2 are on this host" in picture.sentence


def test_a_moving_job_is_called_moving() -> None:
    assert "moving" in _merge(_position(0, "code", 3, "its own code", moving=True)).sentence
    assert _merge(_position(0, "code", 3, "its own code")).sentence == "no rank waits for another"


def test_a_pid_that_never_was_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no process"):
        jobs_of([2**22 - 1])
