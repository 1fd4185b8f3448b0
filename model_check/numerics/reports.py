"""What a hit of the guard means: whether this rank is to blame, the cause, the line and the evidence.

The outcome is an event, in the same words that our own trainer uses for its steps. `Reports` writes it, once for the
job, and refuses the step if the guard halts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from model_check.blackbox import native_collectives
from model_check.blackbox.batch_samples import indices_of
from model_check.blackbox.box import BOX, GuardMode
from model_check.blackbox.device_numbers import tensors_in
from model_check.errors import NumericsError
from model_check.numerics.backward_passes import Pass
from model_check.numerics.causes import History, batch_size, judged, odd
from model_check.numerics.graph_search import Sighting
from model_check.numerics.hits import Hit, is_alone
from model_check.numerics.loss_code import LossOperation
from model_check.numerics.origins import Origin
from model_check.numerics.probes import Probed, all_sizes, learning_rate
from model_check.numerics.replaying import samples_alone, samples_with_bad_input
from model_check.record.events.numerics import Action, MadeIn, NonFinite, NonFiniteReceived

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
_GIVEN: dict[str, MadeIn] = {"parameter": "weight", "buffer": "weight", "input": "batch"}


class Reports:
    """The reports of one thread. One is enough: once weights are not finite, every later step would repeat it."""

    def __init__(self, mode: GuardMode) -> None:
        self.mode = mode
        self.history = History()
        self.told = False
        self._rate = math.nan
        self._eps: float | None = None
        self._refused: tuple[str, str | None] | None = None  # the message, and the code of the cause if it is known
        self._told_harmless = False
        self._held_back: NonFinite | None = None

    @property
    def on(self) -> bool:
        return self.mode != "off" and not self.told and BOX.recorder is not None

    def settings_of(self, optimizer: Any) -> None:
        self._rate = learning_rate(optimizer)
        self._eps = optimizer.param_groups[0].get("eps")

    def step_over(self, loss: float, grad_norm: float) -> int:
        """The number of the step in the history."""
        return self.history.step(loss, grad_norm, self._rate)

    def refuse_if_halted(self) -> None:
        """Once a step has been refused, so is every later one: the run is over."""
        if self._refused is not None:
            said, code = self._refused
            raise NumericsError(said, remedy="the run was started with --guard halt", code=code)

    def harmless(self, step: int, bad: Pass, optimizer: Any) -> None:
        """Prepares one report of a loss that is not finite although its gradients are; the script's log shows the rest.

        `flush` writes it when the step is over: until then the gradients of a second optimizer may turn out bad.
        """
        if self._told_harmless:
            return
        self._told_harmless = True
        report = report_of(bad.hit_of_its_loss(), self.history, rate=self._rate)
        if report is not None:
            harmless = "observed: every gradient is still finite, so the step spoils no weight"
            grad_norm = math.hypot(*(size.value() for size in all_sizes(Probed.of(optimizer).all)))
            self._held_back = replace(
                report,
                step=step,
                grad_norm=grad_norm,
                action="observe",
                spoils=False,
                evidence=(*report.evidence, harmless),
            )

    def flush(self) -> None:
        """Writes what was held back until the step was over."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            BOX.event(held_back)

    def tell(
        self,
        step: int,
        hit: Hit,
        grad_norm: float | None,
        *,
        all_read: bool,
        stopped: bool = False,
        spoils: bool = True,
    ) -> None:
        """`all_read`: no gradient was left out."""
        self.told = True
        self._held_back = None
        action: Action = "stopped" if stopped else "halt" if self.mode == "halt" else "observe"
        report = report_of(hit, self.history, rate=self._rate, eps=self._eps, all_read=all_read)
        if report is not None:
            BOX.event(replace(report, step=step, grad_norm=grad_norm, action=action, spoils=spoils))
        else:  # this rank is not to blame; should that be so on every rank, this is all that is known
            BOX.event(
                NonFiniteReceived(
                    step=step,
                    loss=hit.loss,
                    action=action,
                    location=hit.line,
                    why_not=hit.why_not,
                    clean=hit.own.clean,
                )
            )
        if action == "halt":
            self._refused = _refusal(step, report)


