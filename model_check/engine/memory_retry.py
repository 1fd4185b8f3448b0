"""Out of memory is not the end: the step runs again with half the micro-batch and twice as many of them.

The global batch stays, and so do the losses: a step is the mean over its micro-batches, however many they are. A rank
alone tries again whenever it runs out of memory. Ranks that exchange gradients cannot: the peers of one that failed
would wait for it inside the backward pass. They try the first steps without exchanging anything, agree on a size that
all of them can hold, and then do the step. (Two of them: the optimizer's state appears at the end of the first.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox.box import BOX
from model_check.engine.arrangement import Arranged
from model_check.engine.batches import sample_count, samples
from model_check.engine.inputs import RandomState
from model_check.engine.passes import ScaleLoss
from model_check.engine.place import Place
from model_check.errors import UsageError
from model_check.plan.layout import Layout
from model_check.record.events.memory import MicroBatchHalved

TRIED_STEPS = 2


def check_can_retry(layout: Layout) -> None:
    """A gathered parameter needs all ranks: one that runs out of memory between two gathers leaves its peers alone."""
    if layout.shards and layout.world_size > 1:
        raise UsageError(
            f"training.oom_retry=true does not work with a sharded model (the layout is {layout.strategy}, "
            f"{layout.world_size} ranks)",
            remedy="set parallel.strategy=ddp, or training.oom_retry=false and a smaller training.batch_size",
        )


class RetryingPasses:
    """Passes that make micro-batches smaller when they do not fit."""

    def __init__(self, arranged: Arranged, place: Place) -> None:
        check_can_retry(arranged.layout)
        self.computes_loss = arranged.passes.computes_loss
        self.pieces = 1  # into how many each micro-batch is cut
        self._passes = arranged.passes
        self._model = arranged.model
        self._place = place
        self._tries_left = TRIED_STEPS if place.world_size > 1 else 0

    def accumulate(self, micro_batches: Sequence[Any], scale_loss: ScaleLoss) -> torch.Tensor:
        if self._tries_left:
            self._find_what_fits(micro_batches, scale_loss)
            self._tries_left -= 1
        if self._place.world_size > 1:
            return self._passes.accumulate(self._cut(micro_batches), scale_loss)
        while True:
            loss, error = self._attempt(micro_batches, scale_loss)
            if loss is not None:
                return loss
            self._halve(micro_batches, error)

    def loss(self, batch: Any) -> torch.Tensor:
        pieces = split(batch, self.pieces) if (sample_count(batch) or 1) % self.pieces == 0 else [batch]
        return torch.stack([self._passes.loss(piece) for piece in pieces]).mean()

    def _find_what_fits(self, micro_batches: Sequence[Any], scale_loss: ScaleLoss) -> None:
        """Collective. Forward and backward without an exchange, until no rank runs out of memory."""
        assert isinstance(self._model, DistributedDataParallel), type(self._model)
        while True:
            random = RandomState.capture(self._place.device)
            with self._model.no_sync():
                loss, error = self._attempt(micro_batches, scale_loss)
            self._clear()
            random.restore()
            failed = torch.tensor(float(loss is None), device=self._place.device)
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if not failed.item():
                return
            self._halve(micro_batches, error)

    def _attempt(
        self, micro_batches: Sequence[Any], scale_loss: ScaleLoss
    ) -> tuple[torch.Tensor | None, torch.OutOfMemoryError | None]:
        random = RandomState.capture(self._place.device)
        try:
            return self._passes.accumulate(self._cut(micro_batches), scale_loss), None
        except torch.OutOfMemoryError as error:
            # Its frames hold the tensors that filled the memory.
            failure = error.with_traceback(None)
        self._clear()
        random.restore()
        return None, failure

    def _halve(self, micro_batches: Sequence[Any], error: torch.OutOfMemoryError | None) -> None:
        rows = sample_count(micro_batches[0]) or 1
        if rows % (2 * self.pieces):
            raise error or torch.OutOfMemoryError(
                f"a peer ran out of memory, and a micro-batch of {rows // self.pieces} cannot be halved"
            )
        self.pieces *= 2
        BOX.event(
            MicroBatchHalved(
                micro_batch=rows // self.pieces,
                micro_batches=self.pieces * len(micro_batches),
                was=2 * rows // self.pieces,
                message=str(error or "a peer ran out of memory")[:400],
            )
        )

    def _cut(self, micro_batches: Sequence[Any]) -> list[Any]:
        return [piece for batch in micro_batches for piece in split(batch, self.pieces)]

    def _clear(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        if self._place.device.type == "cuda":
            torch.cuda.empty_cache()


def split(batch: Any, pieces: int) -> list[Any]:
    """The batch in equal parts, with its structure; what is no tensor goes into each of them."""
    if pieces == 1:
        return [batch]
    count = sample_count(batch)
    assert count and count % pieces == 0, (count, pieces)
    size = count // pieces
    return [samples(batch, start, start + size) for start in range(0, count, size)]
