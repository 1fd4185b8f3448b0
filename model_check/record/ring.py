"""The black box on disk: a ring of fixed-size breadcrumbs in a memory-mapped file, readable after SIGKILL.

    offset 0       header: JSON, padded with NUL to HEADER_BYTES (who wrote this, and the sizes below)
    HEADER_BYTES   string table: u16 length + UTF-8, appended once per distinct string; its index is the string's id
    + strings      `capacity` records of RECORD.size bytes; record number s lives in slot s % capacity

A record starts and ends with its own sequence number: a record whose two numbers differ was being written when its
process died, and is left out. Times are CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from model_check.record.files import open_regular
from model_check.record.process_identity import Identity
from model_check.record.typed import from_json

MAGIC = "MCRING"
VERSION = 1
HEADER_BYTES = 4096
STRINGS_BYTES = 256 * 1024
CAPACITY = 8192
MAX_DIMS = 4

# sequence, time_ns, event, phase, op, dtype, step, file, line, function, detail, span, thread, peer,
# collective_seq, group, flags, bytes, ndim, dims[4], sequence again
RECORD = struct.Struct("<QQBBBBiIIIIQIiIHHQB3x4I4xQ")
# The same record as writers pack it: event, phase, op and dtype as one number (see `kind`); a phase leaves the fields
# of a collective zero. Each field costs a writer 25 ns, so it packs no more than it has.
PHASE_RECORD = struct.Struct("<QQIiIIIIQIi40xQ")
COLLECTIVE_RECORD = struct.Struct("<QQIiIIIIQIiIHHQB3x4I4xQ")

BEGIN, END, POINT = 1, 2, 3
EVENTS = {BEGIN: "begin", END: "end", POINT: "point"}
_NO_RECORD = RECORD.unpack(bytes(RECORD.size))

# Codes are part of the file format: append, never renumber.
PHASES = (
    "none",
    "start",  # interpreter up, before the process group
    "import",
    "init",  # init_process_group, new_group: waiting for peers to join
    "data",  # the loader's next()
    "forward",
    "backward",
    "optimizer",
    "collective",
    "p2p",
    "barrier",
    "save",
    "load",
    "hub",
    "tracker",
    "eval",
    "step",  # a POINT at the end of each optimizer step
    "compile",
    "store",
    "exit",
    "model",
    "gate",
    "input",  # waiting for standard input
)
WAIT_PHASES = frozenset({"collective", "p2p", "barrier", "init", "store", "gate"})  # in which a rank waits for others
DOING = {  # what a rank does in a phase, in words
    "start": "starting",
    "import": "importing",
    "init": "joining the process group",
    "data": "loading data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "save": "saving a checkpoint",
    "load": "loading a checkpoint",
    "hub": "downloading from the hub",
    "tracker": "starting the experiment tracker",
    "eval": "evaluating",
    "compile": "compiling",
    "model": "building the model",
    "gate": "waiting its turn to import or compile",
    "input": "waiting for standard input",
    "exit": "exiting",
}
OPS = (
    "none",
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    "monitored_barrier",
    "broadcast_object",
    "all_gather_object",
    "gather_object",
    "scatter_object",
    "reduce_object",
    "batch_p2p",
    "new_group",
    "other",
)
DTYPES = (
    "none",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "other",
)


def kind(event: int, phase: int, op: int = 0, dtype: int = 0) -> int:
    """What a record is, in one number."""
    return event | phase << 8 | op << 16 | dtype << 24


MEMBERS_ONLY = (
    "members only"  # in the detail of a new_group that its members make alone; other ranks know nothing of it
)
UNIT = "for "  # prefix of a gather's detail, before the module whose parameters it gathers
TAG = "tag "  # prefix of a message's detail, before a tag other than 0
REDUCES_BY = "by "  # begins the detail of a collective that reduces by something other than a sum
RAISED = "raised "  # begins the detail of an END, before the type of the exception that ended the call
WAIT = "wait"  # the detail of waiting for a call that was started asynchronously before
_MEMBERS = re.compile(r"ranks (\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)")
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
FLAG_ASYNC = 1
FLAG_NATIVE = 2  # started by C++ (DDP's reducer, FSDP), seen through the process group rather than a Python call


@dataclass(frozen=True)
class RingHeader(Identity):
    """Who writes a ring, and its layout. False where there is no ring, or its header was never finished."""

    magic: str = ""
    version: int = 0
    rank: int = -1
    start_monotonic_ns: int = 0  # when the recording began
    start_time: float = 0.0  # the same as wall-clock seconds
    capacity: int = 0  # slots for records
    record_bytes: int = 0
    strings_bytes: int = -1  # of the string table
    world_size: int | None = None
    local_rank: int | None = None
    attempt: int = 0
    store: str = ""  # the port or file at which the ranks of the group met
    final: bool = False  # all processes of the job are numbered, not only its hosts
    role: str = ""
    ppid: int = 0
    python: str = ""
    script: str = ""  # as it was given to the interpreter
    cwd: str = ""
    argv: tuple[str, ...] = ()  # without secrets
    torch: str | None = None
    backend: str | None = None  # None: it has not joined its peers
    service: str | None = None  # the socket at which the process answers
    stack_signal: int | None = None  # makes the process write its stacks
    unwritten: Mapping[str, str] = field(default_factory=dict)  # files that it could not write, and why
    gave_up: str = ""  # the type of the exception that ended the recording

    def __bool__(self) -> bool:
        return bool(self.magic)


class Crumb(NamedTuple):
    """One record of the ring, with its strings resolved. A tuple, because a full ring holds thousands of them."""

    seq: int  # counts all records of this process, from 1
    time_ns: int  # CLOCK_MONOTONIC
    event: str  # begin, end or point
    phase: str
    op: str  # of a collective or a message
    dtype: str
    step: int  # optimizer steps completed so far
    collective_seq: int  # per group; for point-to-point per (group, operation, peer)
    group: str  # as the `group` event names it
    flags: int  # 1: asynchronous; 2: started by C++
    bytes: int
    shape: tuple[int, ...]  # at most four dimensions
    file: str  # the user's innermost line
    line: int
    function: str
    detail: str
    span: int  # for an END: the sequence number of its BEGIN
    thread: int  # native id; the main thread's is the process id
    peer: int  # the root of a collective, or the other side of a message, as a global rank; -1: none, or any

    @property
    def site(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""

    # What the detail says, by the kind of record.

    @property
    def raised(self) -> str:
        """The type of the exception that ended the call; empty if none did."""
        return self.detail.removeprefix(RAISED) if self.detail.startswith(RAISED) else ""

    @property
    def is_async(self) -> bool:
        return bool(self.flags & FLAG_ASYNC)

    @property
    def is_wait(self) -> bool:
        return self.detail == WAIT

    @property
    def unit(self) -> str:
        """The module whose parameters it gathers, if FSDP names it."""
        return self.detail.removeprefix(UNIT) if self.detail.startswith(UNIT) else ""

    @property
    def reduction(self) -> str:
        """What it reduces by; empty if it reduces nothing, or as the first call of a group names the members there."""
        if self.op not in _REDUCING or self.flags & FLAG_NATIVE or self.detail.endswith("?"):
            return ""
        if self.detail.startswith(REDUCES_BY):
            return self.detail.removeprefix(REDUCES_BY)
        return "" if self.detail else "sum"

    @property
    def members(self) -> tuple[int, ...]:
        """The members of its group, if the detail or the name of the group lists them."""
        listed = _MEMBERS.match(self.detail) or _MEMBERS.match(self.group)
        spans = [span.split("-") for span in listed[1].split(",")] if listed else []
        return tuple(rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1))

    @property
    def by_members_only(self) -> bool:
        """A new_group that its members make alone."""
        return MEMBERS_ONLY in self.detail


class Stamp(NamedTuple):
    """The part of a record that tells how far its rank has come."""

    seq: int
    time_ns: int
    phase: str
    step: int


@dataclass(frozen=True)
class RingReading:
    """A ring as found: its header, and the records still in it, oldest first."""

    header: RingHeader = field(default_factory=RingHeader)
    crumbs: list[Crumb] = field(default_factory=list)

    def open_spans(self) -> list[Crumb]:
        """BEGINs without an END, oldest first: what the process was in the middle of."""
        return open_spans(self.crumbs)


def open_spans(crumbs: Iterable[Crumb]) -> list[Crumb]:
    """BEGINs without an END, oldest first."""
    begun: dict[int, Crumb] = {}
    for crumb in crumbs:
        if crumb.event == "begin":
            begun[crumb.seq] = crumb
        elif crumb.event == "end":
            begun.pop(crumb.span, None)
    return list(begun.values())


def _all_codes(names: tuple[str, ...]) -> list[str]:
    """A name for every value of a byte: a ring of a newer version stays readable."""
    return [names[code] if code < len(names) else f"code-{code}" for code in range(256)]


_EVENT_NAMES = _all_codes(("none", *EVENTS.values()))
_PHASE_NAMES = _all_codes(PHASES)
_OP_NAMES = _all_codes(OPS)
_DTYPE_NAMES = _all_codes(DTYPES)


class _Strings:
    """The string table, read as far as it has been written; `text` reads on when it meets a newer id."""

    def __init__(self, data: bytes | mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self._at = HEADER_BYTES
        self._known = [""]

    def text(self, index: int) -> str:
        try:
            return self._known[index]
        except IndexError:
            self._read_on()
        return self._known[index] if index < len(self._known) else "?"

    def _read_on(self) -> None:
        while self._at + 2 <= self._end:
            length = int.from_bytes(self._data[self._at : self._at + 2], "little")
            stop = self._at + 2 + length
            if length == 0 or stop > self._end:
                return
            self._known.append(bytes(self._data[self._at + 2 : stop]).decode("utf-8", "replace"))
            self._at = stop


def _crumb(values: tuple[int, ...], text: Callable[[int], str]) -> Crumb:
    return Crumb(
        values[0],
        values[1],
        _EVENT_NAMES[values[2]],
        _PHASE_NAMES[values[3]],
        _OP_NAMES[values[4]],
        _DTYPE_NAMES[values[5]],
        values[6],
        values[14],
        text(values[15]),
        values[16],
        values[17],
        values[19 : 19 + min(values[18], MAX_DIMS)],
        text(values[7]),
        values[8],
        text(values[9]),
        text(values[10]),
        values[11],
        values[12],
        values[13],
    )


def _parse_header(raw: bytes) -> RingHeader:
    try:
        header = from_json(RingHeader, json.loads(raw.rstrip(b"\0")))
    except (ValueError, RecursionError):
        return RingHeader()
    return header if header.magic == MAGIC else RingHeader()


def read_header(path: Path) -> RingHeader:
    """The header alone: cheap enough to poll. False where the file is missing or not a ring."""
    try:
        with open_regular(path) as file:
            return _parse_header(file.read(HEADER_BYTES))
    except OSError:
        return RingHeader()


def _layout(header: RingHeader) -> tuple[int, int]:
    """Where the records start, and how many slots there are; (0, 0) for a header that makes no sense."""
    if header.capacity < 1 or header.strings_bytes < 0:
        return 0, 0
    return HEADER_BYTES + header.strings_bytes, header.capacity


def read_ring(path: Path) -> RingReading:
    """Everything that can still be read from a ring, whatever happened to its writer."""
    ring = RingTail(path)
    try:
        return RingReading(ring.header, ring.poll())
    finally:
        ring.close()


class RingTail:
    """Follows a ring while it is written: each `poll` returns the records that appeared since the last one.

    A rank that restarts replaces the file; the next call then starts over on the new one, and `generation` counts this.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.lost = 0  # records overwritten before they were read
        self._header = RingHeader()
        self._map: mmap.mmap | None = None
        self._inode = (-1, -1)
        self._newest = 0
        self._polled = 0

    @property
    def header(self) -> RingHeader:
        """Re-read each time: a writer adds what it learns later. False while there is no ring."""
        if not self._attach() or not self._map:
            return RingHeader()
        return _parse_header(self._map[:HEADER_BYTES]) or self._header

    def _attach(self) -> bool:
        """Maps the file that is at the path now; False where there is none that can be used."""
        try:
            found = self.path.stat()
        except OSError:
            return self._map is not None
        inode = (found.st_dev, found.st_ino)
        if inode == self._inode and self._map is not None:
            return True
        try:
            with open_regular(self.path) as file:
                fresh = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return False
        header = _parse_header(fresh[:HEADER_BYTES])
        start, capacity = _layout(header)
        if not capacity or len(fresh) < start + RECORD.size:
            fresh.close()
            return False
        self.close()
        self._map, self._inode, self._header = fresh, inode, header
        self._start, self._capacity, self._newest, self._polled = start, capacity, 0, 0
        self._strings = _Strings(fresh, start)
        self.generation += 1
        return True

    def _raw(self, seq: int) -> tuple[int, ...]:
        """The fields in the slot that `seq` maps to, whosever they are; zeros where the file was cut off before it."""
        assert self._map is not None, "asked for a record before a ring was mapped"
        at = self._start + (seq - 1) % self._capacity * RECORD.size
        return RECORD.unpack_from(self._map, at) if at + RECORD.size <= len(self._map) else _NO_RECORD

    def _whole(self, seq: int) -> tuple[int, ...] | None:
        """The record with this number, or None where it is not there, no longer there, or half written."""
        # The closing number is written last: once it is there, so are all the fields read after it.
        if self._raw(seq)[-1] != seq:
            return None
        values = self._raw(seq)
        return values if values[0] == seq == values[-1] else None

    def last_seq(self) -> int:
        """The newest record's number, 0 for an empty ring: gallops from the last answer, no scan."""
        if not self._attach():
            return 0
        # The slot of the last answer names a newer record if the writer has lapped us.
        newest = max(self._newest, self._raw(self._newest)[0] if self._newest else 0)
        step = 1
        while (stored := self._raw(newest + step)[0]) >= newest + step:
            newest = stored
            step *= 2
        while step > 1:
            step //= 2
            if (stored := self._raw(newest + step)[0]) >= newest + step:
                newest = stored
        self._newest = newest
        return newest

    def stamp(self, seq: int) -> Stamp:
        """What a record tells of its rank's progress; of a number that is gone, what now stands in its place."""
        values = self._raw(seq)
        return Stamp(values[0], values[1], _PHASE_NAMES[values[3]], values[6])

    @property
    def oldest_seq(self) -> int:
        """The oldest record that the last look left in the ring."""
        return max(1, self._newest - self._capacity + 1)

    def poll(self) -> list[Crumb]:
        """The records written since the last call, oldest first."""
        newest = self.last_seq()
        if newest <= self._polled:
            return []
        first = max(self._polled + 1, self.oldest_seq)
        self.lost += first - self._polled - 1
        crumbs = []
        for seq in range(first, newest + 1):
            values = self._whole(seq)
            if values is not None:
                crumbs.append(_crumb(values, self._strings.text))
            elif seq == newest:
                # Its writer is in the middle of it: ask again next time.
                newest -= 1
        self._polled = newest
        return crumbs

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