def _refusal(step: int, report: NonFinite | None) -> tuple[str, str | None]:
    who = f"rank {BOX.recorder.rank}: " if BOX.recorder is not None else ""
    cause = "a peer's gradients" if report is None else "this rank's own pass"
    said = f"{who}step {step} is not applied: {cause} made its gradients non-finite"
    if report is None:
        return said, None
    if report.location:  # such as `div at train.py:17 in forward`
        said += f": {f'{report.op} at ' if report.op else 'look at '}{report.location}"
        said += f" in {report.function}" if report.function else ""
    return said, report.cause


def report_of(
    hit: Hit, history: History, *, rate: float, eps: float | None = None, all_read: bool = False
) -> NonFinite | None:
    """The event, with the dataset indices of the bad samples if a loader drew them. None: not this rank's doing.

    `eps`: of the optimizer, if it has one. `all_read`: every gradient of every step is looked at.
    """
    report = _report(hit, history, rate, eps, all_read)
    if report is None or not report.sample_ids or hit.call is None:
        return report
    given = list(tensors_in(hit.call.args, hit.call.kwargs))
    size = next((tensor.shape[0] for tensor in given if tensor.dim()), 0)
    indices = indices_of(hit.call.drawn, given, size)
    return replace(report, dataset_ids=tuple(indices[number] for number in report.sample_ids)) if indices else report


def _report(hit: Hit, history: History, rate: float, eps: float | None, all_read: bool) -> NonFinite | None:
    if hit.own.clean:
        return None
    if hit.late and hit.in_loss_code is None:
        return _report_late(hit, history, rate)
    origin = hit.replay.origin if hit.replay is not None and hit.inside is None else None
    seen_in_loss_code = hit.in_loss_code is not None and hit.in_loss_code.made_it
    if hit.scaler and origin is None and not seen_in_loss_code:
        return replace(_told(hit, "MC403", []), location=hit.line)
    if hit.direction == "backward" and origin is None and hit.in_loss_code is None:
        guilty = is_alone() or bool(hit.own.bad) or hit.made_again
        return _report_unexplained_gradient(hit) if guilty else None
    if origin is not None and not seen_in_loss_code:
        report = _report_origin(hit, origin, history, rate)
        weight = origin.given is not None and origin.given.kind == "parameter"
    elif hit.inside is not None and not (hit.inside.was_given_it and _bad_inputs(hit)):
        report = _report_inside(hit, hit.inside, history, rate)
        weight = bool(hit.inside.given)
    elif hit.in_loss_code is not None:
        return _report_loss_code(hit, hit.in_loss_code, history, rate)
    else:
        return _report_without_line(hit, history, rate)
    if not weight:
        return report
    return _blaming_the_update(report, eps, all_read) if history.steps else replace(report, fix=(_BAD_FROM_THE_START,))


def _report_origin(hit: Hit, origin: Origin, history: History, rate: float) -> NonFinite:
    assert hit.call is not None and hit.replay is not None, "an origin comes from a replay"
    site, called = origin.site, hit.call.line()
    with native_collectives.by_itself():
        samples = samples_with_bad_input(hit.call) or samples_alone(hit.call)
    cause = judged(hit, origin, history, samples if odd(hit.call, samples) else None, rate)
    evidence = list(cause.evidence)
    if not hit.replay.computes_loss and origin.direction == "backward":
        evidence.append("inferred: it was replayed with ones in place of the gradient of the script's own loss")
    return replace(
        _told(hit, cause.code, evidence, op=site.op, facts=cause.facts),
        made_in=_GIVEN[origin.given.kind] if origin.given is not None else "model",
        direction=origin.direction,
        module=site.module or type(hit.call.unwrapped).__name__,
        location=site.location or (called.site if called is not None else None),
        function=site.function or (called.function if called is not None else None),
        tensor=str(origin.given) if origin.given is not None else hit.own.bad or None,
        ranges=origin.before,
        deterministic=True,
        sample_ids=tuple(samples) if len(samples) < batch_size(hit.call) else (),
    )


