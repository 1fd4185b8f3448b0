"""What a hit of the guard means: whether this rank is to blame, the cause, the line and the evidence.

The outcome is the body of a `nonfinite` event, in the same words that our own trainer uses for its steps; None where
the bad gradients came from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from model_check.blackbox import native_collectives
from model_check.blackbox.batch_samples import indices_of
from model_check.blackbox.device_numbers import tensors_in
from model_check.numerics.causes import TOO_FAST
from model_check.numerics.forward_inputs import Call
from model_check.numerics.graph_search import Sighting
from model_check.numerics.hit_causes import batch_size, judged, odd
from model_check.numerics.loss_code import LossCode
from model_check.numerics.loss_line import LossOperation, Place
from model_check.numerics.origins import Origin
from model_check.numerics.ranges import ModuleRange
from model_check.numerics.replaying import (
    Replay,
    finite,
    run_again,
    samples_alone,
    samples_with_bad_input,
)
from model_check.numerics.step_history import History

_MOST_REPLAYS = 8  # of the forwards of a step with many passes
_FIXES = {
    "MC401": ("look at the named line and the numbers that go into it", "lower the learning rate"),
    "MC403": ("use bfloat16: the same memory, the range of float32", "keep the named layer in float32"),
    "MC404": ("look at the named samples, or take them out", "check values where data is prepared"),
    "MC405": ("lower the learning rate", "warm it up over the first steps", "clip gradients"),
    "MC406": ("clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "lower the learning rate"),
    "MC407": ("initialise with a smaller scale: 1/sqrt(fan_in)",),
}
_UNDEFINED_AT_ZERO = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "div", "reciprocal"})
_AWAY_FROM_ZERO = (_FIXES["MC401"][0], "keep it away from 0: x.clamp(min=eps).log(), sqrt(x + eps), a / (b + eps)")
_BAD_FROM_THE_START = "look at how the named parameter is initialised, or at the file that it is loaded from"
_HOOKS = "look at the hooks on the named parameter, and at the backward of every autograd.Function"


@dataclass(frozen=True)
class OwnShare:
    """What this rank's gradients were before any peer's came in, as far as they were looked at."""

    bad: str = ""  # the first that was not finite, in words
    clean: bool = False  # all were looked at, and all were finite


_UNKNOWN = OwnShare()


@dataclass(frozen=True)
class Brought:
    """The first reduction of a step to which this rank brought a bad number."""

    number: int  # among all exchanges of the step's passes: in a job whose ranks do the same, the same on each
    ranks: tuple[int, ...]  # of its process group
    spreads: bool  # its result goes back into the pass, as that of activations does

    def record(self) -> dict[str, Any]:
        return {"number": self.number, "ranks": list(self.ranks), "spreads": self.spreads}


@dataclass(frozen=True)
class Hit:
    """A step with numbers that are not finite, as it is first seen."""

    loss: float
    direction: Literal["forward", "backward"]
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
    def received(self) -> dict[str, Any]:
        """What is known where nothing of this rank's own went wrong; should that be so on every rank, it is all."""
        place = _line(self.place)
        return {"loss": self.loss, "location": place, "why_not": self.why_not, "clean": self.own.clean}

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
    return origin is not None and not (origin.given or "").startswith("input")


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


def report_of(
    hit: Hit, history: History, *, rate: float, eps: float | None = None, all_read: bool = False
) -> dict[str, Any] | None:
    """The body of the event, with the dataset indices of the bad samples if a loader drew them."""
    body = _report(hit, history, rate, eps, all_read)
    if body is None or not body.get("sample_ids") or hit.call is None:
        return body
    given = list(tensors_in(hit.call.args, hit.call.kwargs))
    size = next((tensor.shape[0] for tensor in given if tensor.dim()), 0)
    indices = indices_of(hit.call.drawn, given, size)
    return {**body, "dataset_ids": [indices[number] for number in body["sample_ids"]]} if indices is not None else body


