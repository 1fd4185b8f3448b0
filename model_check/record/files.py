"""Appending and reading JSON files so that a kill at any moment loses at most the last line."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

# Nothing that we write comes near it; a file that is larger was not written by us.
_MAX_JSON_BYTES = 256 << 20
_TAIL_BYTES = 16 << 10


def _finite(value: Any) -> Any:
    """JSON has no NaN: a non-finite number is written as its name, so that every reader can parse the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _dumps(record: Any, **kwargs: Any) -> bytes:
    """One line or page of JSON. Half a surrogate, which a file name or a message may hold, has no place in UTF-8."""
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, **kwargs) + "\n"
    return text.encode("utf-8", "replace")


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, and refuses with OSError what is not a regular file: a pipe would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


class JsonlWriter:
    """Appends an object a line with one write(2): readers see whole lines, SIGKILL tears at most the last."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._torn = False  # the disk was full in the middle of a record

    def write(self, record: dict[str, Any]) -> None:
        line = _dumps(record)
        if self._torn:
            line = b"\n" + line  # the half line before it is lost; this one is not
        self._torn = os.write(self._fd, line) < len(line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class JsonlReading:
    """The whole records of a file."""

    records: list[dict[str, Any]] = field(default_factory=list)


def read_jsonl(path: Path) -> JsonlReading:
    """Skips what is no JSON object, such as a line torn by a kill. A file that cannot be read is an empty one."""
    reading = JsonlReading()
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")
    except OSError:
        return reading
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            reading.records.append(record)
    return reading


def write_json_atomic(path: Path, value: Any) -> None:
    """Readers see the old file or the new one, never a part of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hosts in containers often have the same PIDs.
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        scratch.write_bytes(_dumps(value, indent=2))
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any | None:
    """The file's value, or None where it is missing, no regular file, or not JSON."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_JSON_BYTES + 1)
        return json.loads(data.decode("utf-8")) if len(data) <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def read_tail(path: Path) -> str:
    """The end of a log, where a process says why it ends; empty if there is no log."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
