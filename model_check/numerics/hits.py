"""What the guard has seen: a step with numbers that are not finite, and what a second run of it showed.

`reports` turns it into an event.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model_check.blackbox import native_collectives
from model_check.numerics.finite import finite
from model_check.numerics.graph_search import Sighting
from model_check.numerics.loss_code import LossCode, LossOperation, Place
from model_check.numerics.replaying import Call, Replay, run_again
from model_check.record.events.numerics import Brought, Direction, NonFinite

_MOST_REPLAYS = 8  # of the forwards of a step with many passes
_ANOMALY = re.compile(r"Function '(\w+)' returned nan values in its \d+th output")  # torch's own words
_A_MOMENT_S = 2.0
_PAUSE_S = 0.001


@dataclass(frozen=True)
class OwnShare:
    """What this rank's gradients were before any peer's came in, as far as they were looked at."""

    bad: str = ""  # the first that was not finite, such as "gradient of head.bias"
    clean: bool = False  # all were looked at, and all were finite


_UNKNOWN = OwnShare()


@dataclass(frozen=True)
class Hit:
    """A step with numbers that are not finite, as it is first seen."""

    loss: float
    direction: Direction
    calls: Sequence[Call]
    place: Place | None
    in_loss_code: LossOperation | None = None
    replay: Replay | None = None
    call: Call | None = None
    why_not: str = ""  # why no forward was run again
    late: bool = False
    scaler: str = ""  # what a GradScaler that gave up has to say
    real_outputs_finite: bool | None = None
    own: OwnShare = _UNKNOWN
    brought: Brought | None = None
    mixed: bool = False  # activations were exchanged before it was seen: it may be a peer's
    inside: Sighting | None = None  # what the graph shows, for a model that cannot be run again
    one_of: tuple[Place, ...] = ()  # several backwards went into the gradients, and which one was bad is not known

    @property
    def line(self) -> str | None:
        """Where the script calls backward."""
        return self.place.site if self.place is not None else None

    @property
    def made_again(self) -> bool:
        """This rank's own backward, without its peers, gives bad gradients again: it needs none of them for that."""
        return self.replay is not None and self.replay.gradients_finite is False

    @classmethod
    def in_forward(
        cls,
        loss: float,
        calls: Sequence[Call],
        code: LossCode,
        place: Place | None,
        look: Callable[[], Sighting | None] = lambda: None,
    ) -> Hit:
        """A non-finite loss. `look` reads the graph behind it, while the graph still holds its numbers."""
        call, replay, why_not = _again(calls, backward=False)
        known = [tensor for output in (call.outputs if call is not None else ()) if (tensor := output()) is not None]
        real = all(finite(tensor) for tensor in known) if known else None
        # Finite outputs, and a loss that is not: what lies between them did it.
        outside = code.first_bad() if real is not False else None
        sure = outside is not None and outside.made_it
        inside = _looked(look) if not sure and not _found_inside(replay) else None
        if replay is not None and replay.origin is not None and not _made_before(inside, call):
            inside = None  # the bad input came from the data
        if inside is not None and inside.call is not None and inside.call is not call:
            again = _again([inside.call], backward=False)
            if _found_inside(again[1]):
                (call, replay, why_not), inside = again, None
        unknown = real is None and (replay is None or not replay.outputs_finite)
        if not sure and (inside is not None or unknown):
            outside = None  # the number may come from the model
        return cls(
            float(loss),
            "forward",
            calls,
            place,
            in_loss_code=outside,
            replay=replay,
            call=call,
            why_not=why_not,
            real_outputs_finite=real,
            inside=inside,
        )

    @classmethod
    def in_backward(
        cls,
        loss: float,
        calls: Sequence[Call],
        codes: Sequence[LossCode],
        place: Place | None,
        own: OwnShare = _UNKNOWN,
    ) -> Hit:
        """A finite loss with gradients that are not."""
        call, replay, why_not = _again(calls, backward=True)
        touched = _pole_in(codes)
        return cls(float(loss), "backward", calls, place, touched, replay, call, why_not, own=own)

    @classmethod
    def received_gradients(cls, loss: float, place: Place | None) -> Hit:
        """This rank's own gradients were finite, and what came back from the exchange is not."""
        why_not = "the gradients of this rank were finite before they were exchanged"
        return cls(float(loss), "backward", (), place, why_not=why_not, own=OwnShare(clean=True))

    @classmethod
    def too_late(cls, loss: float, codes: Sequence[LossCode], place: Place | None, own: OwnShare = _UNKNOWN) -> Hit:
        """Known only after the step was applied: the weights it would be replayed with are gone."""
        why_not = "the gradients of this rank were finite before they were exchanged" if own.clean else ""
        return cls(float(loss), "backward", (), place, _pole_in(codes), late=True, why_not=why_not, own=own)


