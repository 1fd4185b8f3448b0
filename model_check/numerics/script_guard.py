"""The numerics guard of a foreign script: who made the first number that is not finite, where, and why.

Each rank checks its own loss when `backward` begins and its own gradients when they are about to be reduced, before
any peer's arrive (exchanges). What comes back is probed when the optimizer is about to step: a bad gradient travels
through every layer before the place where it arose, so one of the first parameters shows it. The loss of a GPU is
copied behind its kernels and read when the optimizer is called: by then the forward is long over, so nobody waits. A
bad gradient there is known one step later, unless the script itself waits for the device in between. If a script takes
the norm of its gradients, to clip them or to show it, that norm is checked too: it has read all gradients. On a GPU
the gradients are read in turns (exchanges). `--guard full` reads all of them in every step. `--guard halt` also waits
for them, because a guard that promises to refuse a bad step cannot rely on a sample.

On a hit the rank runs its own forward once more (replaying), and writes a `nonfinite` event if it is to blame. The
script's results are never changed, unless it was started with `--guard halt`: then the step is refused.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, get_args

import torch

from model_check.blackbox.box import BOX, GUARD_VARIABLE, GuardMode
from model_check.blackbox.device_numbers import Reading, local
from model_check.blackbox.native_collectives import Exchange
from model_check.numerics.backward_passes import LossLines, Pass, Passes, nodes_of
from model_check.numerics.exchanges import Looked, OwnGradients
from model_check.numerics.finite import finite
from model_check.numerics.graph_search import first_made
from model_check.numerics.hits import Hit, OwnShare, Stop, anomaly_in, devices_answer, is_alone
from model_check.numerics.loss_code import LossCode, Place, bad_loss
from model_check.numerics.probes import (
    Probed,
    TakenNorms,
    all_sizes,
    given_to,
    gradients_finite,
    size_of,
)
from model_check.numerics.replaying import Call, Inputs
from model_check.numerics.reports import Reports


@dataclass(frozen=True)
class _Late:
    """What was asked of a device about a step that has been applied since."""

    step: int = 0
    sizes: Sequence[Reading] = ()
    norms: Sequence[Reading] = ()
    looked: Looked | None = None
    codes: Sequence[LossCode] = ()
    number: int = 0  # of the step in the history
    places: tuple[Place, ...] = ()

    @property
    def ready(self) -> bool:
        asked = all(reading.ready for reading in (*self.sizes, *self.norms))
        return asked and (self.looked is None or self.looked.ready)


_NOTHING_LATE = _Late()


def _mode() -> GuardMode:
    said = os.environ.get(GUARD_VARIABLE)
    return next((mode for mode in get_args(GuardMode) if mode == said), "off")


class Guard:
    """Follows one thread through its steps."""

    def __init__(self) -> None:
        self.reports = Reports(_mode())
        self._inputs = Inputs()
        self._calls_seen = 0
        self._begun: Call | None = None  # a forward that is not yet among the calls of its step
        self._failed_from = 0  # the graph's first node of the newest forward that raised
        self._learning = False  # a forward is under way whose result may be learnt from
        self._passes = Passes()
        self._lines = LossLines()
        self._norms = TakenNorms()  # by the script itself, of the gradients there are
        self._late: weakref.WeakKeyDictionary[Any, _Late] = weakref.WeakKeyDictionary()
        self._own = OwnGradients(in_turns=() if self.reports.mode in ("full", "halt") else ("cuda",))
        self._named: weakref.WeakSet[Any] = weakref.WeakSet()
        self._probed: weakref.WeakKeyDictionary[Any, Probed] = weakref.WeakKeyDictionary()
        self._last_place: Place | None = None
        self._settled = False
        self._stop: Stop | None = None

    @property
    def _waits(self) -> bool:
        return self.reports.mode == "halt"

    # What the script does

    def forward_begins(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: Any = None
    ) -> Call | None:
        """What can wait until its kernels are queued is left to `_catch_up`."""
        self._stop = None  # somebody has caught it
        if self._settled:
            self._let_go()
        self._begun = call = self._inputs.begins(module, args, kwargs) if self.reports.on else None
        self._learning = call is not None
        if call is not None:
            call.wrapper = wrapper
        return call

    def forward_ended(self, call: Call | None, result: Any) -> None:
        self._learning = False
        self._catch_up()
        if call is not None:
            self._inputs.ended(call, result)

    def forward_failed(self) -> None:
        """Nothing comes of it; what it was given may be part of a graph, and is not to be kept alive."""
        if self._begun is not None:
            self._failed_from = self._begun.nodes.start
        self._begun = None
        self._learning = False

    def backward_begins(self, root: Any, loss: Reading | None, *, scaled: bool = False, skipping: bool = False) -> None:
        """`scaled`: the root is a loss times a GradScaler's factor, which may overflow in good health.

        `skipping`: that scaler has left the step before out.
        """
        self._catch_up()
        if not self.reports.on:
            return
        self._own.backward_begins(p for probed in self._probed.values() for p in probed.all)
        calls = self._inputs.calls[self._calls_seen :]
        self._calls_seen = len(self._inputs.calls)
        self._last_place = self._lines.place(Place.of(sys._getframe(1)), calls)
        self._look_behind_the_last_pass()
        if (last := self._passes.last) is not None and last.gradients_are_gone():
            self._passes.forget()  # the script threw their gradients away
            self._norms.forget()
        if self._last_place is not None:
            self._passes.places.append(self._last_place)
        if scaled:
            self._passes.scaled = self._scaled_pass(root, loss, calls) if loss is not None and skipping else None
        if loss is None or scaled:
            return
        # Where all forwards came before the first backward, any of them may be behind a later one.
        this = Pass(loss, calls or self._inputs.all_of_step(), self._last_place)
        self._passes.add(this)
        finite = loss.ready and math.isfinite(loss.value())
        if finite or not loss.ready:
            this.code = self._lines.code_to_hold(root, this.calls, this.place, finite=finite)
        else:
            # Looked at now: the graph still has its numbers, and the script may yet decide to leave this step out.
            this.hit = _bad_loss(root, loss.value(), this.calls, this.place)

    def exchange_in_pass(self, exchange: Exchange, *, in_backward: bool) -> torch.cuda.Stream | None:
        """A collective is about to be started in the middle of a pass: behind which stream it has to be queued."""
        if self.reports.on and in_backward:
            return self._own.exchange_in_backward(exchange, self._modules())
        if self.reports.on and self._learning:
            self._catch_up()
            self._own.exchange_in_forward(exchange)
        return None

    def exchange_after_backward(self) -> None:
        if self.reports.on and not self._settled:
            self._own.exchange_after_backward(self._trained)

    def backward_ended(self) -> None:
        if self.reports.on:
            self._own.backward_ended()
            if self._passes.last is not None:
                self._passes.last.ended = True

    def norm_taken(self, norm: Any) -> None:
        """Kept until the step is over: a script may compute another loss before it applies what it has clipped."""
        if self.reports.on:
            self._norms.take(norm)

    def optimizer_begins(self, optimizer: Any) -> None:
        """Raises NumericsError where the step must not be applied."""
        self.reports.refuse_if_halted()
        if not self.reports.on:
            return
        step = _step_now()
        self.reports.settings_of(optimizer)
        if self._spoilt_before(optimizer):
            return
        sizes = self._sizes(optimizer)
        parameters = given_to(optimizer)
        looked = self._own.at_the_optimizer(parameters)
        in_time = looked if looked is not None and (looked.ready or self._waits) else None
        ready = [size for size in sizes if size.ready or self._waits]
        known = [size.value() for size in ready]
        asked = self._norms.all()
        taken = [norm for norm in asked if norm.ready or self._waits]
        norms = [norm.value() for norm in taken]
        bad = self._passes.bad
        grad_norm = math.hypot(*known) if known else math.nan
        if bad is not None and gradients_finite(parameters):
            # They do not depend on what is bad in it: of a batch without a single label the loss is 0/0, the slope 0.
            self.reports.harmless(step, bad, optimizer)
            bad = None
        if bad is not None:
            self._found(step, self._among_peers(bad.hit_of_its_loss(), in_time, self._own.mixed_at), grad_norm)
        elif self._any_bad([*known, *norms], in_time):
            own = _own_share(in_time, parameters)
            # A norm overflows before its numbers do, and a script may mend its gradients: hence the second look. What a
            # rank brings to a reduce-scatter mostly comes to rest in shards of its peers.
            if (own.bad and self._own.sharded(parameters)) or not gradients_finite(parameters):
                hit = self._among_peers(self._gradient_hit(own), in_time, self._own.mixed_at)
                # What was probed, and what the script took the norm of, may be others than the bad ones.
                sizes_seen = (math.hypot(*norms), grad_norm)
                self._found(step, hit, next((size for size in sizes_seen if not math.isfinite(size)), math.nan))
        else:
            self._own.step_was_good(in_time)
        unanswered = [size for size in sizes if size not in ready]
        to_come = [norm for norm in asked if norm not in taken]
        not_yet = looked if in_time is None else None
        codes = self._passes.codes() if unanswered or to_come or not_yet is not None else []
        number = self.reports.step_over(self._passes.loss, grad_norm)
        self._late[optimizer] = _Late(step, unanswered, to_come, not_yet, codes, number, tuple(self._passes.places))
        self._settled = True

    def scaler_gave_up(self, *, skipped: int, scale: float, first_scale: float) -> None:
        """A GradScaler leaves out step after step: lowering its factor does not help."""
        if not self.reports.on:
            return
        seen = self._passes.scaled.hit if self._passes.scaled is not None else None
        hit = seen or Hit.in_backward(math.nan, self._inputs.calls, (), self._last_place)
        told = (
            f"observed: {skipped} steps in a row were left out; the loss scale fell from {first_scale:g} to {scale:g}"
        )
        self._found(_step_now(), replace(hit, scaler=told), math.nan)

    def step_done(self) -> None:
        """The step is kept until the next one begins: a second optimizer may still have to apply its share of it."""
        self._settled = True

    # How the script ends

    def script_stops(self, frames: Sequence[tuple[FrameType, int]], said: str, *, scaled: bool) -> None:
        """It ends itself in the middle of a step, often because it has seen the bad number. No peer is needed here.

        What needs no second run is written at once, for a rank may be ended with its peers; `look_back` adds the rest.
        `scaled`: by a GradScaler, whose gradients may be bad in good health.
        """
        if not self.reports.on or not devices_answer() or not all(this.loss.ready for this in self._passes):
            return
        for optimizer, late in list(self._late.items()):
            if late.ready and self._spoilt_before(optimizer):
                return
        stop = None if self._settled else self._bad_loss_at_the_end(frames)
        if stop is None and not self._settled and not scaled:
            stop = self._bad_gradients_at_the_end(said)
        if stop is None:
            return
        self._stop = stop
        if stop.known_at_once:
            BOX.event(stop.preliminary())

    @property
    def looks_back(self) -> bool:
        return self._stop is not None

    def look_back(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            hit = self._among_peers(stop.hit(), self._own.so_far, self._own.mixed_at)
            all_read = not self._own.left_out
            self.reports.tell(stop.step, hit, stop.grad_norm, all_read=all_read, stopped=True, spoils=stop.spoils)
            self.forget()

    def _bad_loss_at_the_end(self, frames: Sequence[tuple[FrameType, int]]) -> Stop | None:
        step = _step_now()
        bad = self._passes.bad
        if bad is not None:
            spoils = not (bad.ended and gradients_finite(self._trained()))
            loss, norm = float(bad.loss.value()), self._norm_so_far()
            return Stop(step, loss, "forward", bad.place, bad.hit_of_its_loss, norm, spoils=spoils)
        # Not one that is older than the newest forward: the script has gone on from that.
        newest = self._inputs.calls[-1].nodes.start if self._inputs.calls else 0
        seen = bad_loss(frames, max(newest, self._failed_from))
        if seen is None:
            return None
        root, where = seen
        since = self._inputs.calls[self._calls_seen :] or list(self._inputs.calls)
        number = float(root.detach())
        look = functools.partial(_bad_loss, root, number, since, where)
        return Stop(step, number, "forward", where, look, self._norm_so_far())

    def _bad_gradients_at_the_end(self, said: str) -> Stop | None:
        """Of a pass that is over: in its middle some gradients are this rank's, others their peers' too."""
        last = self._passes.last
        if last is None:
            return None
        if operation := anomaly_in(said):
            own = OwnShare(f"result of {operation}")
        else:
            parameters = self._trained()
            own = _own_share(self._own.so_far, parameters)
            in_shards = bool(own.bad) and self._own.sharded(parameters)
            if not last.ended or (not in_shards and gradients_finite(parameters)):
                return None
        step, loss, norm, place = _step_now(), self._passes.loss, self._norm_so_far(), self._last_place
        return Stop(step, loss, "backward", place, lambda: self._gradient_hit(own), norm, own_bad=own.bad)

    def _norm_so_far(self) -> float | None:
        """That the script itself has taken of this step's gradients."""
        taken = self._norms.here()
        return math.hypot(*taken) if taken else None

    def forget(self) -> None:
        self._own.forget()
        self._let_go()
        self._settled = False

    def _let_go(self) -> None:
        """The memory of the inputs is the script's again."""
        self._inputs.forget()
        self._passes.forget()
        self._norms.forget()
        self._calls_seen = 0

    def forget_whose(self) -> None:
        """Another thread takes over: what was known of the last one's models may be a third one's by now."""
        self.forget()
        self._begun = None
        self._named.clear()
        self._probed.clear()

    def _catch_up(self) -> None:
        """The step before is forgotten, and the forward that has begun is the first of a new one."""
        if self._settled:
            self.reports.flush()
            self.forget()
        if self._begun is not None:
            self._inputs.keep(self._begun)
            self._begun = None

    # What is known of the step

    def _spoilt_before(self, optimizer: Any) -> bool:
        """The step before has spoilt the weights, and with them this one's loss: told first."""
        late = self._late.pop(optimizer, _NOTHING_LATE)
        size = math.hypot(*(size.value() for size in late.sizes))
        probed_bad = not math.isfinite(size)
        if late.sizes and not probed_bad:
            self.reports.history.learn(late.number, size)
        norm_bad = not all(math.isfinite(norm.value()) for norm in late.norms)
        parameters = given_to(optimizer)
        own = _own_share(late.looked, parameters)
        # A script may mend what it was given, and a norm overflows first; whatever was applied, the weights show.
        spoilt = probed_bad or (bool(own.bad) and self._own.sharded(parameters))
        if not spoilt and (not (own.bad or norm_bad) or all(map(finite, parameters))):
            return False
        place = late.places[-1] if late.places else self._last_place
        hit = Hit.too_late(self.reports.history.before[-1].loss, late.codes, place, own)
        if hit.in_loss_code is None:
            hit = replace(hit, one_of=late.places)
        mixed_at = late.looked.mixed_at if late.looked is not None else 0
        self._found(late.step, self._among_peers(hit, late.looked, mixed_at), math.nan)
        return True

    @staticmethod
    def _any_bad(sizes: list[float], looked: Looked | None) -> bool:
        return not all(map(math.isfinite, sizes)) or (looked is not None and bool(looked.bad()))

    def _gradient_hit(self, own: OwnShare) -> Hit:
        self._look_behind_the_last_pass()
        return self._passes.gradient_hit(self._inputs.calls, own)

    def _among_peers(self, hit: Hit, looked: Looked | None, mixed_at: int) -> Hit:
        """With what is known of the exchanges of its step: enough to tell who was first."""
        brought = self._own.brought(looked)
        mixed = mixed_at > 0 and (brought is None or mixed_at < brought.number)
        return replace(hit, brought=brought, mixed=mixed)

    def _modules(self) -> list[Any]:
        """Those that this step has called; asked for the names of their parameters when they are first met."""
        calls = [call for call in self._inputs.calls if call.learns]
        modules = list(dict.fromkeys(call.module if call.wrapper is None else call.wrapper for call in calls))
        for module in modules:
            if module not in self._named:
                self._named.add(module)
                self._own.learn_names(module)
        return modules

    def _trained(self) -> list[Any]:
        called = [p for module in self._modules() for p in module.parameters()]
        known = called or [p for probed in self._probed.values() for p in probed.all]
        return list({id(p): p for p in known if p.requires_grad}.values())

    def _scaled_pass(self, root: Any, loss: Reading, calls: list[Call]) -> Pass:
        """A loss that is bad itself is not the scaler's doing: looked at while the graph still has its numbers. Nobody
        waits for it but a script whose scaler is skipping."""
        this = Pass(loss, calls, self._last_place)
        if not math.isfinite(loss.value()):
            this.hit = _bad_loss(root, loss.value(), calls, this.place)
        return this

    def _sizes(self, optimizer: Any) -> list[Reading]:
        """The size of one early gradient, or of all gradients if the guard halts."""
        probed = self._probed.get(optimizer)
        if probed is None:
            probed = self._probed[optimizer] = Probed.of(optimizer)
            # Once more, now that the passes are over: FSDP shows other parameters while a module computes.
            self._named.clear()
            self._modules()
        if self._waits:
            return all_sizes(given_to(optimizer))
        early = next((parameter for parameter in probed.early if parameter.grad is not None), None)
        size = size_of(early) if early is not None else None
        return [size] if size is not None else []

    def _look_behind_the_last_pass(self) -> None:
        self._passes.over([probed.early for probed in self._probed.values()], halt=self._waits)

    def _found(self, step: int, hit: Hit, grad_norm: float) -> None:
        """Raises NumericsError if the step is refused."""
        self.reports.tell(step, hit, grad_norm, all_read=not self._own.left_out)
        self.forget()
        self.reports.refuse_if_halted()


def _step_now() -> int:
    return BOX.recorder.steps if BOX.recorder is not None else 0


def _bad_loss(root: Any, loss: float, calls: list[Call], place: Place | None) -> Hit:
    """Before its backward, which lets the numbers of the graph go."""
    code = LossCode.whole(root.grad_fn, nodes_of(calls), place)
    learning = [call for call in calls if call.learns]
    return Hit.in_forward(loss, calls, code, place, look=lambda: first_made(root.grad_fn, learning))


def _own_share(looked: Looked | None, parameters: Iterable[Any]) -> OwnShare:
    """What a look before the exchange proves. A look after it, or at some of the gradients, leaves a question."""
    if looked is None or not (looked.before_exchange or is_alone()):
        return OwnShare()
    bad = looked.bad()
    trained = (local(p) for p in parameters if p.requires_grad)
    held = sum(weight.numel() for weight in trained if weight is not None)
    # Numbers alone do not tell: several passes add up, and a shard is less than the unit that was looked at.
    all_read = looked.in_full and looked.numbers >= held
    return OwnShare(bad, clean=not bad and looked.before_exchange and all_read)


__all__ = ["Guard"]
