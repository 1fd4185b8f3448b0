"""A snapshot of torch's allocator, summed up: how much is used for what, and the largest tensors with their lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from model_check.blackbox.memory_owners import Owner

LARGEST = 10
Where = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True)
class Holding:
    """Tensors of one kind: how many, their bytes together, what for, the line that made them ("" unknown)."""

    bytes: int
    count: int
    category: str
    name: str
    line: str

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Holdings:
    """All live memory of a device by category, its largest pieces, and the holes between them."""

    categories: Mapping[str, int]
    largest: tuple[Holding, ...]
    free_in_pieces: int
    largest_piece: int


def live_blocks(segments: Iterable[Mapping[str, Any]]) -> Iterable[tuple[int, int, list[dict[str, Any]]]]:
    """(address, bytes, frames innermost first) of every block in use."""
    for segment in segments:
        for block in segment.get("blocks", ()):
            if block.get("state") == "active_allocated":
                yield int(block.get("address", 0)), int(block["size"]), list(block.get("frames") or ())


def sum_up(segments: list[Mapping[str, Any]], owners: Mapping[int, Owner], where: Where) -> Holdings:
    """`where` names the line to show for a block's frames."""
    categories: dict[str, int] = defaultdict(int)
    groups: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for address, size, frames in live_blocks(segments):
        owner = owners.get(address)
        category = owner.category if owner is not None else "activations and temporaries"
        categories[category] += size
        groups[(category, where(frames), size)].append(owner.name if owner is not None else "")
    found = [
        Holding(size * len(names), len(names), category, names[0] if len(set(names)) == 1 else "", line)
        for (category, line, size), names in groups.items()
    ]
    holes = [
        int(block["size"])
        for segment in segments
        for block in segment.get("blocks", ())
        if block.get("state") == "inactive"
    ]
    return Holdings(
        categories=dict(categories),
        largest=tuple(sorted(found, key=lambda holding: -holding.bytes)[:LARGEST]),
        free_in_pieces=sum(holes),
        largest_piece=max(holes, default=0),
    )


def sum_up_owned(owners: Iterable[Owner]) -> Holdings:
    """Where there is no allocator to ask (host memory): what modules and optimizers hold."""
    categories: dict[str, int] = defaultdict(int)
    found = []
    for owner in owners:
        categories[owner.category] += owner.bytes
        found.append(Holding(owner.bytes, 1, owner.category, owner.name, ""))
    largest = tuple(sorted(found, key=lambda holding: -holding.bytes)[:LARGEST])
    return Holdings(dict(categories), largest, 0, 0)
