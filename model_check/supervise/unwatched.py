"""Gathers evidence of ranks that record themselves (`model_check.observe`) and that no launcher of ours watches.

Our launcher takes stacks and samples when a rank has been quiet for too long. Without it, the process that asks for the
verdict takes them, and only if a rank is quiet: a healthy job is not touched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

from model_check.record import RunDir
from model_check.record.events import read_events
from model_check.record.events.job import RankExit
from model_check.record.journal import Journal
from model_check.record.process_identity import is_near, live_pid
from model_check.record.ring import RingHeader, read_header
from model_check.supervise.collect import FlightRequest, Gatherer
from model_check.supervise.process_exits import exit_code_recorded
from model_check.supervise.watched_rank import Pulse

_RING = re.compile(r"rank-(\d+)\.ring")
_QUIET_S = 5.0  # as long as the supervisor's shortest threshold
_ROUNDS = 3  # only several looks tell a loop from progress
_BETWEEN_ROUNDS_S = 0.5


def look_at_ranks(
    run_dir: RunDir, request_flight: FlightRequest | None = None, pause: Callable[[float], None] = time.sleep
) -> bool:
    """Returns whether a rank lives on this host. If one is quiet, takes stacks, samples and flight records of all."""
    headers = {
        int(found[1]): read_header(path)
        for path in sorted(run_dir.blackbox_dir.glob("rank-*.ring"))
        if (found := _RING.fullmatch(path.name))
    }
    pids = {rank: pid for rank, who in headers.items() if (pid := live_pid(who)) is not None}
    if not pids:
        return False
    with suppress(OSError):  # of a directory that may only be read, the verdict is made of what is there
        _take_evidence(run_dir, headers, pids, request_flight, pause)
    return True


def _take_evidence(
    run_dir: RunDir,
    headers: Mapping[int, RingHeader],
    pids: Mapping[int, int],
    request_flight: FlightRequest | None,
    pause: Callable[[float], None],
) -> None:
    journal = Journal(run_dir)
    gather = Gatherer(run_dir, journal, request_flight)
    try:
        _write_exits(run_dir, journal, {rank: who for rank, who in headers.items() if rank not in pids})
        if any(_is_quiet(run_dir, rank) for rank in pids):
            for number in range(_ROUNDS):
                if number:
                    pause(_BETWEEN_ROUNDS_S)
                gather.sample(pids)
                gather.stacks(pids)
            gather.flight(pids)
    finally:
        gather.close()
        journal.close()


def _is_quiet(run_dir: RunDir, rank: int) -> bool:
    with closing(Pulse(run_dir.ring(rank), started_at=0.0)) as pulse:
        return pulse.beat() and time.monotonic() - pulse.last_at > _QUIET_S


def _write_exits(run_dir: RunDir, journal: Journal, ended: Mapping[int, RingHeader]) -> None:
    """Records the exit of ranks whose process is gone, with the exit code that they announced, if any."""
    events = read_events(run_dir.supervisor_events)
    known = {(exit.rank, exit.pid) for exit in events if isinstance(exit, RankExit)}
    for rank, who in ended.items():
        if is_near(who) and who.pid and (rank, who.pid) not in known:
            journal.write(RankExit(rank=rank, pid=who.pid, code=exit_code_recorded(run_dir, rank, who.pid)))