def _blaming_the_update(report: NonFinite, eps: float | None, all_read: bool) -> NonFinite:
    """A weight that was fine when the script began: the update before this step spoilt it, not this step's forward."""
    why = "inferred: the update of the step before made it so, by a gradient that was not looked at or by itself"
    fix = "run again with --guard full: all gradients of every step are then looked at"
    if all_read:
        why = "inferred: all gradients of the step before were finite: its update made it so, or the script"
        fix = "look at what changes weights: the optimizer's settings, averaging, what is copied into them"
    if eps == 0:
        why = "observed: eps of the optimizer is 0: where a gradient has always been 0, its update is 0/0"
        fix = "give the optimizer an eps above 0, such as 1e-8"
    # Under data parallelism all ranks hold the same weights: that it has them makes no rank guilty.
    return replace(report, evidence=(*report.evidence, why), fix=(fix,), local=is_alone())


def _report_loss_code(hit: Hit, found: LossOperation, history: History, rate: float) -> NonFinite:
    seen = "observed" if found.made_it else "inferred"
    evidence = [f"{seen}: {found.name} in the loss code, outside the model{found.note}"]
    if hit.real_outputs_finite:
        evidence.append("observed: what the model returned is finite")
    code, facts = "MC401" if hit.direction == "forward" else "MC402", _problem(found)
    if found.empty:
        code = "MC408"
    elif found.samples:
        code = "MC404"
    elif hit.direction == "forward" and not found.made_it:
        cause = judged(hit, None, history, None, rate)
        code, evidence, facts = cause.code, [*cause.evidence, *evidence], {**cause.facts, **facts}
    return replace(
        _told(hit, code, evidence, op=found.name, facts=facts, sure=found.made_it),
        made_in="loss_code",
        location=found.site or hit.line,
        function=found.function or None,
        deterministic=found.made_it,
        sample_ids=found.samples,
    )


def _problem(found: LossOperation | None) -> dict[str, Any]:
    return {"problem": found.problem.kind} if found is not None and found.problem is not None else {}


def _report_inside(hit: Hit, found: Sighting, history: History, rate: float) -> NonFinite:
    """For a number made in the model, or before it, according to the graph; the module was not run again."""
    call, made = found.call, found.made
    name = type(call.unwrapped).__name__.removeprefix("FSDP") if call is not None else None
    called = call.line() if call is not None else None
    cause = judged(replace(hit, call=call), None, history, None, rate)
    evidence, facts = list(cause.evidence), {**cause.facts, **_problem(made)}
    code = "MC408" if made is not None and made.empty else "MC401" if made is None or made.problem else cause.code
    if found.given:
        evidence.append(f"observed: parameter {found.given} is not finite before the step begins")
    elif made is not None:
        where = f"in the forward of {name}" if call is not None else "in the script's own code, between two modules"
        evidence.append(f"{'observed' if made.made_it else 'inferred'}: {made.name} {where}{made.note}")
    if call is not None and call.changed_its_input:
        facts["changes_its_input"] = True
        evidence.append("observed: that forward changes its own input in place")
    elif call is not None and hit.replay is not None and hit.replay.outputs_finite:
        facts["finite_again"] = True
        evidence.append("observed: run once more, it is finite: the forward depends on more than what it is given")
    at_call = called.site if called is not None else hit.line
    return replace(
        _told(hit, code, evidence, op=made.name if made is not None else "", facts=facts),
        made_in="weight" if found.given else "model" if call is not None else "script",
        module=name,
        location=made.site or at_call if made is not None else at_call,
        function=made.function if made is not None and made.line else called.function if called is not None else None,
        tensor=f"parameter {found.given}" if found.given else None,
        deterministic=made is not None and made.made_it,
    )


