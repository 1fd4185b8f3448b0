"""Events about memory, and about our own recording."""

from __future__ import annotations

import re
import traceback as tracebacks
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_check.record.events.base import Event

_LONGEST_TRACE = 4000  # characters
_SIZE = r"([\d.]+) ([KMGT]i?B|bytes)"
_REQUESTED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch, and {_SIZE} is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class RecordingFailed(Event, kind="recording_failed"):
    """Something of ours failed; the script went on without that record."""

    error: str = ""
    traceback: str = ""
    what: str | None = None  # the record that is missing, where only one is

    @classmethod
    def by(cls, error: BaseException, what: str | None = None) -> RecordingFailed:
        trace = "".join(tracebacks.format_exception(type(error), error, error.__traceback__))
        return cls(error=f"{type(error).__name__}: {error}", traceback=trace[-_LONGEST_TRACE:], what=what)


@dataclass(frozen=True, kw_only=True)
class MemoryMark(Event, kind="memory"):
    """How much memory the rank holds at one moment, in bytes."""

    at: str = ""  # where in the run: "start", "joined", "step"…
    step: int = 0
    mark: str | None = None  # the turning point of the start, as the log line names it
    rss: int = 0
    pss: int | None = None  # pages that several ranks hold together, shared out; None: the kernel does not say
    allocated: int | None = None  # on the device, as torch counts; None for a process that uses none
    reserved: int | None = None
    peak: int | None = None


@dataclass(frozen=True, kw_only=True)
class Growth(Event, kind="growth"):
    """The container that grew most between two counts of a rank whose memory grows."""

    container: str = ""  # its type
    name: str = ""  # of the variable or attribute that holds it; empty: unknown
    file: str = ""  # where that name is
    line: int = 0  # the only line of the file that fills it; 0: unknown
    before: int = 0  # items
    now: int = 0  # items
    seconds: float = 0.0  # between the counts
    item: str = ""  # its newest item, described
    bytes: int = 0  # about how much the new items hold


@dataclass(frozen=True)
class HostLimits:
    """Bytes of host memory; None: no such limit."""

    total: int | None = None
    available: int | None = None
    address_space: int | None = None
    cgroup: int | None = None


@dataclass(frozen=True)
class Holding:
    """Tensors of one kind."""

    bytes: int = 0  # all together
    count: int = 1
    category: str = ""  # what they are for
    name: str = ""  # of the parameter; empty: unknown, or several
    line: str = ""  # that made them; empty: unknown


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event, kind="out_of_memory"):
    """The moment a rank's memory ran out: who held what, in bytes. None: not known.

    The file also has `kind`: whether the memory of the `host` or of the `device` ran out.
    """

    rank: int = 0
    step: int = 0
    device: str = ""  # "cpu": the host's memory ran out
    requested: int | None = None
    at: str = ""  # the line that asked for it
    categories: Mapping[str, int] = field(default_factory=dict)  # held for what
    largest: tuple[Holding, ...] = ()
    # What torch's allocator knows of the device.
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    free_in_pieces: int = 0  # inside the allocator, between blocks in use
    largest_piece: int | None = None
    snapshot: str | None = None  # a file for PyTorch's memory viewer
    # What the kernel knows of the host.
    rss: int | None = None
    pss: int | None = None
    limits: HostLimits | None = None

    def body(self) -> dict[str, Any]:
        return {"kind": "host" if self.device == "cpu" else "device", **super().body()}

    @classmethod
    def told_by(cls, message: str) -> OutOfMemory:
        """What the text of torch's own error says."""
        requested, capacity, held = (pattern.search(message) for pattern in (_REQUESTED, _CAPACITY, _ALLOCATED))
        return cls(
            requested=_bytes(requested[1], requested[2]) if requested else None,
            total=_bytes(capacity[1], capacity[2]) if capacity else None,
            free=_bytes(capacity[3], capacity[4]) if capacity else None,
            allocated=_bytes(held[1], held[2]) if held else None,
            free_in_pieces=_bytes(held[3], held[4]) if held else 0,
        )


def _bytes(number: str, unit: str) -> int:
    return round(float(number.rstrip(".") or 0) * _UNITS.get(unit, 1))


@dataclass(frozen=True, kw_only=True)
class MicroBatchHalved(Event, kind="oom_retry"):
    """Our trainer did a step again with smaller micro-batches, since it had run out of memory."""

    micro_batch: int = 0  # samples, from now on
    micro_batches: int = 0  # of one step
    was: int = 0  # samples before
    message: str = ""  # of the error


@dataclass(frozen=True, kw_only=True)
class MemoryKill(Event, kind="oom"):
    """The launcher knows of a process that was killed for its memory. `pid` 0: it does not know which."""

    source: str = ""  # "cgroup" or "limit": one was reached; "kernel": the machine ran out
    detail: str = ""