def _report(hit: Hit, history: History, rate: float, eps: float | None, all_read: bool) -> dict[str, Any] | None:
    """The body of the event, or None: nothing of this rank's own went wrong.

    `eps`: of the optimizer, if it has one. `all_read`: every gradient of every step is looked at.
    """
    if hit.own.clean:
        return None
    if hit.late and hit.in_loss_code is None:
        return _report_late(hit, history, rate)
    origin = hit.replay.origin if hit.replay is not None and hit.inside is None else None
    seen_in_loss_code = hit.in_loss_code is not None and hit.in_loss_code.made_it
    if hit.scaler and origin is None and not seen_in_loss_code:
        return {**_body(hit, "MC403", []), "location": _line(hit.place)}
    if hit.direction == "backward" and origin is None and hit.in_loss_code is None:
        guilty = is_alone() or bool(hit.own.bad) or _bad_once_more(hit)
        return _report_unexplained_gradient(hit) if guilty else None
    if origin is not None and not seen_in_loss_code:
        body = _report_origin(hit, origin, history, rate)
        if not (origin.given or "").startswith("parameter"):
            return body
        return _blaming_the_update(body, eps, all_read) if history.steps > 0 else {**body, "fix": [_BAD_FROM_THE_START]}
    if hit.inside is not None and not (hit.inside.was_given_it and _bad_inputs(hit)):
        body = _report_inside(hit, hit.inside, history, rate)
        return _blaming_the_update(body, eps, all_read) if hit.inside.given and history.steps > 0 else body
    if hit.in_loss_code is not None:
        return _report_loss_code(hit, hit.in_loss_code, history, rate)
    return _report_without_line(hit, history, rate)


def _bad_once_more(hit: Hit) -> bool:
    """This rank's own backward, without its peers, gives bad gradients again: it needs none of them for that."""
    return hit.replay is not None and hit.replay.gradients_finite is False


class _Peers:
    met = False


def peers_met() -> None:
    """This rank exchanges something; where it has a process group to itself, with nobody."""
    _Peers.met = _Peers.met or not is_alone()


def is_alone() -> bool:
    """A group that the script has destroyed, on its way out perhaps, has left its marks: it is remembered."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _world() == 1
    return not _Peers.met


def _world() -> int:
    return torch.distributed.get_world_size()


# The reports


def _report_origin(hit: Hit, origin: Origin, history: History, rate: float) -> dict[str, Any]:
    assert hit.call is not None and hit.replay is not None, "an origin comes from a replay"
    site = origin.site
    file, line, function = hit.call.line() or ("", 0, "")
    with native_collectives.by_itself():
        samples = samples_with_bad_input(hit.call) or samples_alone(hit.call)
    cause = judged(hit, origin, history, samples if odd(hit.call, samples) else None, rate)
    evidence = list(cause.evidence)
    if not hit.replay.computes_loss and origin.direction == "backward":
        evidence.append("inferred: it was replayed with ones in place of the gradient of the script's own loss")
    return {
        **_with_advice_on(site.op, _body(hit, cause.code, evidence)),
        "direction": origin.direction,
        "module": site.module or type(hit.call.unwrapped).__name__,
        "op": site.op or None,
        "location": site.location or f"{file}:{line}",
        "function": site.function or function,
        "tensor": origin.given or hit.own.bad.removeprefix("the ") or None,
        "ranges": [entry.record() for entry in _passed_before(origin, hit.replay)],
        "deterministic": True,
        "sample_ids": samples if len(samples) < batch_size(hit.call) else [],
    }


def _with_advice_on(op: str, body: dict[str, Any]) -> dict[str, Any]:
    """No learning rate keeps a logarithm from 0."""
    lies_in_the_operation = body["cause"] == "MC401" and op in _UNDEFINED_AT_ZERO
    return {**body, "fix": list(_AWAY_FROM_ZERO)} if lies_in_the_operation else body


def _passed_before(origin: Origin, replay: Replay) -> Sequence[ModuleRange]:
    """What was met at the very end has the whole pass before it; an input, a weight, the first module have nothing."""
    return origin.before or (replay.passed if origin.received else ())


def _blaming_the_update(body: dict[str, Any], eps: float | None, all_read: bool) -> dict[str, Any]:
    """A weight that was fine when the script began: the update before this step spoilt it, not this step's forward."""
    why = ["inferred: the update of the step before made it so, by a gradient that was not looked at or by itself"]
    fix = ["run again with --guard full: all gradients of every step are then looked at"]
    if all_read:
        why = ["inferred: all gradients of the step before were finite: its update made it so, or the script"]
        fix = ["look at what changes weights: the optimizer's settings, averaging, what is copied into them"]
    if eps == 0:
        why = ["observed: eps of the optimizer is 0: where a gradient has always been 0, its update is 0/0"]
        fix = ["give the optimizer an eps above 0, such as 1e-8"]
    # Under data parallelism all ranks hold the same weights: that it has them makes no rank guilty.
    return {**body, "evidence": [*body["evidence"], *why], "fix": fix, "local": is_alone()}


