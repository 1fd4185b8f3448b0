"""Reads a run directory into `Evidence`, whole or piece by piece as it grows.

The order matters: the launcher's events are read before the rings, so that the ring of a rank which is known to have
exited is final, and whatever is missing from it was never done.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.issues import FollowedRing
from model_check.record import RunDir, read_json
from model_check.record.cgroups import usable_cores
from model_check.record.environment import Environment
from model_check.record.events import Event, UnknownEvent, read_event
from model_check.record.events.crashes import Exit
from model_check.record.events.job import RankExit, RankStarted
from model_check.record.events.process import JobStarted, Samples
from model_check.record.files import open_regular, read_tail
from model_check.record.flight import read_flight
from model_check.record.metrics import read_metrics
from model_check.record.process_sample import RankSample
from model_check.record.ring import RingHeader
from model_check.record.run_plan import RunPlan
from model_check.record.stacks import FRAME_LINE, Frame, read_stacks
from model_check.record.typed import from_json

T = TypeVar("T")
_RANK_FILE = re.compile(r"rank-(\d+)")
_ROUND = re.compile(r"\.(\d+)\.")
_LONGEST_LINE_BYTES = 16 << 20  # a record of ours is a few kilobytes
_MOST_RANKS = 1 << 17  # a number beyond this is damage, not a job
_KEPT_SAMPLES = 600
_KEPT_FIRST, _KEPT_NEWEST = 100, 600  # records of each kind, however long the run
_KEPT_OF = {"sample": (0, 16), "gradients": (50, 50)}  # the reader consumes samples at once
_TOLD_TO_END = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
_TIME_TO_END_S = 4.0  # from a rank's last word to the end of its process, on a busy machine
_EARLIER_LIFE_S = 60.0  # a rank writes events before its ring is open, but not for long


class JsonlTail:
    """The records of a growing file. Reads only what is new; an incomplete last line waits for its end.

    It keeps the first and the newest records of each kind, so a week costs no more than an hour. `fresh` holds the
    events of the last update.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self.fresh: list[Event] = []
        self._held: Counter[str] = Counter()
        self._offset = 0
        self._damaged_lines = 0
        self._inside_long_line = False

    def update(self) -> list[str]:
        """Reads on; returns a sentence for what cannot be read."""
        self.fresh = []
        try:
            with open_regular(self.path) as file:
                torn = self._read_on(file)
        except FileNotFoundError:
            return []
        except OSError as error:
            return [f"{self.path.name}: cannot be read ({error.strerror})"]
        damage = [f"{self.path.name}: {self._damaged_lines} lines are not JSON"] if self._damaged_lines else []
        return [*damage, f"{self.path.name}: the last record is torn (its writer was killed)"] if torn else damage

    def _read_on(self, file: BinaryIO) -> bool:
        """Takes in the whole lines; True where something stands behind the last of them."""
        file.seek(self._offset)
        while True:
            line = file.readline(_LONGEST_LINE_BYTES)
            whole = line.endswith(b"\n")
            if not whole and len(line) < _LONGEST_LINE_BYTES:
                return bool(line.strip())
            self._offset += len(line)
            if whole and not self._inside_long_line:
                self._take(line)
            elif whole:
                self._damaged_lines += 1
            self._inside_long_line = not whole

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            self._damaged_lines += 1
            return
        if isinstance(record, dict):
            event = read_event(record)
            self.fresh.append(event)
            self.events.append(event)
            kind = _kind_of(event)
            self._held[kind] += 1
            if self._held[kind] > 2 * sum(_KEPT_OF.get(kind, (_KEPT_FIRST, _KEPT_NEWEST))):
                self._forget(kind)

    def _forget(self, kind: str) -> None:
        """Drops the middle records of one kind; as many again may arrive before the next time."""
        first, newest = _KEPT_OF.get(kind, (_KEPT_FIRST, _KEPT_NEWEST))
        of_kind = [n for n, event in enumerate(self.events) if _kind_of(event) == kind]
        dropped = set(of_kind[first:-newest])
        self.events = [event for n, event in enumerate(self.events) if n not in dropped]
        self._held[kind] = first + newest


def _kind_of(event: Event) -> str:
    return event.name if isinstance(event, UnknownEvent) else event.kind


@dataclass(frozen=True)
class Place:
    """Where a rank ran. Looked at from outside, its script has an absolute path; we say it as its user did."""

    cwd: str = ""
    script: str = ""

    @classmethod
    def of(cls, header: RingHeader) -> Place:
        return cls(header.cwd, header.script)

    def frame(self, frame: Frame) -> Frame:
        is_script = self.script != "" and frame.file == os.path.normpath(Path(self.cwd, self.script))
        return replace(frame, file=self.script if is_script else frame.file, root=self.cwd)


