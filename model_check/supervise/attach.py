"""Looks at a job that hangs right now: two rounds of stacks from outside, merged by where the ranks stand.

Nothing is injected, stopped or signalled. Without a black box there is no history, so what is said is what two looks
a second apart show: who waits for the others, and who is somewhere else.
"""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from model_check.record import RunDir
from model_check.record.events.process import Attached, Picture, Samples
from model_check.record.journal import Journal
from model_check.record.process_sample import RankSample
from model_check.record.stacks import Frame, ProcessStacks
from model_check.record.typed import to_json
from model_check.supervise import processes, stacks
from model_check.supervise.job_finder import FoundJob, FoundRank

ROUND_PAUSE_S = 0.8
_ACTIVE_CPU_S = 0.05

Kind = Literal["waiting", "loader", "stopped", "input", "code", "unreadable", "ended"]

_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_COLLECTIVES = frozenset(
    {
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "init_process_group",
        "monitored_barrier",
        "new_group",
        "recv",
        "send",
        "wait_tensor",
    }
)
# The waits of threads, events and subprocesses are Python code with frames of their own; that of a Work is not.
_WAITS_FOR_WORK = re.compile(r"(?<!\bos)\.wait\(")
_COLLECTIVE_PREFIXES = ("all_gather", "broadcast", "gather", "reduce", "scatter")


@dataclass(frozen=True)
class RankPosition:
    """Where one rank stands: the user's line, what it calls there, and whether that is a wait for others."""

    rank: int
    pid: int
    kind: Kind
    doing: str
    frame: Frame | None
    state: str
    busy: bool
    moving: bool

    @property
    def where(self) -> str:
        return self.frame.site if self.frame else "an unknown place"


@dataclass(frozen=True)
class Position:
    """All ranks that stand at one place, doing one thing."""

    where: str
    function: str
    kind: Kind
    doing: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JobPicture:
    """One job, merged: the positions, largest group first, and the sentence about who waits for whom."""

    job: FoundJob
    ranks: tuple[RankPosition, ...]
    positions: tuple[Position, ...]
    awaited: tuple[int, ...]
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job.name,
            "world_size": self.job.world_size,
            "positions": [to_json(position) for position in self.positions],
            "ranks": [
                {"rank": s.rank, "pid": s.pid, "kind": s.kind, "doing": s.doing, "where": s.where, "state": s.state}
                | {"busy": s.busy, "moving": s.moving}
                for s in self.ranks
            ],
            "awaited": list(self.awaited),
            "sentence": self.sentence,
        }


@dataclass(frozen=True)
class _Look:
    """One process at one moment."""

    stacks: ProcessStacks
    sample: RankSample | None
    workers: tuple[ProcessStacks, ...] = ()


def look_at(job: FoundJob, *, run_dir: RunDir | None = None, pause: Callable[[float], None] = time.sleep) -> JobPicture:
    """Two rounds of stacks of every rank of the job, and what they say together."""
    numbered = [(rank.rank if rank.rank is not None else index, rank) for index, rank in enumerate(job.ranks)]
    rounds = []
    for number in (1, 2):
        if number == 2:
            pause(ROUND_PAUSE_S)
        looks = _round(numbered)
        rounds.append(looks)
        if run_dir is not None:
            _write_round(run_dir, number, looks)
    positions = [_position(rank, found.pid, rounds[0][rank], rounds[1][rank]) for rank, found in numbered]
    picture = merge(job, positions)
    if run_dir is not None:
        _write_picture(run_dir, picture)
    return picture


def _round(numbered: Sequence[tuple[int, FoundRank]]) -> dict[int, _Look]:
    samples = {rank: processes.sample(found.pid) for rank, found in numbered}
    children = {rank: [c.pid for c in seen.children] if seen else [] for rank, seen in samples.items()}
    pids = [found.pid for _, found in numbered] + [pid for group in children.values() for pid in group]
    taken = {dump.pid: dump for dump in stacks.take_many(pids)}
    return {
        rank: _Look(
            taken[found.pid],
            samples[rank],
            tuple(dump for pid in children[rank] if (dump := taken[pid]).is_loader_worker),
        )
        for rank, found in numbered
    }


def _write_round(run_dir: RunDir, number: int, looks: dict[int, _Look]) -> None:
    run_dir.stacks_dir.mkdir(exist_ok=True)
    for rank, look in looks.items():
        replace(look.stacks, rank=rank).write(run_dir, str(number))
        for worker in look.workers:
            replace(worker, rank=rank, process="loader_worker").write(run_dir, str(number))
    journal = Journal(run_dir)
    if number == 1:
        journal.write(Attached(nproc=len(looks)))
    journal.write(Samples(ranks={r: look.sample for r, look in looks.items() if look.sample is not None}))
    journal.close()


def _write_picture(run_dir: RunDir, picture: JobPicture) -> None:
    journal = Journal(run_dir)
    journal.write(Picture(lines=tuple(describe(picture).splitlines())))
    journal.close()


def _position(rank: int, pid: int, first: _Look, second: _Look) -> RankPosition:
    thread = second.stacks.main
    earlier = first.stacks.main
    kind, doing, frame = _read_stack(second)
    state = second.sample.state if second.sample else "?"
    busy = False
    if first.sample and second.sample:
        busy = second.sample.cpu_s - first.sample.cpu_s > _ACTIVE_CPU_S
    if kind == "unreadable" and not processes.is_alive(pid):
        kind, doing = "ended", "ended while we looked"
    elif state in ("T", "t"):
        kind, doing = "stopped", "stopped by a signal (SIGSTOP or a debugger)"
    elif second.sample and second.sample.syscall == "read" and second.sample.syscall_fd == 0:
        kind, doing = "input", "waiting for standard input"
    moving = thread is not None and earlier is not None and thread.frames != earlier.frames
    return RankPosition(rank, pid, kind, doing, frame, state, busy, moving)


