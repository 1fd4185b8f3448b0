"""Selects the gradients to read in a step if reading all of them in every step would cost too much.

Reading a gradient takes memory bandwidth, whatever the script computes, and each kernel delays the others. On a GPU
every eighth bucket is read in full. The next step reads other buckets, so each has its turn within eight steps. The
last two buckets before the optimizer are checked in every step: a bad number that spreads on its way back from the
loss has reached them by then. One in eight of their groups of 32 numbers is read, and other groups in the next step.
That is enough, because every row of a weight has many groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TURNS = 8
LAST = 2
_GROUP = 32  # numbers
_SMALL = 1 << 16  # numbers that are read in full: biases, norms


@dataclass(frozen=True)
class Turn:
    """What is read in one step."""

    step: int = 0
    buckets: int = 0  # number of buckets in the previous step; 0: not known yet

    def of_bucket(self, bucket: torch.Tensor, number: int) -> torch.Tensor | None:
        """The part of a bucket to read: all of it, some groups, or None. `number` counts from 1."""
        if number % TURNS == self.step % TURNS:
            return bucket
        return self._groups(bucket) if number > self.buckets - LAST else None

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """One contiguous eighth, because torch reads many tensors at once only if they are contiguous."""
        if _read_in_full(gradient):
            return gradient
        length = -(-gradient.numel() // (_GROUP * TURNS)) * _GROUP
        start = min(self.step % TURNS * length, gradient.numel() - _GROUP)
        return gradient.view(-1)[start : start + length]

    def _groups(self, bucket: torch.Tensor) -> torch.Tensor:
        """Every eighth group of 32 numbers. The remainder at the end is read only when the whole bucket is."""
        if _read_in_full(bucket):
            return bucket
        whole = bucket.numel() // (_GROUP * TURNS) * _GROUP * TURNS
        return bucket.view(-1)[:whole].view(-1, TURNS, _GROUP)[:, self.step % TURNS]


def _read_in_full(tensor: torch.Tensor) -> bool:
    return tensor.numel() < _SMALL or not tensor.is_contiguous()
