"""The ranks of one attempt, as the launcher sees them: start them, hear of their ends, stop them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from model_check.errors import LaunchError
from model_check.launch.nursery import EndOrphans, Nursery, RankEnded, RankRefused, RankStarted, SignalRank, StartRank
from model_check.record.events import job as events
from model_check.record.events.job import RankExit
from model_check.record.journal import Journal
from model_check.record.process_sample import RankSample
from model_check.supervise import processes

_STOP_POLL_S = 0.05
_SAVERS_LOOK_S = 1.0
_SAVERS_CPU_S = 0.05  # between two looks
_SAVERS_BYTES = 1 << 14


@dataclass
class RankGroup:
    """Starts N ranks through the nursery and keeps the order in which they ended."""

    _nursery: Nursery
    _journal: Journal
    _requests: Sequence[StartRank]
    _on_exit: Callable[[RankExit], None] | None = None

    def __post_init__(self) -> None:
        self._rank_of: dict[int, int] = {}
        self._signalled: dict[int, float] = {}
        self.attempt = self._requests[0].context.attempt
        self.pids: dict[int, int] = {}
        self.exits: list[RankExit] = []

    @property
    def running(self) -> list[int]:
        """Ranks that were started and have not ended."""
        ended = {exit.rank for exit in self.exits}
        return [rank for rank in self.pids if rank not in ended]

    def start(self) -> None:
        for request in self._requests:
            self._nursery.send(request)
        while len(self.pids) < len(self._requests):
            self.wait(1.0)

    def wait(self, timeout_s: float) -> None:
        """Takes in what happened; waits up to the timeout if nothing has."""
        for message in self._nursery.messages(timeout_s):
            if isinstance(message, RankStarted):
                self._on_started(message)
            elif isinstance(message, RankEnded):
                self._on_ended(message)
            elif isinstance(message, RankRefused):
                self.kill()
                raise LaunchError(
                    f"rank {message.rank} could not be started: {message.reason}",
                    remedy="free memory or processes, or start fewer ranks",
                )

    def tell(self, number: int) -> None:
        """Tells every running rank, and only the rank: its loader workers must live while it saves."""
        self._send(number, tree=False)

    def kill(self) -> None:
        """Ends every running rank with all its descendants, now."""
        self._send(signal.SIGKILL, tree=True)

    def pass_on(self, number: int) -> None:
        """Forwards a signal that is meant for the script, which decides what happens."""
        for rank in self.running:
            self._nursery.send(SignalRank(self.pids[rank], number))

    def end(
        self,
        grace_s: float,
        number: int = signal.SIGTERM,
        *,
        hurry: Callable[[], bool] | None = None,
        lost_s: float = math.inf,
        busy_s: float = 0.0,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Sends the signal, waits for the grace period, sends SIGKILL; returns when all are gone.

        A paused rank is resumed, because the signal would not reach it otherwise. If `hurry` returns true, the grace
        period ends at once, and so do processes that clean ranks left behind. If a rank fails meanwhile, the others get
        at most `lost_s` more. Ranks that handle the signal and are at work after the grace period get up to `busy_s`
        in all, unless `interrupted`.
        """
        savers_until = time.monotonic() + busy_s
        savers = self._samples(r for r in self.running if busy_s and processes.catches(self.pids[r], number))
        self.tell(number)
        for rank in self.running:
            if processes.is_stopped(self.pids[rank]):
                self._nursery.send(SignalRank(self.pids[rank], signal.SIGCONT))
        hurried = False
        deadline = time.monotonic() + grace_s
        while self.running and time.monotonic() < deadline and not (hurried := hurry is not None and hurry()):
            self.wait(_STOP_POLL_S)
            lost_at = min((exit.t for exit in self.exits if exit.failed_by_itself), default=math.inf)
            deadline = min(deadline, lost_at + lost_s)
        if savers and not hurried:
            self._let_savers_finish(savers, savers_until, interrupted)
        if self.running:
            self.kill()
        if hurried:
            self._nursery.send(EndOrphans())
        while self.running:
            self.wait(_STOP_POLL_S)

    def _let_savers_finish(self, seen: dict[int, RankSample], deadline: float, interrupted: Callable[[], bool]) -> None:
        """Waits while one of these ranks computes or moves bytes: it may be saving. Others wait for a lost peer."""
        while time.monotonic() < deadline and not interrupted():
            before, seen = seen, self._samples([rank for rank in self.running if rank in seen])
            if not any(_has_worked(before[rank], now) for rank, now in seen.items()):
                return
            look_at = min(deadline, time.monotonic() + _SAVERS_LOOK_S)
            while self.running and not interrupted() and (left := look_at - time.monotonic()) > 0:
                self.wait(min(left, _STOP_POLL_S))

    def _samples(self, ranks: Iterable[int]) -> dict[int, RankSample]:
        seen = {rank: processes.sample(self.pids[rank]) for rank in ranks}
        return {rank: sample for rank, sample in seen.items() if sample is not None}

    def _send(self, number: int, *, tree: bool) -> None:
        now = time.monotonic()
        for rank in self.running:
            self._signalled.setdefault(rank, now)
            self._nursery.send(SignalRank(self.pids[rank], number, tree))
            name = signal.Signals(number).name
            self._journal.write(events.SignalSent(t=now, rank=rank, pid=self.pids[rank], signal=name))

    def _on_started(self, message: RankStarted) -> None:
        self.pids[message.rank] = message.pid
        self._rank_of[message.pid] = message.rank
        self._journal.write(
            events.RankStarted(t=message.at_monotonic, rank=message.rank, pid=message.pid, attempt=self.attempt)
        )

    def _on_ended(self, message: RankEnded) -> None:
        rank = self._rank_of.get(message.pid)
        if rank is None:
            return  # a rank of an earlier attempt
        exit = RankExit(
            rank=rank,
            pid=message.pid,
            code=message.code,
            signal=message.signal,
            t=message.at_monotonic,
            attempt=self.attempt,
            signalled_at=self._signalled.get(rank),
        )
        self.exits.append(exit)
        self._journal.write(exit)
        if self._on_exit is not None:
            self._on_exit(exit)


def _has_worked(before: RankSample, now: RankSample) -> bool:
    moved, computed = now.io_bytes - before.io_bytes, now.cpu_s - before.cpu_s
    return moved >= _SAVERS_BYTES or computed >= _SAVERS_CPU_S or "D" in processes.thread_states([now.pid])
