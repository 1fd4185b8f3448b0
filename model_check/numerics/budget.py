"""How much of a step's gradients is looked at: all of them, or parts of them in turns, so that it stays cheap.

Reading gradients costs what memory bandwidth it takes, whatever the script computes. So there is a budget: a quarter of
a percent of the run's time, and a little in advance so that the first steps are looked at in full. Where all gradients
cannot be read for that, every 8th, 16th or 32nd group of their numbers is, other ones in the next step. A bad number
seldom stays alone: on its way back from the loss it fills rows of a weight, each of which has many groups, and all
there is of the layers before. Where steps are so short that the kernels alone are too dear, the buckets take turns too,
but for the last ones, which whatever spreads has reached. What is saved adds up to a look at everything now and then.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from model_check.numerics.finite import LocalCheck

SHARE = 0.0025
ADVANCE_S = 0.25
_FOR_PARTS = 0.9  # of what a step earns: the rest is saved for a look at everything
_GROUP = 32  # numbers
_SMALL = 1 << 16  # numbers that are read in full: biases, norms
_ASSUMED_SPEED = {"cuda": 1e12, "cpu": 5e9}  # bytes a second, until it has been measured
_LAUNCH_S = 8e-6  # of the two smallest kernels, which other streams feel too
_FEW_BUCKETS, _TURNS, _LAST = 8, 4, 2
_WORTH_TIMING = 1 << 24  # bytes
_TIMINGS = 4


@dataclass(frozen=True)
class Choice:
    """How much is read of a step's gradients."""

    of: int  # 1: all there are, k: every k-th group of their numbers, 0: nothing
    in_turns: bool = False  # of some of the buckets only


NOTHING, EVERYTHING = Choice(0), Choice(1)
PARTS = (Choice(8), Choice(16), Choice(32), Choice(16, in_turns=True), Choice(32, in_turns=True))


