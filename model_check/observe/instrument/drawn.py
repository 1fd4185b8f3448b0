"""Which samples of its dataset a batch was made of: the index lists of the newest batches, as the loader drew them.

Only numbers are kept, and weak references to tell a batch by. A framework may fetch a batch ahead of the one in use, so
the newest one counts only where the script's own code asked for it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from model_check.observe.instrument.box import BOX

_KEPT = 4  # batches
_QUEUE = "_model_check_drawn"  # of a loader's iterator: what was drawn and has not been handed out


@dataclass(frozen=True)
class Drawn:
    """One batch that a loader has handed out."""

    indices: Sequence[int]
    tensors: tuple[Callable[[], Any], ...]
    by_script: bool


RECENT: deque[Drawn] = deque(maxlen=_KEPT)


def watch(base: Any) -> None:
    """Of torch's `_BaseDataLoaderIter`: remembers each index list when it is drawn."""
    original = base._next_index

    def next_index(self: Any) -> Any:
        index = original(self)
        if type(index) is list and getattr(self, "_in_order", True):
            queue = self.__dict__.get(_QUEUE)
            if queue is None or queue[0] is not self._sampler_iter:  # a new epoch of one that keeps its workers
                queue = self.__dict__[_QUEUE] = (self._sampler_iter, deque())
            queue[1].append(index)
        return index

    next_index.__doc__ = original.__doc__
    base._next_index = next_index


def handed_out(loader: Any, batch: Any) -> None:
    """In the order in which they were drawn; of a batch that failed too (None)."""
    queue = loader.__dict__.get(_QUEUE)
    if queue is None or not queue[1]:
        return
    indices = queue[1].popleft()
    if batch is not None and indices and type(indices[0]) is int:
        from model_check.observe.instrument.readings import tensors_in  # torch is whole by now

        tensors = tuple(weakref.ref(tensor) for tensor in tensors_in(batch))
        RECENT.append(Drawn(indices, tensors, _asked_by_script(sys._getframe(1))))


def _asked_by_script(frame: FrameType | None) -> bool:
    """Past our own frames and torch's decorators; a progress bar fetches nothing ahead."""
    while frame is not None:
        file = frame.f_code.co_filename
        if BOX.code.shown(file) is not None:
            return True
        if "/torch/" not in file and "/tqdm/" not in file and "/model_check/observe/" not in file:
            return False
        frame = frame.f_back
    return False


def indices_of(drawn: Sequence[Drawn], given: Sequence[Any], size: int) -> Sequence[int] | None:
    """The dataset's numbers of a batch: of the one that holds a tensor that was given, else of the newest."""
    for batch in reversed(drawn):
        known = [tensor for reference in batch.tensors if (tensor := reference()) is not None]
        if any(tensor is one for tensor in known for one in given) and len(batch.indices) == size:
            return batch.indices
    newest = drawn[-1] if drawn else None
    return newest.indices if newest is not None and newest.by_script and len(newest.indices) == size else None
