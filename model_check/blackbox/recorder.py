"""The black box's writer: one mmap ring per rank, one `pack_into` per record.

A record is written *before* the thing it names begins, so that a process killed inside it still says where it was.
The format is record.ring's. `put` and `put_collective` are the hot paths: integers only; `begin`, `end` and `point`
are the same with names, for callers that are not in a hurry.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_check.record import process_identity as who
from model_check.record import ring

PHASE = {name: code for code, name in enumerate(ring.PHASES)}
OP = {name: code for code, name in enumerate(ring.OPS)}
DTYPE = {name: code for code, name in enumerate(ring.DTYPES)}
_MAX_STRING_BYTES = 1024
_MAX_STRINGS = 0xFFFF  # a group's id is a u16

Put = Callable[..., int]


class _ThisThread(threading.local):
    """gettid(2) once a thread, not once a record."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()


class Recorder:
    """Appends breadcrumbs to a ring file. Safe from any thread: a slot is claimed by one atomic count."""

    put: Put
    put_collective: Put

    def __init__(self, path: Path, *, rank: int, capacity: int = ring.CAPACITY, **identity: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.pid = os.getpid()
        self.rank = rank
        self.steps = 0  # optimizer steps completed
        self._records_at = ring.HEADER_BYTES + ring.STRINGS_BYTES
        size = self._records_at + capacity * ring.RECORD.size
        # A fresh inode: a reader of the previous attempt's ring keeps what it has open.
        scratch = path.with_name(f".{path.name}.{self.pid}")
        fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Blocks reserved now: on a full disk a write to a hole would be a SIGBUS in the middle of training.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
            self._inode = os.fstat(fd).st_ino
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._header = {
            "magic": ring.MAGIC,
            "version": ring.VERSION,
            "rank": rank,
            **who.identity(),
            "start_monotonic_ns": time.monotonic_ns(),
            "start_time": time.time(),
            "capacity": capacity,
            "record_bytes": ring.RECORD.size,
            "strings_bytes": ring.STRINGS_BYTES,
            **identity,
        }
        self._write_header()
        scratch.replace(path)
        self.ids: dict[str, int] = {"": 0}
        self._strings_end = ring.HEADER_BYTES
        self._intern_lock = threading.Lock()
        self.put, self.put_collective = self._make_puts(capacity)

    def _make_puts(self, capacity: int) -> tuple[Put, Put]:
        """The hot paths as closures: every name they need is a cell, not an attribute."""
        buffer, start, size = self._map, self._records_at, ring.RECORD.size
        next_seq, clock = itertools.count(1).__next__, time.monotonic_ns
        pack_phase, pack_collective = ring.PHASE_RECORD.pack_into, ring.COLLECTIVE_RECORD.pack_into
        progress = self

        this_thread = _ThisThread()

        def put(
            kind: int, file: int = 0, line: int = 0, function: int = 0, detail: int = 0, span: int = 0, peer: int = -1
        ) -> int:
            seq = next_seq()
            at = start + (seq - 1) % capacity * size
            now, step, thread = clock(), progress.steps, this_thread.native_id
            pack_phase(buffer, at, seq, now, kind, step, file, line, function, detail, span, thread, peer, seq)
            return seq

        def put_collective(
            kind: int,
            file: int,
            line: int,
            function: int,
            detail: int,
            peer: int,
            collective_seq: int,
            group: int,
            flags: int,
            nbytes: int,
            ndim: int,
            d0: int,
            d1: int,
            d2: int,
            d3: int,
        ) -> int:
            seq = next_seq()
            pack_collective(
                buffer,
                start + (seq - 1) % capacity * size,
                seq,
                clock(),
                kind,
                progress.steps,
                file,
                line,
                function,
                detail,
                0,
                this_thread.native_id,
                peer,
                collective_seq,
                group,
                flags,
                nbytes,
                ndim,
                d0,
                d1,
                d2,
                d3,
                seq,
            )
            return seq

        return put, put_collective

    def begin(
        self,
        phase: str,
        *,
        op: str = "none",
        group: str = "",
        collective_seq: int = 0,
        shape: tuple[int, ...] = (),
        dtype: str = "none",
        nbytes: int = 0,
        flags: int = 0,
        file: str = "",
        line: int = 0,
        function: str = "",
        detail: str = "",
        peer: int = -1,
    ) -> int:
        """Writes a BEGIN by names and returns its sequence number, which is the span to end."""
        dims = (*shape[: ring.MAX_DIMS], 0, 0, 0, 0)
        return self.put_collective(
            ring.kind(ring.BEGIN, PHASE[phase], OP.get(op, OP["other"]), DTYPE.get(dtype, DTYPE["other"])),
            self.intern(file),
            line,
            self.intern(function),
            self.intern(detail),
            peer,
            collective_seq,
            self.intern(group),
            flags,
            nbytes,
            min(len(shape), 255),
            dims[0],
            dims[1],
            dims[2],
            dims[3],
        )

    def end(self, span: int, phase: str, *, op: str = "none", detail: str = "") -> int:
        kind = ring.kind(ring.END, PHASE[phase], OP.get(op, OP["other"]))
        return self.put(kind, 0, 0, 0, self.intern(detail), span)

    def point(self, phase: str, *, detail: str = "", file: str = "", line: int = 0, function: str = "") -> int:
        kind = ring.kind(ring.POINT, PHASE[phase])
        return self.put(kind, self.intern(file), line, self.intern(function), self.intern(detail))

    def intern(self, text: str) -> int:
        """The id of a string; 0 (the empty string) once the table is full."""
        found = self.ids.get(text)
        if found is not None:
            return found
        with self._intern_lock:
            found = self.ids.get(text)
            if found is not None:
                return found
            data = text.encode("utf-8", "replace")[:_MAX_STRING_BYTES]
            end = self._strings_end + 2 + len(data)
            if end > self._records_at or len(self.ids) >= _MAX_STRINGS:
                return 0
            # The length is written last: a reader stops at a zero length, so it never sees half a string.
            self._map[self._strings_end + 2 : end] = data
            struct.pack_into("<H", self._map, self._strings_end, len(data))
            self._strings_end = end
            self.ids[text] = len(self.ids)
            return self.ids[text]

    def _write_header(self) -> None:
        text = json.dumps(self._header).encode()
        if len(text) > ring.HEADER_BYTES:
            # The command line is the only part without a bound of its own.
            self._header["argv"] = [*self._header.get("argv", [])[:1], "…"]
            text = json.dumps(self._header).encode()
        assert len(text) <= ring.HEADER_BYTES, f"the ring's header is {len(text)} bytes, more than {ring.HEADER_BYTES}"
        self._map[0 : ring.HEADER_BYTES] = text.ljust(ring.HEADER_BYTES, b"\0")

    def identify(self, **identity: Any) -> None:
        """Adds to the header what became known later, e.g. the world size."""
        self._header.update(identity)
        self._write_header()

    @property
    def header(self) -> dict[str, Any]:
        return dict(self._header)

    def is_current(self) -> bool:
        """Whether the file at the path is still this ring: a later process of the same rank replaces it."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        self._map.close()