def _report_loss_code(hit: Hit, found: LossOperation, history: History, rate: float) -> dict[str, Any]:
    seen = "observed" if found.made_it else "inferred"
    note = f": it {found.note}" if found.note else ""
    evidence = [f"{seen}: {found.op.lower()} in the loss code, outside the model{note}"]
    if hit.real_outputs_finite:
        evidence.append("observed: what the model returned is finite")
    code = "MC401" if hit.direction == "forward" else "MC402"
    if found.empty:
        code = "MC408"
    elif found.samples:
        code = "MC404"
    elif hit.direction == "forward" and not found.made_it:
        cause = judged(hit, None, history, None, rate)
        code, evidence = cause.code, [*cause.evidence, *evidence]
    return {
        **_with_advice_on(found.op.lower() if found.made_it else "", _body(hit, code, evidence)),
        "module": None,
        "op": found.op.lower(),
        "location": f"{found.file}:{found.line}" if found.line else _line(hit.place),
        "function": found.function or None,
        "deterministic": found.made_it,
        "sample_ids": list(found.samples),
    }


def _report_inside(hit: Hit, found: Sighting, history: History, rate: float) -> dict[str, Any]:
    """For a number made in the model, or before it, according to the graph; the module was not run again."""
    call, made = found.call, found.made
    name = type(call.unwrapped).__name__.removeprefix("FSDP") if call is not None else None
    called = call.line() if call is not None else None
    cause = judged(replace(hit, call=call), None, history, None, rate)
    evidence = list(cause.evidence)
    code = "MC408" if made is not None and made.empty else "MC401" if made is None or made.note else cause.code
    if found.given:
        evidence.append(f"observed: {found.given} is not finite before the step begins")
    elif made is not None:
        note = f": it {made.note}" if made.note else ""
        where = f"in the forward of {name}" if call is not None else "in the script's own code, between two modules"
        evidence.append(f"{'observed' if made.made_it else 'inferred'}: {made.op.lower()} {where}{note}")
    if call is not None and call.changed_its_input:
        evidence.append("observed: that forward changes its own input in place")
    elif call is not None and hit.replay is not None and hit.replay.outputs_finite:
        evidence.append("observed: run once more, it is finite: the forward depends on more than what it is given")
    op = made.op.lower() if made is not None else ""
    line = f"{made.file}:{made.line}" if made is not None and made.line else ""
    at_call = f"{called[0]}:{called[1]}" if called is not None else _line(hit.place)
    return {
        **_with_advice_on(op, _body(hit, code, evidence)),
        "module": name,
        "op": op or None,
        "location": line or at_call,
        "function": made.function if line and made is not None else called[2] if called is not None else None,
        "tensor": found.given or None,
        "deterministic": made is not None and made.made_it,
        **({"fix": [_BAD_FROM_THE_START]} if found.given and not history.steps else {}),
    }


def _report_without_line(hit: Hit, history: History, rate: float) -> dict[str, Any]:
    """The loss is bad, and the replay cannot say where: it is finite, or there was none."""
    if hit.replay is not None and hit.real_outputs_finite is False:
        evidence = ["observed: the forward's output was not finite; run once more on the same rank, it is", *_device()]
        return {**_body(hit, "MC409", evidence), "deterministic": False, "location": _line(hit.place)}
    cause = judged(hit, None, history, None, rate)
    plain = [f"inferred: the operation is not known: {hit.why_not}"] if hit.why_not else []
    if hit.real_outputs_finite:
        plain.append("observed: what the model returned is finite: the loss code made it so")
    samples = _bad_inputs(hit)
    held = ["observed: the batch held NaN or infinity before its forward began"] if samples else []
    code = "MC404" if samples and cause.code == "MC401" else cause.code
    evidence = [*cause.evidence, *plain, *held]
    called = hit.call.line() if hit.call is not None else None
    where = f"{called[0]}:{called[1]}" if called is not None else _line(hit.place)
    where_called = {"location": where, "function": called[2] if called else None}
    return {**_body(hit, code, evidence), **where_called, "sample_ids": samples}