def _read_stack(look: _Look) -> tuple[Kind, str, Frame | None]:
    """What the main thread does below the user's innermost line."""
    thread = look.stacks.main
    if thread is None or not thread.frames:
        return "unreadable", look.stacks.error or "no stack", None
    user = thread.user_frame
    inner = thread.frames[: thread.frames.index(user)] if user else thread.frames
    for frame in reversed(inner):
        call = frame.function.rpartition(".")[2]
        if frame.file.endswith(_COLLECTIVE_FILES) and (call in _COLLECTIVES or call.startswith(_COLLECTIVE_PREFIXES)):
            return "waiting", call, user
        if "torch/distributed/" in frame.file and call in (
            "rendezvous",
            "_create_c10d_store",
            "_tcp_rendezvous_handler",
        ):
            return "waiting", "init_process_group", user
        if "torch/utils/data/" in frame.file:
            at = _worker_frame(look)
            return "loader", "the data loader" + (f" (its worker stands at {at.site})" if at else ""), user
        if "torch/autograd/" in frame.file:
            # DDP's gradient all-reduce is awaited inside the backward pass, on a thread without Python frames.
            return "waiting", "backward (and its gradient all-reduce)", user
    if any(frame.file.startswith("<frozen importlib") for frame in inner):
        return "code", "an import", user
    if inner:
        outer = inner[-1]
        return "code", f"{outer.function} of {_library(outer.file)}", user
    if any("torch/utils/data/" in frame.file for frame in thread.frames):
        return "loader", "its own code, called by the data loader", user
    if user is not None and _WAITS_FOR_WORK.search(linecache.getline(user.file, user.line)):
        return "waiting", "the wait for a call that it started before", user
    return "code", "its own code", user


def _worker_frame(look: _Look) -> Frame | None:
    for worker in look.workers:
        thread = worker.main
        frame = thread.user_frame if thread else None
        if frame is not None:
            return frame
    return None


def _library(file: str) -> str:
    _, _, inside = file.rpartition("-packages/")
    return inside.partition("/")[0] if inside != file else file.rpartition("/")[2]


def merge(job: FoundJob, found: Sequence[RankPosition]) -> JobPicture:
    """Groups the ranks by where they stand and says who is missing where."""
    groups: dict[tuple[str, str, Kind, str], list[int]] = {}
    for rank in found:
        function = rank.frame.function if rank.frame else ""
        key = (rank.where, function, rank.kind, rank.doing)
        groups.setdefault(key, []).append(rank.rank)
    positions = sorted((Position(*key, tuple(ranks)) for key, ranks in groups.items()), key=lambda p: -len(p.ranks))
    awaited = tuple(s.rank for s in found if s.kind != "waiting")
    waiting = [position for position in positions if position.kind == "waiting"]
    if awaited and waiting:
        sentence = f"{_ranks(awaited)} {'is' if len(awaited) == 1 else 'are'} what the others wait for"
    elif len(waiting) > 1:
        most, *rest = waiting
        places = "; ".join(f"{_ranks(p.ranks)} in {p.doing} at {p.where}" for p in [most, *rest])
        sentence = f"every rank waits, but not at the same place: {places}"
        awaited = (
            tuple(rank for p in rest for rank in p.ranks) if len(most.ranks) > max(len(p.ranks) for p in rest) else ()
        )
    elif waiting:
        missing = job.world_size is not None and len(found) < job.world_size
        gone = f"; {job.world_size} ranks belong to the job and {len(found)} are on this host" if missing else ""
        sentence = f"every rank stands at {waiting[0].where} in {waiting[0].doing}{gone}"
    elif found and all(s.kind == "ended" for s in found):
        sentence = "the job ended while we looked"
    elif any(s.moving or s.busy for s in found):
        sentence = "no rank waits for another, and the job is moving"
    else:
        sentence = "no rank waits for another"
    return JobPicture(job, tuple(found), tuple(positions), awaited, sentence)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def describe(picture: JobPicture) -> str:
    """The picture for a person: one line a position, then the sentence."""
    size = f" of {picture.job.world_size}" if picture.job.world_size else ""
    lines = [f"job {picture.job.name}: {len(picture.ranks)}{size} ranks on this host"]
    for position in picture.positions:
        count = len(position.ranks)
        if position.kind == "ended":
            lines.append(f"  {count} {'rank' if count == 1 else 'ranks'} {position.doing} ({_ranks(position.ranks)})")
            continue
        stand = "rank stands" if count == 1 else "ranks stand"
        inside = f", {position.function}" if position.function and position.function != "<module>" else ""
        lines.append(f"  {count} {stand} at {position.where}{inside}: {position.doing} ({_ranks(position.ranks)})")
    for rank in picture.ranks:
        if rank.kind not in ("waiting", "ended"):
            how = "uses the CPU" if rank.busy else "does nothing"
            same = "its stack changes" if rank.moving else "its stack did not change"
            lines.append(f"  rank {rank.rank} (pid {rank.pid}, state {rank.state}): {how}; {same}")
    lines.append(f"  → {picture.sentence}")
    return "\n".join(lines)