def _report_without_line(hit: Hit, history: History, rate: float) -> NonFinite:
    """The loss is bad, and the replay cannot say where: it is finite, or there was none."""
    if hit.replay is not None and hit.real_outputs_finite is False:
        evidence = ["observed: the forward's output was not finite; run once more on the same rank, it is", *_device()]
        transient = _told(hit, "MC409", evidence, facts={"finite_again": True})
        return replace(transient, made_in="model", deterministic=False, location=hit.line)
    cause = judged(hit, None, history, None, rate)
    evidence = list(cause.evidence)
    if hit.why_not:
        evidence.append(f"inferred: the operation is not known: {hit.why_not}")
    if hit.real_outputs_finite:
        evidence.append("observed: what the model returned is finite: the loss code made it so")
    samples = _bad_inputs(hit)
    if samples:
        evidence.append("observed: the batch held NaN or infinity before its forward began")
    called = hit.call.line() if hit.call is not None else None
    return replace(
        _told(hit, "MC404" if samples and cause.code == "MC401" else cause.code, evidence, facts=cause.facts),
        made_in="batch" if samples else "loss_code" if hit.real_outputs_finite else "unknown",
        location=called.site if called is not None else hit.line,
        function=called.function if called is not None else None,
        sample_ids=tuple(samples),
    )


def _report_unexplained_gradient(hit: Hit) -> NonFinite:
    before_exchange = bool(hit.own.bad) and not is_alone()
    if hit.made_again:
        again = "observed: run once more, the backward gives it again"
        which = "inferred: made by a hook on a gradient or an autograd.Function's backward, no operation of torch's"
        report = replace(_told(hit, "MC402", [again, which]), made_in="gradients", deterministic=True, fix=(_HOOKS,))
    elif hit.replay is not None and hit.replay.computes_loss and before_exchange:
        evidence = ["observed: forward and backward, run once more on the same rank, are finite", *_device()]
        report = replace(_told(hit, "MC409", evidence, facts={"finite_again": True}), deterministic=False)
    else:
        others = "a hook on a gradient" if before_exchange else "what the script does to its gradients after backward"
        finite = f"forward and backward of the model are finite when run once more: the loss code made it, or {others}"
        report = _told(hit, "MC402", [f"inferred: the operation is not known: {hit.why_not or finite}"])
    return replace(report, location=hit.line, tensor=hit.own.bad or None)


def _report_late(hit: Hit, history: History, rate: float) -> NonFinite:
    cause = judged(hit, None, history, None, rate)
    if cause.code in ("MC405", "MC406"):  # what the steps before tell: it needs no replay, and all ranks share it
        return replace(_told(hit, cause.code, list(cause.evidence), facts=cause.facts), location=hit.line)
    return replace(
        _told(
            hit, "MC402", ["inferred: the weights were overwritten before a check that makes nobody wait could know"]
        ),
        fix=("run again with --guard halt: the step is then replayed before it is applied",),
        location=hit.line,
        tensor=hit.own.bad or None,
        local=is_alone() or bool(hit.own.bad),
    )


def _told(
    hit: Hit,
    cause: str,
    evidence: list[str],
    *,
    op: str = "",
    facts: Mapping[str, Any] | None = None,
    sure: bool = True,
) -> NonFinite:
    """What every report says. `sure`: this operation made the number, so that the advice may be about it."""
    facts = facts or {}
    if hit.own.bad:
        mixed = is_alone() or (hit.brought is not None and hit.brought.spreads)
        when = "" if mixed else ", before any exchange"
        evidence = [f"observed: the {hit.own.bad} held a number that is not finite on this rank{when}", *evidence]
    if hit.scaler:
        evidence = [hit.scaler, *evidence]
    if len(hit.one_of) > 1:
        evidence = [*evidence, _one_of_several(hit)]
    if hit.brought is not None and hit.brought.spreads:
        number = hit.brought.number
        evidence = [*evidence, f"observed: exchange {number} of the step was the first that it brought a NaN to"]
    fix = (*(["lower the learning rate"] if facts.get("too_fast") else []), *_FIXES.get(cause, ()))
    if cause == "MC401" and sure and op in _UNDEFINED_AT_ZERO:
        fix = _AWAY_FROM_ZERO  # no learning rate keeps a logarithm from 0
    return NonFinite(
        loss=hit.loss,
        direction=hit.direction,
        cause=cause,
        op=op or None,
        evidence=tuple(evidence),
        facts=facts,
        fix=fix,
        brought=hit.brought,
        mixed=hit.mixed,
    )


def _one_of_several(hit: Hit) -> str:
    lines = list(dict.fromkeys(place.site for place in hit.one_of))
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


def _bad_inputs(hit: Hit) -> list[int]:
    return samples_with_bad_input(hit.call) if hit.call is not None else []
