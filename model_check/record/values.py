"""Converts values of untrusted JSON files to the type that a reader needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole(value: Any) -> int:
    """The value as a whole number; 0 if it is not one."""
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1 << 62 else 0


def seconds(body: Mapping[str, Any], key: str = "t") -> float:
    """A time in seconds; 0 if the key has none."""
    value = body.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1 << 62 else 0.0


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
