"""What a rank that holds others up is doing: its phase, its stacks and /proc together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model_check.diagnose import frames
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.source import Loop, enclosing_loop
from model_check.record.events.crashes import ThreadException
from model_check.record.events.process import LoaderWorker
from model_check.record.process_sample import RankSample
from model_check.record.stacks import Frame, ProcessStacks, ThreadStack

BUSY_SHARE = 0.5
SHARED_CORE = 0.05
_POLLING_SHARE = 0.002
POLLS_PER_S = 0.3
_RECENT_S = 4.0
_LOOKS = 6  # compared with each other: the looks of one burst
_WRITE_CALLS = frozenset({"write", "pwrite64", "writev", "open", "openat", "fsync", "fdatasync"})
_WRITE_CHANNELS = ("pipe_w", "fifo", "wait_for_partner", "nfs", "rpc_wait", "jbd2", "balance_dirty", "sync")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/code.py")


@dataclass(frozen=True)
class StuckRank:
    """One rank that does not move, seen from all sides."""

    evidence: Evidence
    rank: RankEvidence

    @property
    def phase(self) -> str:
        return self.rank.innermost.phase if self.rank.innermost is not None else "none"

    @cached_property
    def dumps(self) -> list[ProcessStacks]:
        """Stacks of the rank's own process taken since it last made progress.

        Of a process that goes on after SIGCONT, what was seen while it was stopped says nothing about what it does.
        """
        since = max(self.rank.last_progress_t or 0.0, 0.0 if self.stopped else self._last_stopped_t)
        return [dump for dump in self.rank.rank_stacks() if dump.t >= since]

    @property
    def _last_stopped_t(self) -> float:
        # Not "t": a tracer that takes a stack stops the process for a moment itself.
        return max((sample.t for sample in self.rank.samples if sample.state == "T"), default=0.0)

    @cached_property
    def main(self) -> ThreadStack | None:
        return next((dump.main for dump in reversed(self.dumps) if dump.main is not None), None)

    @cached_property
    def sample(self) -> RankSample | None:
        return self.rank.samples[-1] if self.rank.samples else None

    @cached_property
    def state(self) -> str:
        return self.sample.state if self.sample is not None else ""

    @cached_property
    def cpu_share(self) -> float | None:
        """Recent CPU seconds per second of the process; None without two samples."""
        quiet = self.recent_samples
        if len(quiet) < 2 or quiet[-1].t - quiet[0].t < 0.3:
            return None
        return (quiet[-1].cpu_s - quiet[0].cpu_s) / (quiet[-1].t - quiet[0].t)

    @cached_property
    def recent_samples(self) -> list[RankSample]:
        """Samples of the last few seconds; older ones say nothing about now."""
        quiet = self.quiet_samples
        return [s for s in quiet if s.t >= quiet[-1].t - _RECENT_S]

    @property
    def looks(self) -> list[ProcessStacks]:
        return self.dumps[-_LOOKS:]

    @cached_property
    def quiet_samples(self) -> list[RankSample]:
        since = self.rank.last_progress_t or 0.0
        return [s for s in self.rank.samples if s.t >= since]

    @property
    def quiet_s(self) -> float | None:
        """Seconds since its last record."""
        since = self.rank.last_progress_t
        return max(0.0, self.evidence.now - since) if since is not None else None

    @cached_property
    def failed_threads(self) -> list[ThreadException]:
        """Exceptions that ended helper threads of it, oldest first."""
        return self.rank.happened(ThreadException)

    @property
    def busy(self) -> bool:
        """It computes, or wants to and shares its core with others."""
        if self.cpu_share is None:
            return self.state == "R"
        runnable = sum(s.state == "R" for s in self.recent_samples) > len(self.recent_samples) / 2
        return self.cpu_share >= BUSY_SHARE or (runnable and self.cpu_share >= SHARED_CORE)

    @cached_property
    def frame(self) -> Frame | None:
        """The user's line, from the newest stack, else from the breadcrumbs."""
        if self.main is not None and self.main.user_frame is not None:
            return self.main.user_frame
        return self.rank.last_site()

    @property
    def script_over(self) -> bool:
        """Its main thread has come to the end of the script and waits for the other threads to end."""
        if self.main is None or self.main.user_frame is not None:
            return False
        return any(f.function == "_shutdown" and f.file.endswith("threading.py") for f in self.main.frames)

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def waits_for_input(self) -> bool:
        if self.phase == "input" or self.in_debugger:
            return True
        reads_stdin = (
            self.sample is not None
            and self.sample.syscall == "read"
            and (self.sample.syscall_target != "" and self.sample.syscall_target == self.sample.fd0)
        )
        return reads_stdin or (self.main is not None and not self.busy and frames.reads_input(self.main))

    @property
    def in_debugger(self) -> bool:
        return self.main is not None and any(f.file.endswith(_DEBUGGERS) for f in self.main.frames)

    @property
    def in_loader(self) -> bool:
        if self.phase == "data":
            return True
        return self.main is not None and frames.in_loader(self.main)

    @property
    def network(self) -> str | None:
        """The hub, tracker or network library it is inside of."""
        if self.phase in ("hub", "tracker"):
            return {"hub": "the hub", "tracker": "the experiment tracker"}[self.phase]
        return frames.network_package(self.main) if self.main is not None else None

    @cached_property
    def gil_holder(self) -> ThreadStack | None:
        """A thread that held the interpreter lock at the same line in every look, outside any Python loop."""
        holders = [next((t for t in dump.threads if t.gil), None) for dump in self.looks]
        places = {holder.innermost if holder is not None else None for holder in holders}
        if len(holders) < 2 or len(places) > 1 or (place := places.pop()) is None:
            return None
        if self.busy and place.is_user_code and self.loop_without_records(place) is not None:
            return None
        return holders[-1]

    @cached_property
    def lock_waiters(self) -> list[ThreadStack]:
        """Threads that wait for a lock, the main thread first; empty unless the main thread is one of them."""
        if self.main is None or not frames.waits_for_lock(self.main):
            return []
        dump = self.dumps[-1]
        others = [
            t for t in dump.threads if t is not dump.main and t.user_frame is not None and frames.waits_for_lock(t)
        ]
        return [self.main, *others]

    @property
    def write_is_stuck(self) -> bool:
        """It writes or opens for writing, uses no CPU, moves no bytes, and the kernel has it wait for just that."""
        writing = self.phase == "save" or (self.main is not None and frames.writes_file(self.main))
        if self.sample is None or not writing or self.busy or self._moves_bytes():
            return False
        blocked = self.state == "D" or self.sample.syscall in _WRITE_CALLS
        return blocked or any(name in self.sample.wchan for name in _WRITE_CHANNELS)

    def _moves_bytes(self) -> bool:
        quiet = [s.io_bytes for s in self.quiet_samples]
        return len(quiet) > 1 and quiet[-1] - quiet[0] > 1 << 20

    @property
    def spinning(self) -> Frame | None:
        """The user's line inside a loop that never touched the black box, while the process uses CPU."""
        if self.main is None or self.phase in ("compile", "save", "load", "model"):
            return None
        frame = self.main.user_frame
        if frame is None:
            return None
        in_loop = self.loop_without_records(frame) is not None
        direct = self.main.innermost is frame
        if self.busy and (in_loop or (direct and self._stays_in_one_function())):
            return frame
        return frame if in_loop and self.wakes and self._stays_in_one_function() else None

    @cached_property
    def wakes(self) -> bool:
        """Its main thread wakes up again and again; one that stays in a single blocking call does not."""
        quiet = self.quiet_samples[1:]  # on its way into a blocking call it may sleep a few times more
        counts = [s.switches for s in quiet if s.switches is not None]
        if self.sample is None or self.sample.switches is None:
            # Nobody counted: then the CPU time of all its threads has to do.
            return self.cpu_share is not None and self.cpu_share >= _POLLING_SHARE
        if len(counts) < 2:
            return False
        woken = counts[-1] - counts[0]
        return woken >= 2 and woken / (quiet[-1].t - quiet[0].t) >= POLLS_PER_S

    def _stays_in_one_function(self) -> bool:
        mains = [dump.main for dump in self.looks if dump.main is not None]
        seen = {(f.file, f.function) for main in mains if (f := main.user_frame) is not None}
        return len(mains) > 1 and len(seen) == 1

    def loop_without_records(self, frame: Frame) -> Loop | None:
        """The loop around a line in its own function, if no call in it is recorded; a training loop has many."""
        loop = enclosing_loop(frame)
        if loop is None:
            return None
        recorded = any(loop.first <= c.line <= loop.last and same_file(c.file, frame) for c in self.rank.crumbs)
        return None if recorded else loop

    @property
    def compiles(self) -> bool:
        """Whether its main thread compiles, or an autograd thread does while the main thread waits in backward."""
        if self.main is None:
            return False
        threads = self.dumps[-1].threads if self.phase == "backward" else (self.main,)
        return any(map(frames.compiles, threads))

    @property
    def waits_for_workers(self) -> bool:
        """Whether it waits in a loader that has worker processes."""
        loads_itself = self.main is not None and any("/_utils/fetch.py" in f.file for f in self.main.frames)
        return self.in_loader and not loads_itself

    def worker_looks(self) -> dict[int, list[ThreadStack]]:
        """The main threads of its loader workers, oldest look first."""
        found: dict[int, list[ThreadStack]] = {}
        since = self.rank.last_progress_t or 0.0
        for dump in self.rank.stacks:
            if dump.process == "loader_worker" and dump.main is not None and dump.t >= since:
                found.setdefault(dump.pid, []).append(dump.main)
        return {pid: looks[-_LOOKS:] for pid, looks in found.items()}

    def worker_dumps(self) -> Iterator[ProcessStacks]:
        since = self.rank.last_progress_t or 0.0
        newest: dict[int, ProcessStacks] = {}
        for dump in self.rank.stacks:
            if dump.process != "rank" and dump.threads and dump.t >= since:
                newest[dump.pid] = dump
        yield from newest.values()

    @cached_property
    def dead_workers(self) -> list[int]:
        """Loader workers that were started and are no longer among the rank's living children."""
        if self.sample is None or not self.waits_for_workers:
            return []
        alive = {child.pid for child in self.sample.children if child.alive}
        started = self.rank.happened(LoaderWorker)
        newest = max((n for n, event in enumerate(started) if event.worker_id == 0), default=0)
        known = [event.worker_pid for event in started[newest:]]  # earlier workers had finished
        seen = {child.pid for sample in self.rank.samples for child in sample.children}
        return [pid for pid in known if pid not in alive and pid in seen]


def same_file(file: str, frame: Frame) -> bool:
    """Whether a path means the frame's file; one of them may be relative to the folder the rank ran in."""
    return file == frame.file or (file != "" and Path(frame.root, file) == Path(frame.root, frame.file))
