"""Is a tensor finite, and are this rank's own gradients: asked before they are exchanged, answered on the device.

After an exchange every rank has the same NaN, and nobody knows whose it was. So the sum of each piece of gradient is
noted while it is still this rank's own: one extra read, queued on the device like everything else. A sum is finite only
if every number in it is, and no reduction is faster; it may also overflow, which is no healthier.
A lone rank exchanges nothing; for it the gradient norm of the step says the same.
"""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from model_check.blackbox.device_numbers import local

CHECKED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_PIECES = 256


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a sharded tensor; asking about the whole would be a collective."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def real_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, outside any graph; of complex numbers both parts, as plain ones."""
    values = local_part(tensor).detach()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def checkable(value: Any) -> bool:
    """A tensor that could hold NaN or infinity, with values that can be read here and now."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in CHECKED
        and value.layout == torch.strided
        and value.device.type != "meta"
        and local_part(value).numel() > 0
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Without a temporary of the tensor's size. A finite sum proves it; a sum may overflow, a magnitude cannot."""
    values = real_part(tensor)
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(torch.linalg.vector_norm(values, math.inf)))


def finite(tensor: Any) -> bool:
    """The same of anything: what cannot be read passes."""
    plain = local(tensor)
    return plain is None or not checkable(plain) or is_finite(plain)


class LocalCheck:
    """Notes the sum of each piece of gradient, in the order in which they are looked at."""

    def __init__(self, device: torch.device, pieces: int = _PIECES) -> None:
        self.looked_at = 0
        self.open = True  # between `begin` and `close`: what is reduced then is gradients
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._make_room(pieces)

    def _make_room(self, pieces: int) -> None:
        # Writing into memory of our own: a fresh result would be freed on one stream and read on another.
        self._sums = torch.zeros(pieces, dtype=torch.float32, device=self._device)
        self._places = self._sums.unbind()

    def begin(self) -> None:
        """Forgets the step before."""
        if self._stream is not None:  # its sums may still be on their way from there
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if self.looked_at > len(self._places):
            self._make_room(2 * self.looked_at)
        self._sums.zero_()
        self.looked_at = 0
        self.open = True

    def close(self) -> None:
        """All gradients of the step have been computed."""
        self.open = False

    def look(self, gradient: torch.Tensor) -> None:
        piece, dims = self.looked_at, tuple(range(gradient.ndim))
        self.looked_at += 1
        if piece < len(self._places) - 1:
            torch.sum(gradient, dim=dims, dtype=torch.float32, out=self._places[piece])
        else:  # more than there were ever before: until the next step they share a place, where a bad number stays
            self._places[-1].add_(torch.sum(gradient, dim=dims, dtype=torch.float32))

    def look_beside(self, gradient: torch.Tensor) -> torch.cuda.Stream | None:
        """Looks on a stream of its own, beside the kernels that are queued from now on: half the price.

        Who writes to the gradient has to be queued behind the stream that is returned.
        """
        if not gradient.is_cuda or self.looked_at >= len(self._places) - 1:
            self.look(gradient)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(gradient.device)
        with self.beside():
            self.look(gradient)
        gradient.record_stream(self._stream)  # it may be freed, and its memory lent again, before this has run
        return self._stream

    def beside(self) -> AbstractContextManager[Any]:
        """What is queued inside runs behind all that was looked at, on the stream of its own where there is one."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def sums(self) -> torch.Tensor:
        """One number for each piece, finite if the piece was; of very many, the last ones share one."""
        return self._sums[: self.looked_at]

    def bad(self) -> torch.Tensor:
        """1.0 on the device where some piece was not finite, else 0.0."""
        return (~torch.isfinite(self._sums).all()).float()


def watch_replica(device: torch.device) -> LocalCheck:
    """For a module inside DDP: each bucket is looked at on its way into the all-reduce.

    While gradients are only added up nothing is exchanged, and nothing looked at: a bad number stays in the sum.
    """
    from model_check.blackbox import native_collectives

    check = LocalCheck(device)
    known = weakref.ref(check)

    def reduces(exchange: native_collectives.Exchange) -> None:
        watching = known()
        if watching is None:
            native_collectives.stop_telling(reduces)
        elif watching.open:
            for bucket in exchange.given:
                watching.look(bucket)

    native_collectives.install()
    native_collectives.tell_of_exchanges(reduces)
    return check


def watch_shards(model: nn.Module, device: torch.device) -> LocalCheck | None:
    """For a model under fully_shard: each unit's gradients are looked at as one, on their way into the reduce-scatter.

    None where the model has no unit whose exchange can be watched.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return None
    check = LocalCheck(device)

    class WatchedReduceScatter(DefaultReduceScatter):
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            check.look(input_tensor)
            return super().__call__(output_tensor, input_tensor, *args, **options)

    watched = WatchedReduceScatter()
    for unit in units:
        unit.set_custom_reduce_scatter(watched)
    return check
