"""How much of a step's gradients is looked at: all of them, or a part of each, in turns, so that it stays cheap.

Reading gradients costs what memory bandwidth it takes, whatever the script computes. So there is a budget: three
thousandths of the run's time, and a little in advance so that the first steps are looked at in full. Of gradients that
cannot all be read for that, every 8th, 16th or 32nd group of numbers is, in the next step other ones. A bad number
seldom stays alone: on its way back from the loss it fills rows of a weight, and all there is of the layers before, and
each row has many groups. What is saved in such steps adds up to a look at everything now and then.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from model_check.observe.numerics.finite import LocalCheck

SHARE = 0.003
ADVANCE_S = 0.25
PARTS = (1, 8, 16, 32)
_GROUP = 32  # numbers
_SMALL = 1 << 16  # numbers that are read in full: biases, norms
_ASSUMED_SPEED = {"cuda": 1e12, "cpu": 5e9}  # bytes a second, until it has been measured
_LAUNCH_S = 8e-6  # of the two smallest kernels
_WORTH_TIMING = 1 << 24  # bytes
_TIMINGS = 4


class Budget:
    """How much of a run's time may go into looking."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = ADVANCE_S
        self._since = clock()

    def part_of_a_step(self, price: Callable[[int], float]) -> int:
        """1 where all may be read, k for every k-th group, 0 for nothing. `price`: the seconds that a part may take.

        What it does take is known only afterwards: it may overdraw, and the next steps wait until that is paid.
        """
        now = self._clock()
        earned = SHARE * (now - self._since)
        self._since = now
        self._left_s = min(ADVANCE_S, self._left_s + earned)
        if self._left_s <= 0:
            return 0
        if price(1) <= self._left_s:
            return 1
        return next((part for part in PARTS[1:] if price(part) <= earned), PARTS[-1])

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds


class Prices:
    """What looking costs here: on a GPU as the first few large pieces did, on the CPU as the last few steps did."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, int], deque[float]] = {}  # seconds for a byte of the whole
        self._timed: dict[int, int] = {}
        self._under_way: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def seconds(self, device: str, nbytes: int, part: int) -> float:
        """Of looking at a part of so many bytes."""
        while self._under_way and self._under_way[0][3].query():
            measured, of_part, begin, end = self._under_way.popleft()
            took = begin.elapsed_time(end) / 1e3
            self.learn("cuda", measured, of_part, max(took - _LAUNCH_S, took / 4))
        rates = self._rates.get((device, part))
        rate = statistics.median(rates) if rates else 1 / part / _ASSUMED_SPEED[device]
        return nbytes * rate

    def learn(self, device: str, nbytes: int, part: int, seconds: float) -> None:
        self._rates.setdefault((device, part), deque(maxlen=_TIMINGS)).append(seconds / max(1, nbytes))

    def look(
        self, check: LocalCheck, tensor: torch.Tensor, part: int, turn: int, *, overlaps: bool
    ) -> tuple[float, torch.cuda.Stream | None]:
        """Looks at a part of a tensor on a GPU. Says how many seconds that costs, and behind which stream it is."""
        seconds, read = self.seconds("cuda", tensor.nbytes, part), groups_of(tensor, part, turn)
        timed = self._timed.get(part, 0)
        if timed < _TIMINGS and tensor.nbytes >= _WORTH_TIMING:
            self._timed[part] = timed + 1
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            stream = torch.cuda.current_stream(tensor.device)
            begin.record(stream)
            check.look(read)
            end.record(stream)
            self._under_way.append((tensor.nbytes, part, begin, end))
            return seconds + _LAUNCH_S, None
        if overlaps:
            return seconds, check.look_beside(read)  # the launch is hidden behind what else the GPU does
        check.look(read)
        return seconds + _LAUNCH_S, None


def groups_of(tensor: torch.Tensor, part: int, turn: int) -> torch.Tensor:
    """Every k-th group of its numbers, others from turn to turn: after k turns all have been read."""
    groups = tensor.numel() // (_GROUP * part)
    if part == 1 or tensor.numel() < _SMALL or not tensor.is_contiguous():
        return tensor
    whole = groups * _GROUP * part
    start = (tensor.numel() - whole) * (turn // part % 2)  # what is left over at the end is read in the next round
    return tensor.view(-1)[start : start + whole].view(groups, part, _GROUP)[:, turn % part]


def slice_of(tensor: torch.Tensor, part: int, turn: int) -> torch.Tensor:
    """A k-th of its numbers in one piece, as torch reads many tensors at once; after k turns all have been read."""
    if part == 1 or tensor.numel() < _SMALL or not tensor.is_contiguous():
        return tensor
    length = -(-tensor.numel() // (_GROUP * part)) * _GROUP
    start = min(turn % part * length, tensor.numel() - _GROUP)
    return tensor.view(-1)[start : start + length]
