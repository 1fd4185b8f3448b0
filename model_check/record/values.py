"""Values of a JSON file that anybody may have written, as the type that a reader needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def whole(value: Any) -> int:
    """A whole number; 0 where it is none."""
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1 << 62 else 0


def seconds(body: Mapping[str, Any], key: str = "t") -> float:
    """A time; 0 where there is none."""
    value = body.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1 << 62 else 0.0


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; none where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
