"""Which dataset samples a batch was made of: the index lists of the newest batches, as the loader drew them.

Keeps only numbers, and weak references that identify a batch. A framework may fetch a batch ahead of the one in use, so
the newest batch counts only if the script's own code asked for it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from model_check.blackbox.box import BOX
from model_check.record.events.memory import RecordingFailed
from model_check.record.user_code import is_watching

_KEPT = 4  # batches
_QUEUE = "_model_check_drawn"  # attribute of a loader's iterator: index lists drawn but not handed out yet


@dataclass(frozen=True)
class Drawn:
    """One batch that a loader has handed out."""

    indices: Sequence[int]
    tensors: tuple[Callable[[], Any], ...]
    by_script: bool


RECENT: deque[Drawn] = deque(maxlen=_KEPT)


class _Broken:
    down = False  # once something here has failed, the script goes on without it


def watch(base: Any) -> None:
    """Patches torch's `_BaseDataLoaderIter` to remember each index list when it is drawn."""
    original = base._next_index

    def next_index(self: Any) -> Any:
        index = original(self)
        if not _Broken.down:
            try:
                note(self, index)
            except Exception as error:
                _give_up(error)
        return index

    def note(self: Any, index: Any) -> None:
        if type(index) is list and getattr(self, "_in_order", True):
            queue = self.__dict__.get(_QUEUE)
            if queue is None or queue[0] is not self._sampler_iter:  # a new epoch of a loader with persistent workers
                queue = self.__dict__[_QUEUE] = (self._sampler_iter, deque())
            queue[1].append(index)

    next_index.__doc__ = original.__doc__
    base._next_index = next_index


def handed_out(loader: Any, batch: Any) -> None:
    """Called for each batch in the order drawn, also for one that failed (None). A batch may be any object at all."""
    if _Broken.down:
        return
    try:
        _remember(loader, batch)
    except Exception as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    _Broken.down = True
    BOX.event(RecordingFailed.by(error, "dataset indices"))


def _remember(loader: Any, batch: Any) -> None:
    queue = loader.__dict__.get(_QUEUE)
    if queue is None or not queue[1]:
        return
    indices = queue[1].popleft()
    if batch is not None and indices and type(indices[0]) is int:
        from model_check.blackbox.device_numbers import tensors_in  # torch is fully imported by now

        tensors = tuple(weakref.ref(tensor) for tensor in tensors_in(batch))
        RECENT.append(Drawn(indices, tensors, _asked_by_script(sys._getframe(2))))


def _asked_by_script(frame: FrameType | None) -> bool:
    """Ignores our own frames, torch's decorators and progress bars, which fetch nothing ahead."""
    while frame is not None:
        file = frame.f_code.co_filename
        if BOX.code.shown(file) is not None:
            return True
        if "/torch/" not in file and "/tqdm/" not in file and not is_watching(file):
            return False
        frame = frame.f_back
    return False


def indices_of(drawn: Sequence[Drawn], given: Sequence[Any], size: int) -> Sequence[int] | None:
    """The dataset indices of the batch that holds one of the `given` tensors, else of the newest batch."""
    for batch in reversed(drawn):
        known = [tensor for reference in batch.tensors if (tensor := reference()) is not None]
        if any(tensor is one for tensor in known for one in given) and len(batch.indices) == size:
            return batch.indices
    newest = drawn[-1] if drawn else None
    return newest.indices if newest is not None and newest.by_script and len(newest.indices) == size else None
