"""What our own trainer wrote about its steps: the beginning and the end of metrics.jsonl, however long it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD_BYTES = 16 << 10
_TAIL_BYTES = 128 << 10


def read_metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The first records and the newest ones, in order."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size <= _HEAD_BYTES + _TAIL_BYTES:
                return _records(file.read())
            head = file.read(_HEAD_BYTES)
            file.seek(size - _TAIL_BYTES)
            tail = file.read()
    except OSError:
        return ()
    # Both cuts go through a line.
    return (*_records(head[: head.rfind(b"\n")]), *_records(tail[tail.find(b"\n") :]))


def _records(data: bytes) -> tuple[Mapping[str, Any], ...]:
    found = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a killed writer
        if isinstance(record, dict):
            found.append(record)
    return tuple(found)


def vocabulary_of(config: Any) -> int | None:
    """The number of tokens that the model of config.json chooses from; None where it is not a run of our own."""
    value = config.get("model", {}).get("vocab_size") if isinstance(config, dict) else None
    value = value.get("value") if isinstance(value, dict) else value
    return value if isinstance(value, int) and 1 < value < math.inf else None