class Budget:
    """How much of a run's time may go into looking."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = ADVANCE_S
        self._since = clock()

    def part_of_a_step(self, price: Callable[[Choice], float]) -> Choice:
        """The most that can be had. `price`: the seconds that it may take.

        What it does take is known only afterwards: it may overdraw, and the next steps wait until that is paid.
        """
        now = self._clock()
        earned = SHARE * (now - self._since)
        self._since = now
        self._left_s = min(ADVANCE_S, self._left_s + earned)
        if self._left_s <= 0:
            return NOTHING
        if price(EVERYTHING) <= self._left_s:
            return EVERYTHING
        return next((part for part in PARTS if price(part) <= _FOR_PARTS * earned), PARTS[-1])

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds


@dataclass(frozen=True)
class Part:
    """What is read of one step's gradients."""

    choice: Choice
    turn: int = 0
    buckets: int = 0  # that there usually are

    @property
    def of(self) -> int:
        return self.choice.of

    def includes(self, bucket: int) -> bool:
        """By its number, from 1. Whatever spreads has reached the last ones."""
        if not self.choice.in_turns or self.buckets <= _FEW_BUCKETS:
            return self.of > 0
        return bucket > self.buckets - _LAST or bucket % _TURNS == self.turn % _TURNS

    def groups(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every k-th group of its numbers: after k times all have been read."""
        if self._all_of(tensor):
            return tensor
        groups = tensor.numel() // (_GROUP * self.of)
        time_round = self.turn // _TURNS if self.choice.in_turns else self.turn
        whole = groups * _GROUP * self.of
        start = (tensor.numel() - whole) * (time_round // self.of % 2)  # what is left over is read in the next round
        return tensor.view(-1)[start : start + whole].view(groups, self.of, _GROUP)[:, time_round % self.of]

    def slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """A k-th of its numbers in one piece, as torch reads many tensors at once; after k times all have been read."""
        if self._all_of(tensor):
            return tensor
        length = -(-tensor.numel() // (_GROUP * self.of)) * _GROUP
        start = min(self.turn % self.of * length, tensor.numel() - _GROUP)
        return tensor.view(-1)[start : start + length]

    def numbers(self, tensor: torch.Tensor) -> int:
        """How many of its numbers are read."""
        return tensor.numel() if self._all_of(tensor) else tensor.numel() // self.of

    def _all_of(self, tensor: torch.Tensor) -> bool:
        return self.of == 1 or tensor.numel() < _SMALL or not tensor.is_contiguous()


ALL = Part(EVERYTHING)


@dataclass
class Amount:
    """The gradients of one step, whether or not they were read."""

    nbytes: Counter[str] = field(default_factory=Counter)  # by kind of device
    buckets: int = 0

    def add(self, bucket: torch.Tensor) -> None:
        self.nbytes[bucket.device.type] += bucket.nbytes
        self.buckets += 1


class Account:
    """Decides step by step what is read, and what that costs."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._prices = Prices()
        self._usual = Amount()
        self._turn = 0
        self._read_here: dict[int, tuple[int, float]] = {}  # in this step by the CPU: bytes and seconds, by part

    def part_of_a_step(self) -> Part:
        return Part(self.budget.part_of_a_step(self._price), self._turn, self._usual.buckets)

    def _price(self, choice: Choice) -> float:
        share, buckets = 1.0, self._usual.buckets
        if choice.in_turns and buckets > _FEW_BUCKETS:
            share = 1 / _TURNS + _LAST / buckets
        launches = buckets * _LAUNCH_S if self._usual.nbytes["cuda"] else 0.0
        read = sum(self._prices.seconds(device, nbytes, choice.of) for device, nbytes in self._usual.nbytes.items())
        return share * (read + launches)

    def step_ended(self, amount: Amount) -> None:
        if amount.buckets:
            self._usual = amount
            self._turn += 1
        # Of a step as a whole: a byte of a tiny bucket costs a thousand times as much as one of a large bucket.
        for of, (nbytes, seconds) in self._read_here.items():
            self._prices.learn("cpu", nbytes, of, seconds)
        self._read_here.clear()

    def look(self, check: LocalCheck, tensor: torch.Tensor, part: Part, *, overlaps: bool) -> torch.cuda.Stream | None:
        """Looks at what a GPU holds, and returns the stream behind which it may be written to."""
        self.budget.spend(self._prices.seconds("cuda", tensor.nbytes, part.of) + _LAUNCH_S)
        if self._prices.still_wanted(tensor.nbytes, part.of):
            with self._prices.timed(tensor, part.of):
                check.look(part.groups(tensor))
            return None
        if overlaps:
            return check.look_beside(part.groups(tensor))
        check.look(part.groups(tensor))
        return None

    def look_here(self, tensor: torch.Tensor, part: Part) -> float:
        """The sum over what the CPU holds, which is waited for."""
        began = time.perf_counter()
        total = torch.sum(part.groups(tensor), dtype=torch.float32).item()
        self.looked_here(tensor.nbytes, part, began)
        return total

    def looked_here(self, nbytes: int, part: Part, began: float) -> None:
        seconds = time.perf_counter() - began
        before = self._read_here.get(part.of, (0, 0.0))
        self._read_here[part.of] = before[0] + nbytes, before[1] + seconds
        self.budget.spend(seconds)

    def looked_in_slices(self, nbytes: int, part: Part) -> None:
        """On a GPU, by few kernels for many tensors."""
        self.budget.spend(self._prices.seconds("cuda", nbytes // part.of, 1) + _LAUNCH_S)


class Prices:
    """What looking costs here: on a GPU as the first few large pieces did, on the CPU as the last few did."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, int], deque[float]] = {}  # seconds for a byte of the whole
        self._medians: dict[str, dict[int, float]] = {}  # of these, by device and part
        self._timed: Counter[int] = Counter()
        self._under_way: deque[tuple[int, int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def seconds(self, device: str, nbytes: int, part: int) -> float:
        """Of reading a part of so many bytes, launches left aside."""
        while self._under_way and self._under_way[0][3].query():
            measured, of_part, begin, end = self._under_way.popleft()
            took = begin.elapsed_time(end) / 1e3
            self.learn("cuda", measured, of_part, max(took - _LAUNCH_S, took / 4))
        return nbytes * self._rate(device, part)

    def _rate(self, device: str, part: int) -> float:
        """As measured; of a part that was never read, as that of another one suggests: else it would never be tried."""
        measured = self._medians.get(device)
        if measured is None:
            return 1 / part / _ASSUMED_SPEED[device]
        nearest = min(measured, key=lambda of: max(of, part) / min(of, part))
        return measured[nearest] * nearest / part

    def learn(self, device: str, nbytes: int, part: int, seconds: float) -> None:
        rates = self._rates.setdefault((device, part), deque(maxlen=_TIMINGS))
        rates.append(seconds / max(1, nbytes))
        self._medians.setdefault(device, {})[part] = statistics.median(rates)

    def still_wanted(self, nbytes: int, part: int) -> bool:
        return self._timed[part] < _TIMINGS and nbytes >= _WORTH_TIMING

    @contextmanager
    def timed(self, tensor: torch.Tensor, part: int) -> Iterator[None]:
        """What is queued inside is timed by the device itself."""
        self._timed[part] += 1
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(tensor.device)
        begin.record(stream)
        yield
        end.record(stream)
        self._under_way.append((tensor.nbytes, part, begin, end))
