"""The loop: a generator that yields one StepInfo a step.

On a GPU the host runs one step ahead: the numbers of a step are read while the next one computes, so reading them
never makes the GPU wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import psutil
import torch

from model_check.blackbox.spans import span
from model_check.engine.inputs import RandomState, StepInputs
from model_check.engine.precision import BACKOFF
from model_check.engine.step import TrainStep
from model_check.record.metrics import StepMetrics


@dataclass(frozen=True, kw_only=True)
class StepInfo(StepMetrics):
    """One finished step, as metrics.jsonl has it, and what only those need who run the job."""

    eta_s: float
    stop: bool
    hit: bool = False  # its numbers are not finite, and that must be explained
    own_fault: bool = False  # this rank's own loss or gradients were bad before they were exchanged
    scale: float = 1.0  # of the loss

    @property
    def lowered_scale(self) -> float | None:
        """The loss scale after a step that only overflowed, which float16 does now and then; None after any other."""
        return self.scale * BACKOFF if self.skipped and not self.hit else None


@dataclass
class _Issued:
    """A step whose work has been handed to the device and whose numbers are on their way."""

    data_wait_s: float
    inputs: StepInputs
    host: torch.Tensor
    since: torch.cuda.Event | None  # on the device: the end of the step before, or the beginning of this one
    arrived: torch.cuda.Event | None


@dataclass(frozen=True)
class LoopPlan:
    """Where the loop starts and ends, and the constants its metrics need."""

    first_step: int
    max_steps: int
    accumulation: int
    tokens_per_step: int  # over all ranks
    tokens_before: int = 0
    flops_per_token: float = 0.0
    peak_flops: float | None = None  # of all ranks together


def _issue(inputs: StepInputs, data_wait_s: float, packed: torch.Tensor, since: torch.cuda.Event | None) -> _Issued:
    if since is None:
        return _Issued(data_wait_s, inputs, packed, None, None)
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    return _Issued(data_wait_s, inputs, host, since, _moment())


def _moment() -> torch.cuda.Event:
    """This point of the device's queue, to be waited for and measured from."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def memory_gib(device: torch.device) -> float:
    """Peak of the device's allocator; on the CPU what the process has resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Loop:
    """Iterating trains. `stop_requested` is polled before every step; all ranks stop after the same step.

    Of a step whose `hit` is set, `inputs` has what it takes to run it again, until the consumer asks for the next one.
    `left_out` has by step how many global batches are passed over before it takes its own.
    """

    def __init__(
        self,
        plan: LoopPlan,
        train_step: TrainStep,
        batches: Iterator[Any],
        rate_of: Callable[[int], float],
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        needs_result: Callable[[int], bool] = lambda step: False,
        evaluate: Callable[[int], float | None] = lambda step: None,
        left_out: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.plan = plan
        self._train_step = train_step
        self._batches = batches
        self._rate_of = rate_of
        self._stop_requested = stop_requested
        self._needs_result = needs_result
        self._evaluate = evaluate
        self._left_out = left_out
        self.inputs: StepInputs | None = None
        self._started = self._last_finish = 0.0
        self._last_moment: torch.cuda.Event | None = None

    def __iter__(self) -> Iterator[StepInfo]:
        runs_ahead = self._train_step.place.device.type == "cuda"
        pending: _Issued | None = None
        self._started = self._last_finish = time.perf_counter()
        for step in range(self.plan.first_step, self.plan.max_steps):
            previous, pending = pending, self._begin(step)
            if previous is not None:
                info = self._finish(previous)
                yield info
                if info.hit:
                    # The step after it ran with its weights held: it is done again, now that they are free.
                    pending = self._again(pending.inputs)
                if info.stop:
                    break
            if not runs_ahead or self._needs_result(step):
                info, pending = self._finish(pending), None
                val_loss = self._evaluate(step)
                yield info if val_loss is None else replace(info, val_loss=val_loss)
                # Evaluating, saving and whatever the consumer did belong to no step.
                self._last_finish, self._last_moment = time.perf_counter(), None
                if info.stop:
                    break
        if pending is not None:
            yield self._finish(pending)

    def _begin(self, step: int) -> _Issued:
        before = time.perf_counter()
        if self._train_step.place.device.type == "cuda" and self._last_moment is None:
            self._last_moment = _moment()
        with span("data"):
            for _ in range(self.plan.accumulation * self._left_out.get(step, 0)):
                next(self._batches)
            micro_batches = tuple(next(self._batches) for _ in range(self.plan.accumulation))
        data_wait_s = time.perf_counter() - before
        inputs = StepInputs(
            step, self._rate_of(step), micro_batches, RandomState.capture(self._train_step.place.device)
        )
        return self._run(inputs, data_wait_s)

    def _again(self, inputs: StepInputs) -> _Issued:
        inputs.random.restore()
        self._last_moment = _moment()
        return self._run(inputs, 0.0)

    def _run(self, inputs: StepInputs, data_wait_s: float) -> _Issued:
        packed = self._train_step(inputs.micro_batches, inputs.rate, stop_requested=self._stop_requested())
        issued = _issue(inputs, data_wait_s, packed, self._last_moment)
        self._last_moment = issued.arrived
        return issued

    def _finish(self, issued: _Issued) -> StepInfo:
        if issued.arrived is not None:
            issued.arrived.synchronize()
        loss, norm, skipped, stop, own_fault, hit, scale = issued.host.tolist()
        step, self.inputs = issued.inputs.step, issued.inputs
        now = time.perf_counter()
        step_s, self._last_finish = now - self._last_finish, now
        if issued.since is not None and issued.arrived is not None:
            # The host runs ahead; only the device knows how long its step took.
            step_s = issued.since.elapsed_time(issued.arrived) / 1e3
        done = step + 1 - self.plan.first_step
        # The first step compiles and warms up; it says nothing about the ones to come.
        pace = (now - self._started) / done if done < 3 else step_s
        tokens_per_s = self.plan.tokens_per_step / step_s
        return StepInfo(
            step=step,
            loss=loss,
            lr=issued.inputs.rate,
            grad_norm=norm,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * self.plan.flops_per_token / self.plan.peak_flops if self.plan.peak_flops else None,
            step_s=step_s,
            data_wait_s=issued.data_wait_s,
            memory_gib=memory_gib(self._train_step.place.device),
            tokens=self.plan.tokens_before + done * self.plan.tokens_per_step,
            skipped=bool(skipped),
            eta_s=pace * (self.plan.max_steps - step - 1),
            stop=stop > 0,
            hit=bool(hit),
            own_fault=bool(own_fault),
            scale=scale,
        )