def _found_inside(replay: Replay | None) -> bool:
    """Whether the replay found an operation or parameter of this module; a bad input may come from another module."""
    origin = replay.origin if replay is not None else None
    return origin is not None and (origin.given is None or origin.given.kind != "input")


def _made_before(inside: Sighting | None, call: Call | None) -> bool:
    """Whether the number was made outside this call and then passed into it."""
    return inside is not None and inside.call is not call and inside.made is not None and inside.made.made_it


def _looked(look: Callable[[], Sighting | None]) -> Sighting | None:
    with native_collectives.by_itself():
        try:
            return look()
        except Exception:  # a graph with the script's own operations may raise: do without it
            return None


def _pole_in(codes: Sequence[LossCode]) -> LossOperation | None:
    return next((found for code in codes if (found := code.at_a_pole()) is not None), None)


def _again(calls: Sequence[Call], *, backward: bool) -> tuple[Call | None, Replay | None, str]:
    """Runs a forward once more, or says why not: the first whose result is bad, else the newest that has parameters."""
    bad = [call for call in calls if not backward and call.result_is_bad() and not call.why_not_again()]
    learning = [call for call in calls if call.learns]
    if not bad and not learning:
        return None, None, "no module's forward was seen in this step"
    call = bad[0] if bad else learning[-1]
    why_not = call.why_not_again(backward=backward)
    if why_not:
        return call, None, why_not
    with native_collectives.by_itself() as lone:
        try:
            replay = run_again(call, backward=backward)
            call.hold()
        except Exception as error:  # the script's own module: it may do anything when it is called once more
            why_not = f"its forward cannot be run once more ({type(error).__name__}: {str(error)[:120]})"
    if lone.stopped:
        return call, None, "it exchanges something with the other ranks: they would have to take part"
    return (call, None, why_not) if why_not else (call, replay, "")


def bad_once_more(calls: Sequence[Call]) -> Call | None:
    """The first of the newest forwards whose own backward, run once more, makes numbers that are not finite."""
    for call in [call for call in calls if call.learns][-_MOST_REPLAYS:]:
        replay = _again([call], backward=True)[1]
        if replay is not None and (replay.origin is not None or replay.gradients_finite is False):
            return call
    return None


class _Peers:
    met = False


def peers_met() -> None:
    """This rank exchanges something; where it has a process group to itself, with nobody."""
    _Peers.met = _Peers.met or not is_alone()


def is_alone() -> bool:
    """A group that the script has destroyed, on its way out perhaps, has left its marks: it is remembered."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() == 1
    return not _Peers.met


# How a script ends itself


@dataclass(frozen=True)
class Stop:
    """What is bad in the step in which the script ends itself."""

    step: int
    loss: float
    direction: Direction
    place: Place | None
    hit: Callable[[], Hit]  # looks into it: may run the step once more
    grad_norm: float | None  # None: there is none
    own_bad: str = ""  # which gradient was, before any exchange
    spoils: bool = True  # its gradients are bad, or not known

    @property
    def known_at_once(self) -> bool:
        """That it is this rank's doing needs no second run."""
        return self.direction == "forward" or bool(self.own_bad) or is_alone()

    def preliminary(self) -> NonFinite:
        """What is told until more is known."""
        why = "inferred: the operation is not known: the rank ended before the step could be run once more"
        return NonFinite(
            step=self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            action="stopped",
            direction=self.direction,
            cause="MC401" if self.direction == "forward" else "MC402",
            evidence=(why,),
            location=self.place.site if self.place is not None else None,
            spoils=self.spoils,
            preliminary=True,
        )


def anomaly_in(said: str) -> str:
    """The operation in whose backward torch's own search for anomalies has found NaN, if that ends the script."""
    found = _ANOMALY.search(said)
    return found[1] if found is not None else ""


def devices_answer() -> bool:
    """Within a moment. One that has failed, or waits for a peer that is gone, is asked nothing more."""
    if not torch.cuda.is_initialized():
        return True
    until = time.monotonic() + _A_MOMENT_S
    try:
        stream = torch.cuda.current_stream()
        while not stream.query():
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)
    except RuntimeError:  # what a kernel has done wrong shows in every later call
        return False
    return True