def _report_unexplained_gradient(hit: Hit) -> dict[str, Any]:
    where = {"location": _line(hit.place), "tensor": hit.own.bad.removeprefix("the ") or None}
    before_exchange = bool(hit.own.bad) and not is_alone()
    if _bad_once_more(hit):
        again = "observed: run once more, the backward gives it again"
        which = "inferred: made by a hook on a gradient or an autograd.Function's backward, no operation of torch's"
        return {**_body(hit, "MC402", [again, which]), **where, "deterministic": True, "fix": [_HOOKS]}
    if hit.replay is not None and hit.replay.computes_loss and before_exchange:
        evidence = ["observed: forward and backward, run once more on the same rank, are finite", *_device()]
        return {**_body(hit, "MC409", evidence), **where, "deterministic": False}
    others = "a hook on a gradient" if before_exchange else "what the script does to its gradients after backward"
    plain = hit.why_not or (
        f"forward and backward of the model are finite when run once more: the loss code made it, or {others}"
    )
    return {**_body(hit, "MC402", [f"inferred: the operation is not known: {plain}"]), **where}


def _report_late(hit: Hit, history: History, rate: float) -> dict[str, Any]:
    cause = judged(hit, None, history, None, rate)
    if cause.code in ("MC405", "MC406"):  # what the steps before tell: it needs no replay, and all ranks share it
        return {**_body(hit, cause.code, list(cause.evidence)), "location": _line(hit.place)}
    late = "inferred: the weights were overwritten before a check that makes nobody wait could know"
    again = "run again with --guard halt: the step is then replayed before it is applied"
    guilty = is_alone() or bool(hit.own.bad)
    where = {"location": _line(hit.place), "tensor": hit.own.bad.removeprefix("the ") or None}
    return {**_body(hit, "MC402", [late]), "fix": [again], **where, "local": guilty}


def _body(hit: Hit, cause: str, evidence: list[str]) -> dict[str, Any]:
    fixes = [*(["lower the learning rate"] if TOO_FAST in evidence else []), *_FIXES.get(cause, ())]
    if hit.own.bad:
        mixed = is_alone() or (hit.brought is not None and hit.brought.spreads)
        when = "" if mixed else ", before any exchange"
        evidence = [f"observed: {hit.own.bad} held a number that is not finite on this rank{when}", *evidence]
    if hit.scaler:
        evidence = [hit.scaler, *evidence]
    if len(hit.one_of) > 1:
        evidence = [*evidence, _one_of_several(hit)]
    if hit.brought is not None and hit.brought.spreads:
        number = hit.brought.number
        evidence = [*evidence, f"observed: exchange {number} of the step was the first that it brought a NaN to"]
    body = {"direction": hit.direction, "cause": cause, "evidence": evidence, **({"fix": fixes} if fixes else {})}
    brought = {"brought": hit.brought.record()} if hit.brought is not None else {}
    return {**body, **brought, **({"mixed": True} if hit.mixed else {})}


def _one_of_several(hit: Hit) -> str:
    lines = list(dict.fromkeys(_line(place) or "" for place in hit.one_of))
    shown = ", ".join(lines[:4]) + (", …" if len(lines) > 4 else "")
    found = hit.replay is not None and hit.replay.origin is not None
    last = "the loss is that of the last" if found else "line and loss are those of the last"
    return f"inferred: which of the {len(hit.one_of)} backward calls of the step ({shown}) made it is not known: {last}"


def _device() -> list[str]:
    """Which piece of hardware to suspect; its own number outlives a renumbering."""
    if not torch.cuda.is_initialized():
        return []
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [f"observed: this rank runs on a {gpu.name} ({getattr(gpu, 'uuid', 'no uuid')})"]


def _line(place: Place | None) -> str | None:
    return f"{place.file}:{place.line}" if place is not None else None


def _bad_inputs(hit: Hit) -> list[int]:
    if hit.call is None or hit.call.changed_its_input or hit.why_not == "what its forward was given is no longer there":
        return []
    return samples_with_bad_input(hit.call)
