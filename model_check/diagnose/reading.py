"""Reads a run directory into `Evidence`, whole or piece by piece as it grows.

The order matters: the launcher's events are read before the rings, so that the ring of a rank which is known to have
exited is final, and whatever is missing from it was never done.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_check.diagnose.evidence import Evidence, ProcSample, RankEvidence, RankExit, StackDump
from model_check.diagnose.flight import read_flight
from model_check.diagnose.frames import Frame, ThreadStack
from model_check.rundir import RunDir, read_json
from model_check.rundir.ring import Crumb, read_header, read_ring

_RANK_FILE = re.compile(r"rank-(\d+)")
_ROUND = re.compile(r"\.(\d+)\.")
_FAULT_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$', re.MULTILINE)
_LOG_TAIL_BYTES = 16 * 1024
_KEPT_SAMPLES = 600


class JsonlTail:
    """The records of an appended file, reading only what is new; a torn last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0
        self._damaged_lines = 0

    def update(self) -> list[str]:
        """Reads on; returns a sentence for what cannot be read."""
        from json import loads

        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, newline, rest = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            if not line.strip():
                continue
            try:
                record = loads(line)
            except ValueError:
                self._damaged_lines += 1
                continue
            if isinstance(record, dict):
                self.records.append(_with_common_names(record))
        damage = [f"{self.path.name}: {self._damaged_lines} lines are not JSON"] if self._damaged_lines else []
        return [*damage, f"{self.path.name}: the last record is torn (its writer was killed)"] if rest.strip() else damage


def _with_common_names(record: dict[str, Any]) -> dict[str, Any]:
    """Event records name their kind and their monotonic time in one way here."""
    if "event" not in record and "kind" in record:
        record["event"] = record["kind"]
    if "t" not in record and "monotonic" in record:
        record["t"] = record["monotonic"]
    if record.get("event") in ("exception", "swallowed_exception") and not record.get("frames") and record.get("traceback"):
        record["frames"] = [
            {"file": m["file"], "line": int(m["line"]), "function": m["function"]}
            for m in _FAULT_FRAME.finditer(str(record["traceback"]))
        ]
    return record


def read_stacks(path: Path) -> StackDump | None:
    """One dump, or None where the file is not one."""
    body = read_json(path)
    number = _RANK_FILE.search(path.name)
    if not isinstance(body, dict) or (number is None and "rank" not in body):
        return None
    threads = []
    for thread in body.get("threads") or []:
        if isinstance(thread, dict):
            frames = tuple(Frame.from_json(f) for f in thread.get("frames") or [] if isinstance(f, dict))
            threads.append(
                ThreadStack(
                    name=str(thread.get("name") or ""),
                    native_id=int(thread.get("native_id") or 0),
                    active=bool(thread.get("active")),
                    gil=bool(thread.get("gil")),
                    frames=frames,
                )
            )
    round_number = _ROUND.search(path.name)
    rank = body.get("rank")
    return StackDump(
        t=float(body.get("t") or 0.0),
        rank=rank if isinstance(rank, int) else int(number[1]) if number else -1,
        pid=int(body.get("pid") or 0),
        round=int(round_number[1]) if round_number else 0,
        source=str(body.get("source") or ""),
        process=str(body.get("process") or "rank"),
        threads=tuple(threads),
        error=body.get("error"),
    )


def read_fault_text(text: str) -> tuple[Frame, ...]:
    """The frames of the crashed thread in faulthandler's text, innermost first."""
    marker = text.rfind("Fatal Python error")
    body = text[marker:] if marker >= 0 else ""
    current = body.find("Current thread")
    if current >= 0:
        body = body[current:]
        end = body.find("\n\n")
        body = body[:end] if end >= 0 else body
    return tuple(Frame(m["file"], int(m["line"]), m["function"].strip()) for m in _FAULT_FRAME.finditer(body))


def _sample(t: float, body: Mapping[str, Any]) -> ProcSample:
    return ProcSample(
        t=t,
        pid=int(body.get("pid") or 0),
        state=str(body.get("state") or ""),
        cpu_s=float(body.get("cpu_s") or 0.0),
        rss=int(body.get("rss") or 0),
        threads=int(body.get("threads") or 0),
        wchan=str(body.get("wchan") or ""),
        syscall=str(body.get("syscall") or ""),
        stdin=str(body.get("fd0") or ""),
        syscall_target=str(body.get("syscall_target") or ""),
        io_bytes=int(body.get("io_bytes") or 0),
        children=tuple(c for c in body.get("children") or [] if isinstance(c, dict)),
    )


def samples_by_rank(supervisor: Iterable[Mapping[str, Any]]) -> dict[int, list[ProcSample]]:
    found: dict[int, list[ProcSample]] = {}
    for record in supervisor:
        if record.get("event") != "sample" or not isinstance(record.get("ranks"), dict):
            continue
        for number, body in record["ranks"].items():
            if str(number).isdigit() and isinstance(body, dict):
                found.setdefault(int(number), []).append(_sample(float(record.get("t") or 0.0), body))
    return {rank: samples[-_KEPT_SAMPLES:] for rank, samples in found.items()}


