"""Evidence from outside: samples, stacks, flight records and traces of kills, written into the run directory.

Decides nothing. Each kind of evidence has its file in the run directory; a rank that cannot be read leaves a record
that says why.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from model_check.record import RunDir, write_json_atomic
from model_check.record.error_texts import PORT_TAKEN
from model_check.record.events.process import FlightRefused, PortHeld, Samples
from model_check.record.journal import Journal
from model_check.record.process_sample import RankSample
from model_check.record.redaction import redact_argv
from model_check.record.ring import read_header
from model_check.supervise import processes, stacks
from model_check.supervise.memorykills import MemoryKillWatch

_CHILDREN_PER_RANK = 4
_FLIGHT_WAIT_S = 2.0
_KEPT_FILES = 256  # newest files kept per kind and rank: a long run stalls often, and every look reads all of them
_TELLING = re.compile(r'"event": "(exception|exit|raised|swallowed_exception)"')
_PORT_NUMBER = re.compile(r"port:?\s*(\d{2,5})")

FlightRequest = Callable[[str, str], dict[str, Any]]


class Gatherer:
    """Takes evidence of the given ranks (rank -> pid). Rounds of stacks are numbered through the whole run."""

    def __init__(self, run_dir: RunDir, journal: Journal, request_flight: FlightRequest | None = None) -> None:
        self._run_dir = run_dir
        self._journal = journal
        self._request_flight = request_flight
        self._kills = MemoryKillWatch()
        self._stack_round = 0
        self._looks = 0  # since the last round
        self._flight_round = 0
        self._ports_named: set[int] = set()
        self._events_read: dict[int, int] = {}
        self._written: defaultdict[tuple[Path, int], deque[Path]] = defaultdict(deque)

    def sample(self, pids: Mapping[int, int]) -> dict[int, RankSample]:
        """One look at every rank through /proc."""
        samples: dict[int, RankSample] = {}
        for rank, pid in pids.items():
            seen = processes.sample(pid)
            if seen is not None:
                samples[rank] = seen
                self._kills.notice(pid)
        if samples:
            self._journal.write(Samples(machine_cpu_s=processes.machine_cpu_seconds(), ranks=samples))
        return samples

    def stacks(self, pids: Mapping[int, int], *, timeout_s: float = stacks.TIMEOUT_S) -> None:
        """One round of stacks: every rank and the children it waits for, all at once."""
        self._stack_round += 1
        self._looks = 0
        self._take_all(pids, pids, timeout_s)

    def look(self, pids: Mapping[int, int], with_children: Collection[int]) -> None:
        """A quick look between two rounds, counted with the earlier one. Each child costs as much as a rank."""
        self._looks += 1
        self._take_all(pids, with_children, stacks.TIMEOUT_S)

    def _take_all(self, pids: Mapping[int, int], with_children: Collection[int], timeout_s: float) -> None:
        targets = [(rank, pid, pid) for rank, pid in pids.items()]
        for rank, pid in ((rank, pid) for rank, pid in pids.items() if rank in with_children):
            children = [child for child in processes.children_of(pid) if _is_python(child)]
            targets += [(rank, pid, child) for child in children[:_CHILDREN_PER_RANK]]
        takers = [partial(self._take, rank, pid, target, timeout_s) for rank, pid, target in targets]
        if not takers:
            return
        self._run_dir.stacks_dir.mkdir(exist_ok=True)
        with ThreadPoolExecutor(min(8, len(takers)), thread_name_prefix="model-check-stacks") as pool:
            for (rank, _, _), done in zip(targets, [pool.submit(taker) for taker in takers], strict=True):
                if (path := done.result()) is not None:
                    self._keep(rank, path)

    def _keep(self, rank: int, path: Path) -> None:
        """Remembers a new file, and removes the oldest one if there are more than the limit."""
        kept = self._written[path.parent, rank]
        kept.append(path)
        if len(kept) > _KEPT_FILES:
            kept.popleft().unlink(missing_ok=True)

    def _take(self, rank: int, rank_pid: int, pid: int, timeout_s: float) -> Path | None:
        is_rank = pid == rank_pid
        in_passing = self._looks > 0  # a quick look sends no signal
        stack_signal = None if in_passing else read_header(self._run_dir.ring(rank)).stack_signal
        # A forked worker inherits the rank's handler and its file.
        taken = stacks.take(
            pid,
            timeout_s=timeout_s,
            fault_file=self._run_dir.stacks_dir / f"rank-{rank:05d}.fault.txt",
            fault_signal=stack_signal or 0,
        )
        if in_passing and taken.source != "py-spy":
            return None  # a stack from the kernel has no source lines, so the previous round says more
        process = "rank" if is_rank else "loader_worker" if taken.is_loader_worker else "child"
        round = f"{self._stack_round}" + (f".look-{self._looks}" if self._looks else "")
        return replace(taken, rank=rank, process=process).write(self._run_dir, round)

    def flight(self, pids: Mapping[int, int]) -> None:
        """The c10d flight recorder of every rank that answers."""
        if self._request_flight is None:
            return
        self._flight_round += 1
        sockets = {rank: read_header(self._run_dir.ring(rank)).service for rank in pids}
        asked = {rank: socket for rank, socket in sockets.items() if socket}
        if not asked:
            return
        self._run_dir.flight_dir.mkdir(exist_ok=True)
        pool = ThreadPoolExecutor(min(8, len(asked)), thread_name_prefix="model-check-flight")
        waiting = {rank: pool.submit(self._request_flight, socket, "flight") for rank, socket in asked.items()}
        deadline = time.monotonic() + _FLIGHT_WAIT_S
        for rank, answer in waiting.items():
            path = self._run_dir.flight_dir / f"rank-{rank:05d}.{self._flight_round}.json"
            try:
                write_json_atomic(path, answer.result(timeout=max(0.0, deadline - time.monotonic())))
                self._keep(rank, path)
            except (OSError, ValueError, TimeoutError) as error:
                self._journal.write(FlightRefused(rank=rank, error=f"{type(error).__name__}: {error}"))
        pool.shutdown(wait=False, cancel_futures=True)

    def memory_kills(self) -> None:
        """Writes an `oom` event for every kill by the kernel since the last look."""
        for kill in self._kills.new_kills():
            self._journal.write(kill)

    def hear(self, ranks: Iterable[int]) -> set[str]:
        """Reads what the ranks have newly written into their events: which of them say that something went wrong.

        Where a rank says that its port is taken, the holder is named at once: it may be gone a moment later.
        """
        news: set[str] = set()
        for rank in ranks:
            for line in self._new_events(rank):
                news |= set(_TELLING.findall(line)[:1])
                if PORT_TAKEN.search(line):
                    self._name_holders(map(int, _PORT_NUMBER.findall(line)))
        return news

    def _new_events(self, rank: int) -> list[str]:
        path, done = self._run_dir.events(rank), self._events_read.get(rank, 0)
        try:
            if path.stat().st_size == done:
                return []
            with path.open("rb") as file:
                file.seek(done)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._events_read[rank] = done + len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def _name_holders(self, ports: Iterable[int]) -> None:
        for port in ports:
            if port in self._ports_named:
                continue
            self._ports_named.add(port)
            holder = processes.port_holder(port)
            pid, command = (holder.pid, redact_argv(holder.command, os.environ)) if holder else (None, [])
            self._journal.write(PortHeld(port=port, holder_pid=pid, holder_cmd=" ".join(command)))

    def close(self) -> None:
        self._kills.close()


def _is_python(pid: int) -> bool:
    """Forked loader workers keep the interpreter's command line; tools that a script started do not."""
    command = processes.command_of(pid)
    return bool(command) and "python" in command[0].rpartition("/")[2]
