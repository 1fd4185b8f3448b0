"""A random-looking order of n samples that needs no table: position -> sample, one to one.

A Feistel network permutes the numbers of an even number of bits; a result beyond n is permuted again until it falls
below (cycle walking). Any slice of the order of a trillion samples costs the slice alone, so every rank and every
resume can ask for its own part.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


class Permutation:
    """The order of `size` samples fixed by (seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        assert size > 0, f"a permutation of {size} samples"
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        origin = np.array([seed & (2**64 - 1)], dtype=np.uint64)
        stream = _mix(_mix(origin + _GOLDEN) ^ np.uint64(epoch & (2**64 - 1)))
        self._keys = _mix(stream + _GOLDEN * np.arange(1, ROUNDS + 1, dtype=np.uint64))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids (int64) at these positions, each in [0, size)."""
        values = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._permute(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right