class Reader:
    """Holds what was read of one run directory and reads on at each `read`: the supervisor's cheap, repeated look."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._supervisor = JsonlTail(run_dir.supervisor_events)
        self._events: dict[int, JsonlTail] = {}
        self._rings: dict[int, tuple[tuple[int, int], dict[str, Any], tuple[Crumb, ...], list[str]]] = {}
        self._dumps: dict[Path, tuple[float, Any]] = {}

    def read(self, *, live: bool, now: float | None = None) -> Evidence:
        damage = self._supervisor.update()
        supervisor = self._supervisor.records
        exits, starts = _exits_and_starts(supervisor)
        samples = samples_by_rank(supervisor)
        numbers = self._rank_numbers() | set(exits) | set(starts) | set(samples)
        ranks = {n: self._read_rank(n, exits.get(n), starts.get(n), samples.get(n, []), damage) for n in sorted(numbers)}
        return Evidence(
            world_size=_world_size(supervisor, ranks),
            ranks=ranks,
            supervisor=tuple(supervisor),
            now=now if now is not None else time.monotonic() if live else _last_time(supervisor, ranks),
            live=live,
            cores=_cores(read_json(self.run_dir.environment)),
            damage=tuple(damage),
        )

    def _rank_numbers(self) -> set[int]:
        found = set()
        for folder, pattern in ((self.run_dir.blackbox_dir, "rank-*.ring"), (self.run_dir.events_dir, "rank-*.jsonl")):
            for path in folder.glob(pattern):
                if match := _RANK_FILE.search(path.name):
                    found.add(int(match[1]))
        return found

    def _read_rank(
        self, rank: int, exit: RankExit | None, started: float | None, samples: list[ProcSample], damage: list[str]
    ) -> RankEvidence:
        header, crumbs, ring_damage = self._ring(rank)
        tail = self._events.setdefault(rank, JsonlTail(self.run_dir.events(rank)))
        damage += [*ring_damage, *tail.update()]
        began = float(header.get("start_monotonic_ns") or 0) / 1e9
        name = f"rank-{rank:05d}"
        stacks = [d for p in self._files(self.run_dir.stacks_dir, f"{name}.*json") if (d := self._cached(p, read_stacks))]
        flights = self._files(self.run_dir.flight_dir, f"{name}.*json")
        return RankEvidence(
            rank=rank,
            header=header,
            crumbs=crumbs,
            # A restarted rank appends to the file of its first life.
            events=tuple(e for e in tail.records if float(e.get("t") or began) >= began - 60.0),
            stacks=tuple(sorted((s for s in stacks if s.rank == rank), key=lambda s: (s.round, s.t))),
            samples=tuple(samples),
            flight=self._cached(flights[-1], read_flight) if flights else (),
            fault_frames=read_fault_text(_tail(self.run_dir.stacks_dir / f"{name}.fault.txt")),
            exit=exit,
            started_t=started,
            log_tail=_tail(self.run_dir.logs / f"{name}.log") if exit is not None and not exit.ok else "",
        )

    def _ring(self, rank: int) -> tuple[dict[str, Any], tuple[Crumb, ...], list[str]]:
        path = self.run_dir.ring(rank)
        if not path.exists():
            return {}, (), []
        reading = read_ring(path)
        return reading.header, tuple(reading.crumbs), reading.damage

    def _files(self, folder: Path, pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern), key=lambda p: (_round_of(p), p.name))

    def _cached(self, path: Path, read: Any) -> Any:
        """Dumps are written once: parse each only when its file changed."""
        try:
            changed = path.stat().st_mtime
        except OSError:
            return read(path)
        held = self._dumps.get(path)
        if held is None or held[0] != changed:
            held = self._dumps[path] = (changed, read(path))
        return held[1]


def load(run_dir: RunDir, *, live: bool = False, now: float | None = None) -> Evidence:
    """Everything in the run directory, read once."""
    return Reader(run_dir).read(live=live, now=now)


def _round_of(path: Path) -> int:
    match = _ROUND.search(path.name)
    return int(match[1]) if match else 0


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _exits_and_starts(supervisor: list[dict[str, Any]]) -> tuple[dict[int, RankExit], dict[int, float]]:
    exits: dict[int, RankExit] = {}
    starts: dict[int, float] = {}
    for record in supervisor:
        rank = record.get("rank")
        if not isinstance(rank, int):
            continue
        t = float(record.get("t") or 0.0)
        if record.get("event") == "rank_started":
            starts[rank] = t
            exits.pop(rank, None)
        elif record.get("event") == "rank_exited":
            code, signal = record.get("code"), record.get("signal")
            if isinstance(code, int) and code < 0:  # subprocess's spelling of a signal death
                code, signal = None, -code
            exits[rank] = RankExit(t=t, pid=int(record.get("pid") or 0), code=code, signal=signal)
    return exits, starts


def _world_size(supervisor: list[dict[str, Any]], ranks: Mapping[int, RankEvidence]) -> int:
    said = [int(r["nproc"]) for r in supervisor if r.get("event") == "job_started" and isinstance(r.get("nproc"), int)]
    headers = [int(r.header["world_size"]) for r in ranks.values() if isinstance(r.header.get("world_size"), int)]
    return max([*said, *headers, *(n + 1 for n in ranks)], default=0)


def _last_time(supervisor: list[dict[str, Any]], ranks: Mapping[int, RankEvidence]) -> float:
    times = [float(r.get("t") or 0.0) for r in supervisor]
    times += [r.last_progress_t for r in ranks.values() if r.last_progress_t is not None]
    times += [float(e.get("t") or 0.0) for r in ranks.values() for e in r.events]
    return max(times, default=0.0)


def _cores(environment: Any) -> int | None:
    if isinstance(environment, dict):
        for key in ("cpu_count", "cores", "cpus"):
            if isinstance(environment.get(key), int):
                return int(environment[key])
    return None


__all__ = ["Reader", "load", "read_fault_text", "read_header", "read_stacks"]
