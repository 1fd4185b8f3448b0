"""How the ranks of a save agree: a process group of their own, since the training's own must not see our calls.

A collective of a background thread on the group that training uses would be matched with one of a training step.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from model_check.errors import CheckpointError

T = TypeVar("T")

# A rank whose disk is slow keeps the others waiting, in the background, where nobody minds; a dead one is noticed
# by its closed connection, not by this.
_PATIENCE = timedelta(hours=6)


class Peers:
    """The ranks of this job; a lone rank is its own only peer. Making one is collective."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE) if several else None
        self.rank = dist.get_rank() if several else 0
        self.world_size = dist.get_world_size() if several else 1
        host = socket.gethostname()
        self.ranks_on_host = self.gather(host).count(host)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, for everybody."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, for everybody."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def decided_by_first(self, decide: Callable[[], T | CheckpointError]) -> T:
        """What rank 0 decides, for everybody. An error that it returns raises on all: none waits for an answer."""
        answer = self.from_first(decide() if self.is_first else None)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer
