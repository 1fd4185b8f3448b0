"""The loader: batches in an order fixed by (seed, epoch), disjoint between ranks, resumable to the sample.

A *global batch* is the next world_size · batch_size · grad_accum samples of the epoch's order. Micro-step m of rank r
takes the batch_size samples at (m · world_size + r) · batch_size of it: the set of samples in a global batch is the
same for 1 rank × 4 micro-steps as for 4 ranks × 1. Global batches never straddle epochs: the samples left over at the
end of an epoch, fewer than a global batch and others every time, are not seen in that epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from model_check.data.packed import PackedCache
from model_check.data.permutation import Permutation
from model_check.errors import DataError

BATCHES_AHEAD = 4
"""Assembled before they are asked for, per worker thread: a late disk must not stop a step of a millisecond."""
_ORDER_BLOCK = 4096


@dataclass(frozen=True)
class Cursor:
    """Where the next global batch begins: `position` samples into `epoch`. Independent of the number of ranks."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `targets` are `tokens` one further on; `sample_ids` name the samples for whoever must blame one.

    With document_mask: `document_ids` number the document of every token, `positions` count from the beginning of the
    document (or of the sample, where the document began before it).
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    sample_ids: torch.Tensor
    document_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class BatchLoader:
    """An endless iterator of this rank's micro-batches.

    num_workers  0: batches are assembled when asked for; n: n threads assemble them ahead of time
    pin_memory   None: where CUDA is in use in this process, so that copies to the GPU run beside the step
    """

    def __init__(
        self,
        cache: PackedCache,
        batch_size: int,
        context_length: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        grad_accum: int = 1,
        num_workers: int = 0,
        cursor: Cursor | None = None,
        document_mask: bool = False,
        pin_memory: bool | None = None,
    ) -> None:
        self.samples = cache.samples(context_length)
        self.global_batch = world_size * batch_size * grad_accum
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is not one of {world_size} ranks", code="MC903")
        if self.samples < self.global_batch:
            raise DataError(
                f"{cache.manifest.origin.get('dataset', 'the data')} gives {self.samples} samples of {context_length} "
                f"tokens, fewer than one global batch of {self.global_batch} "
                f"({world_size} ranks × batch {batch_size} × accumulation {grad_accum})",
                remedy="use more text, a shorter training.context_length, or a smaller training.batch_size",
                code="MC904",
            )
        self._cache = cache
        self._batch_size = batch_size
        self._context_length = context_length
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._grad_accum = grad_accum
        self._document_mask = document_mask
        self._pin_memory = pin_memory
        self._order = _EpochOrder(self.samples, seed)
        self._micro_steps_done = 0
        self._start = self._settled(cursor or Cursor())
        self._next_submit = (self._start, 0)
        self._num_workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()

    @property
    def cursor(self) -> Cursor:
        """Where a new loader must start to continue after the last *complete* global batch taken from this one."""
        return self._start

    @property
    def identity(self) -> dict[str, Any]:
        """All that the order of samples depends on: a cursor means something only where this is the same."""
        return {
            "tokens": self._cache.fingerprint,
            "training.context_length": self._context_length,
            "system.seed": self._seed,
        }

    def seek(self, cursor: Cursor) -> None:
        """Goes on from there, at the beginning of a global batch."""
        self._micro_steps_done = 0
        self._start = self._settled(cursor)
        self._drop_ahead()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._num_workers == 0:
            batch = self._assemble(self._start, self._micro_steps_done)
        else:
            batch = self._take_assembled()
        self._micro_steps_done += 1
        if self._micro_steps_done == self._grad_accum:
            self._micro_steps_done = 0
            self._start = self._after(self._start)
        return batch

    def close(self) -> None:
        """Ends the threads and forgets what they assembled; asked again, the loader goes on where it was."""
        self._drop_ahead()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next_submit = (self._start, self._micro_steps_done)

    def _settled(self, cursor: Cursor) -> Cursor:
        """The same place, or the next epoch where no whole global batch is left in this one."""
        if cursor.position + self.global_batch > self.samples:
            return Cursor(cursor.epoch + 1, 0)
        return cursor

    def _after(self, cursor: Cursor) -> Cursor:
        return self._settled(Cursor(cursor.epoch, cursor.position + self.global_batch))

    def _take_assembled(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="batches")
        while len(self._ahead) <= BATCHES_AHEAD * self._num_workers:
            start, micro_step = self._next_submit
            self._ahead.append(self._pool.submit(self._assemble, start, micro_step))
            last = micro_step + 1 == self._grad_accum
            self._next_submit = (self._after(start), 0) if last else (start, micro_step + 1)
        return self._ahead.popleft().result()

    def _assemble(self, start: Cursor, micro_step: int) -> Batch:
        first = start.position + (micro_step * self._world_size + self._rank) * self._batch_size
        sample_ids = self._order.samples_at(start.epoch, first, self._batch_size)
        length = self._context_length
        parts = [self._empty() for _ in range(4 if self._document_mask else 2)]
        arrays = [part.numpy() for part in parts]
        for row, sample in enumerate(sample_ids.tolist()):
            begin = sample * length
            data = self._cache.read(begin, begin + length + 1)
            arrays[0][row] = data[:-1]
            arrays[1][row] = data[1:]
            if self._document_mask:
                arrays[2][row], arrays[3][row] = self._documents_of(begin)
        tokens, targets, *documents = parts
        return Batch(tokens, targets, torch.from_numpy(sample_ids), *documents)

    def _empty(self) -> torch.Tensor:
        pin = torch.cuda.is_initialized() if self._pin_memory is None else self._pin_memory
        return torch.empty((self._batch_size, self._context_length), dtype=torch.int64, device="cpu", pin_memory=pin)

    def _documents_of(self, begin: int) -> tuple[np.ndarray, np.ndarray]:
        length = self._context_length
        first, starts = self._cache.document_starts(begin, begin + length)
        inside = np.maximum(starts - begin, 0)
        lengths = np.diff(inside, append=length)
        ids = np.repeat(np.arange(first, first + len(starts)), lengths)
        return ids, np.arange(length) - np.repeat(inside, lengths)


class _EpochOrder:
    """Slices of the epochs' orders; computes a few thousand places at a time, since a short slice costs as much."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._seed = seed
        self._block: tuple[int, int, np.ndarray] = (-1, -1, np.zeros(0, dtype=np.int64))

    def samples_at(self, epoch: int, first: int, count: int) -> np.ndarray:
        number = first // _ORDER_BLOCK
        inside = first - number * _ORDER_BLOCK
        if inside + count > _ORDER_BLOCK:
            return Permutation(self._samples, self._seed, epoch)(np.arange(first, first + count))
        # One name for all three: threads may compute the same block twice, never mix two.
        block = self._block
        if block[:2] != (epoch, number):
            places = np.arange(number * _ORDER_BLOCK, min((number + 1) * _ORDER_BLOCK, self._samples))
            block = (epoch, number, Permutation(self._samples, self._seed, epoch)(places))
            self._block = block
        return block[2][inside : inside + count].copy()


def check_rank_slices(sample_ids_by_rank: Sequence[Sequence[int]]) -> None:
    """Raises MC903 where two ranks hold the same sample of one global batch: gradients would count it twice."""
    owner: dict[int, int] = {}
    for rank, sample_ids in enumerate(sample_ids_by_rank):
        for sample in sample_ids:
            other = owner.setdefault(int(sample), rank)
            if other != rank:
                raise DataError(
                    f"ranks {other} and {rank} were given the same sample {int(sample)} of one global batch",
                    remedy="give each rank its own rank number and all of them the same world size and seed",
                    code="MC903",
                )