def is_rank(value: Any) -> TypeGuard[int]:
    """A number that a rank, or a number of ranks, can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_RANKS


def _read_as(kind: type[T], path: Path) -> T:
    """A JSON file as a dataclass; all defaults if there is no such file."""
    return from_json(kind, read_json(path))


def read_fault_text(text: str) -> tuple[Frame, ...]:
    """The frames of the crashed thread in faulthandler's text, innermost first."""
    marker = text.rfind("Fatal Python error")
    body = text[marker:] if marker >= 0 else ""
    current = body.find("Current thread")
    if current >= 0:
        body = body[current:]
        end = body.find("\n\n")
        body = body[:end] if end >= 0 else body
    return tuple(Frame(m["file"], int(m["line"]), m["function"].strip()) for m in FRAME_LINE.finditer(body))


def _take_samples(journal: Iterable[Event], found: dict[int, deque[RankSample]]) -> None:
    """Adds the samples in these events to each rank's newest samples."""
    for event in journal:
        for rank, sample in event.ranks.items() if isinstance(event, Samples) else ():
            if is_rank(rank):
                samples = found.setdefault(rank, deque(maxlen=_KEPT_SAMPLES))
                samples.append(replace(sample, t=sample.t or event.t))


class Reader:
    """Holds what was read of one run directory and reads on at each `read`: the supervisor's cheap, repeated look."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._supervisor = JsonlTail(run_dir.supervisor_events)
        self._samples: dict[int, deque[RankSample]] = {}
        self._events: dict[int, JsonlTail] = {}
        self._rings: dict[int, FollowedRing] = {}
        self._dumps: dict[Path, tuple[float, Any]] = {}
        self._in_use: set[Path] = set()  # the dumps that the current reading uses

    def read(self, *, live: bool, now: float | None = None) -> Evidence:
        damage = self._supervisor.update()
        exits, starts = _exits_and_starts(self._supervisor.events)
        _take_samples(self._supervisor.fresh, self._samples)
        samples = self._samples
        numbers = self._rank_numbers() | set(exits) | set(starts) | set(samples)
        live_now = time.monotonic() if now is None else now
        believed_before = live_now - _TIME_TO_END_S if live else math.inf
        ranks = {
            n: self._read_rank(n, exits.get(n), starts.get(n), samples.get(n, ()), damage, believed_before)
            for n in sorted(numbers)
        }
        machine = self._cached(self.run_dir.environment, partial(_read_as, Environment))
        evidence = Evidence(
            world_size=_world_size(self._supervisor.events, ranks),
            ranks=ranks,
            journal=tuple(self._supervisor.events),
            now=now if now is not None else time.monotonic() if live else _last_time(self._supervisor.events, ranks),
            live=live,
            cores=machine.cores or machine.cpu_count or (usable_cores() if live else None),
            host_memory=machine.memory_available_bytes,
            damage=tuple(damage),
            metrics=self._cached(self.run_dir.metrics, read_metrics),
            vocabulary=self._cached(self.run_dir.config, lambda path: _vocabulary(read_json(path))),
            ours=self.run_dir.config.exists(),
            plan=self._cached(self.run_dir.plan, partial(_read_as, RunPlan)),
        )
        self._dumps = {path: held for path, held in self._dumps.items() if path in self._in_use}
        self._in_use.clear()
        return evidence

    def _rank_numbers(self) -> set[int]:
        found = set()
        for folder, pattern in ((self.run_dir.blackbox_dir, "rank-*.ring"), (self.run_dir.events_dir, "rank-*.jsonl")):
            for path in folder.glob(pattern):
                match = _RANK_FILE.search(path.name)
                if match is not None and len(match[1]) < 10 and is_rank(int(match[1])):
                    found.add(int(match[1]))
        return found

    def _read_rank(
        self,
        rank: int,
        exit: RankExit | None,
        started: float | None,
        samples: Iterable[RankSample],
        damage: list[str],
        believed_before: float,
    ) -> RankEvidence:
        if rank not in self._rings:
            self._rings[rank] = FollowedRing(self.run_dir.ring(rank), rank)
        header = self._rings[rank].read()
        log = self._rings[rank].log
        if not header and self.run_dir.ring(rank).exists():
            damage.append(f"{self.run_dir.ring(rank).name}: not a black box, or its header was never finished")
        tail = self._events.setdefault(rank, JsonlTail(self.run_dir.events(rank)))
        damage += tail.update()
        began = header.start_monotonic_ns / 1e9
        name = f"rank-{rank:05d}"
        place = Place.of(header)
        told = tuple(e for e in tail.events if not _of_earlier_life(e, header.pid, began))
        if exit is not None and exit.t < began and exit.pid != header.pid:
            exit = None  # of an earlier life: a rank that no launcher of ours started says of none that it began
        announced = _announced_exit(told, rank, header.pid, believed_before if exit is None else math.inf)
        exit = _first_end(announced, exit)
        files = self._files(self.run_dir.stacks_dir, f"{name}.*json")
        read = partial(read_stacks, show=place.frame)
        dumps = [dump for path in files if (dump := self._cached(path, read)) is not None and dump.rank == rank]
        flights = self._files(self.run_dir.flight_dir, f"{name}.*json")
        return RankEvidence(
            rank=rank,
            header=header,
            crumbs=log.crumbs(),
            issues=log.issues,
            returned=log.returned,
            messages=log.messages,
            complete=log.complete,
            first_step_t=log.first_step_t,
            told=told,
            stacks=tuple(sorted(dumps, key=lambda dump: dump.t)),
            samples=tuple(samples),
            flight=self._cached(flights[-1], read_flight) if flights else (),
            fault_frames=tuple(
                place.frame(f) for f in read_fault_text(read_tail(self.run_dir.stacks_dir / f"{name}.fault.txt"))
            ),
            exit=exit,
            started_t=started,
            log_tail=read_tail(self.run_dir.logs / f"{name}.log") if exit is not None and not exit.ok else "",
        )

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
        self._in_use.add(path)
        return held[1]


def load(run_dir: RunDir, *, live: bool = False, now: float | None = None) -> Evidence:
    """Everything in the run directory, read once."""
    return Reader(run_dir).read(live=live, now=now)


def _round_of(path: Path) -> int:
    match = _ROUND.search(path.name)
    return int(match[1]) if match else 0


def _exits_and_starts(journal: Iterable[Event]) -> tuple[dict[int, RankExit], dict[int, float]]:
    exits: dict[int, RankExit] = {}
    starts: dict[int, float] = {}
    for event in journal:
        if isinstance(event, RankStarted) and is_rank(event.rank):
            starts[event.rank] = event.t
            exits.pop(event.rank, None)
        elif isinstance(event, RankExit) and is_rank(event.rank):
            exits[event.rank] = event
    return exits, starts


def _first_end(announced: RankExit | None, exit: RankExit | None) -> RankExit | None:
    """A rank that was already leaving when it was told to end had left; one that crashed on its way out had not."""
    if announced is None or exit is None:
        return exit or announced
    return announced if exit.signal in _TOLD_TO_END and announced.t <= exit.t else exit


def _of_earlier_life(event: Event, pid: int, began: float) -> bool:
    """A restarted rank appends to the file of its first life, whose failure its launcher has already forgiven."""
    t = event.t or began
    return t < began - _EARLIER_LIFE_S or (t < began and pid > 0 and (event.pid or pid) != pid)


def _announced_exit(told: Iterable[Event], rank: int, pid: int, believed_before: float) -> RankExit | None:
    """A rank that announces exit code 0 takes part in nothing more, though its process may need seconds to end.

    A rank that did not call exit does not know its code: to it, `raise SystemExit(3)` looks like a return. Its process
    gets time to end with the true code.
    """
    for event in told:
        if isinstance(event, Exit) and event.code == 0 and event.pid == pid:
            guessed = event.via == "return" and event.t > believed_before
            return None if guessed else RankExit(t=event.t, rank=rank, pid=pid, code=0)
    return None


def _vocabulary(config: Any) -> int | None:
    """The number of tokens that the model of config.json chooses from; None where it is not a run of our own."""
    value = config.get("model", {}).get("vocab_size") if isinstance(config, dict) else None
    value = value.get("value") if isinstance(value, dict) else value
    return value if isinstance(value, int) and value > 1 else None


def _world_size(journal: Iterable[Event], ranks: Mapping[int, RankEvidence]) -> int:
    said = [event.nproc for event in journal if isinstance(event, JobStarted) and is_rank(event.nproc)]
    headers = [r.header.world_size for r in ranks.values() if is_rank(r.header.world_size)]
    return max([*said, *headers, *(n + 1 for n in ranks)], default=0)


def _last_time(journal: Iterable[Event], ranks: Mapping[int, RankEvidence]) -> float:
    times = [event.t for event in journal]
    times += [r.last_progress_t for r in ranks.values() if r.last_progress_t is not None]
    times += [event.t for r in ranks.values() for event in r.told]
    return max(times, default=0.0)
