"""The numerics guard: what happens when a step is not finite.

The check itself rides in every step (see step.py); all ranks learn of a bad step from the same reduced numbers, so all
of them come here together. They replay the step, agree on whose it was, and each guilty rank writes an event, a dump
and, if it is the lowest, the banner. Then the run stops, goes on without the step, or goes back to a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model_check.blackbox.box import BOX
from model_check.blackbox.spans import span
from model_check.config import Config
from model_check.engine.batches import named_tensors, sample_count
from model_check.engine.explanation import Agreed, Explanation, Row
from model_check.engine.inputs import StepInputs
from model_check.engine.loop import StepInfo
from model_check.engine.place import Place
from model_check.engine.replaying import Replayed, Replayer, bad_tensors
from model_check.engine.step import TrainStep
from model_check.errors import NumericsError
from model_check.numerics.banner import banner_lines
from model_check.numerics.causes import Situation, StepNumbers, judge_cause
from model_check.numerics.dump import Dumped, write_dump
from model_check.numerics.finite import local_part
from model_check.record.events.numerics import Action

IGNORED_LABEL = -100
# In a row: a newer checkpoint is progress, and a long run may meet a bad batch now and then.
MOST_ROLLBACKS = 3
# Skipping may go on for ever; explaining every skip would cost more than the training.
MOST_EXPLAINED = 3
# Left out one after the other: whatever is bad in all of them is not in the data.
MOST_IN_A_ROW = 20
# Trying samples one by one costs a forward pass each.
MOST_SAMPLES = 64
_STEPS_REMEMBERED = 20
_OVERFLOWING = 1e15  # its square, summed over a model, leaves float32


class Guard:
    """Remembers the last steps, and explains a bad one.

    say     writes one line into this rank's log
    show    writes a block of text into it, as it is
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        train_step: TrainStep,
        bare_model: nn.Module,
        *,
        say: Callable[[str], None] = lambda line: None,
        show: Callable[[str], None] = lambda block: None,
        dumps_dir: Path | None = None,
    ) -> None:
        self._config = config
        self._place = place
        self._train_step = train_step
        self._model = bare_model
        self._say = say
        self._show = show
        self._dumps_dir = dumps_dir
        self._before: deque[StepNumbers] = deque(maxlen=_STEPS_REMEMBERED)
        self._steps_done = 0
        self._last_good_scale: float | None = None
        self._explained = self._rollbacks = self._in_a_row = 0
        self._back_to = -1  # the step of the newest checkpoint that the run went back to
        self._weight_size = _weight_size(bare_model)
        self.dumped = False  # the tensors of the last bad step are on disk
        train_step.holds_after_hit = place.device.type == "cuda"

    @property
    def _wanted(self) -> Action:
        wanted = self._config.debug.on_nan
        if wanted != "auto":
            return wanted
        return "halt" if self._config.debug.nan else "skip"

    def note(self, info: StepInfo) -> None:
        """A step that is over."""
        self._steps_done += 1
        if not info.skipped:
            self._in_a_row = 0
            self._last_good_scale = info.scale
            self._before.append(StepNumbers(info.loss, info.grad_norm, info.lr))

    @property
    def wants_back(self) -> bool:
        """After a bad step the run is to go back, if there is a checkpoint."""
        return self._wanted == "rollback"

    def handle(self, info: StepInfo, inputs: StepInputs, *, checkpoint: int | None) -> bool:
        """Explains a bad step, with all ranks. Raises where the run must stop, says whether it must go back.

        checkpoint: the step of the one to go back to, where there is one
        """
        action, why = self._wanted, ""
        self._explained += 1
        self._in_a_row += 1
        if action == "skip" and self._in_a_row >= MOST_IN_A_ROW:
            # A weight that is bad already, for one: nothing is learnt any more, and the next one is no better.
            action, why = "halt", f"{self._in_a_row} steps in a row are not finite, so it stops (debug.on_nan)"
        elif action == "skip" and self._explained > MOST_EXPLAINED:
            self._train_step.release()  # enough were explained
            return False
        if action == "rollback" and (reason := self._why_not_back(checkpoint)):
            action, why = "halt", f"{reason}, so it stops instead of going back (debug.on_nan)"
        self._rollbacks += action == "rollback"
        with span("eval", "replay of a step that is not finite"):
            explanation = self._explain(info, inputs)
            dump = self._report(explanation, action, why)
        self._train_step.optimizer.zero_grad(set_to_none=True)
        self._train_step.release()
        self.dumped = dump is not None and bool(dump.files)
        if action == "halt":
            raise explanation.error()
        return action == "rollback"

    def _why_not_back(self, checkpoint: int | None) -> str:
        """Empty where the run may go back to this one."""
        if checkpoint is None:
            return "there is no checkpoint"
        if checkpoint > self._back_to:
            self._back_to, self._rollbacks = checkpoint, 0
        if self._rollbacks < MOST_ROLLBACKS:
            return ""
        return f"the run went back {self._rollbacks} times and got no further than the checkpoint of step {checkpoint}"

    # Finding out

    def _explain(self, info: StepInfo, inputs: StepInputs) -> Explanation:
        # Before anything is gathered: afterwards a sharded model may show its parameters whole, in half precision.
        widest_gain, largest_weight = _widest_gain(self._model), _largest_weight(self._model)
        replayer = Replayer(self._train_step, self._model, _shown)
        replayed = self._replay(replayer, info, inputs)
        agreed = self._agree(info, replayed, together=replayer.together)
        rows = self._bad_rows(replayer, inputs) if agreed.forward else None
        situation = Situation(
            origin=replayed.origin,
            steps_done=self._steps_done,
            rate=info.lr,
            before=tuple(self._before),
            weight_size=self._weight_size,
            widest_gain=widest_gain,
            bad_samples=range(len(rows)) if rows is not None else None,
            batch_samples=sum(sample_count(batch) for batch in inputs.micro_batches),
            ignored_labels=any(_all_ignored(batch) for batch in inputs.micro_batches),
            scale=info.scale if self._train_step.loss_scale.enabled else None,
            last_good_scale=self._last_good_scale,
            reproduced=agreed.reproduced,
            largest_weight=largest_weight,
        )
        cause = judge_cause(situation)
        found = Explanation(self._place.rank, info, inputs, replayed, agreed, cause, rows)
        verdicts = self._gather((cause.code, found.where))
        return replace(found, agreed=replace(agreed, verdict=verdicts[agreed.reporter]))

    def _replay(self, replayer: Replayer, info: StepInfo, inputs: StepInputs) -> Replayed:
        """A replay that fails, for want of memory perhaps, must not hide that the step was bad."""
        try:
            return replayer.replay(inputs, info.scale)
        except (RuntimeError, TypeError, ValueError) as failure:
            if replayer.together:
                # The others may be waiting in a collective: nothing can be agreed on any more.
                raise NumericsError(
                    f"step {info.step} has a loss of {info.loss} and a gradient norm of {info.grad_norm}, and its "
                    f"replay failed: {failure}",
                    remedy="model-check explain MC401 says what to do",
                    code="MC401",
                ) from failure
            return Replayed.failed(failure, info)

    def _agree(self, info: StepInfo, replayed: Replayed, *, together: bool) -> Agreed:
        origin = replayed.origin
        forward = origin is not None and origin.direction == "forward"
        received = together and origin is not None and origin.received
        seen = self._gather((replayed.own_fault, replayed.largest_gradient, info.own_fault, forward, received))
        guilty = [rank for rank, (fault, *_) in enumerate(seen) if fault]
        if info.scale > 1.0 and any(each[3] for each in seen):
            # Beside a loss that is bad, a scaled gradient that overflows is a matter of the scale, and no fault.
            guilty = [rank for rank, each in enumerate(seen) if each[3]]
        # A stage of a pipeline, or a rank that has its part of every layer, is handed what another one made.
        guilty = [rank for rank in guilty if not seen[rank][4]] or guilty
        if not guilty:
            # All gradients are finite, and their norm is not: its square left the range.
            guilty = [rank for rank, (_, largest, *_) in enumerate(seen) if largest > _OVERFLOWING]
        if guilty:
            return Agreed(tuple(guilty), reproduced=True, forward=any(each[3] for each in seen))
        return Agreed(tuple(rank for rank, each in enumerate(seen) if each[2]), reproduced=False)

    def _bad_rows(self, replayer: Replayer, inputs: StepInputs) -> tuple[Row, ...] | None:
        """Samples tried one by one; None where that would take too long, or ranks would not stay together."""
        everybody = self._gather(tuple(sample_count(batch) for batch in inputs.micro_batches))
        if not 1 < max(sum(counts) for counts in everybody) <= MOST_SAMPLES:
            return None
        if replayer.together and len(set(everybody)) > 1:
            return None
        try:
            return tuple(replayer.bad_rows(inputs))
        except (RuntimeError, ValueError, IndexError):
            if replayer.together:
                raise
            return None  # a model that cannot take a batch of one

    def _gather(self, value: Any) -> list[Any]:
        if self._place.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(values, value)
        return values

    # Telling

    def _report(self, found: Explanation, action: Action, why: str) -> Dumped | None:
        """Only ranks that made a bad number report; the lowest also prints. `why`: not the action asked for."""
        is_reporter = self._place.rank == found.agreed.reporter
        if not found.is_own and not is_reporter:
            return None
        dump = self._dump(found, "" if is_reporter else f"_rank_{self._place.rank}")
        evidence = found.evidence(dump)
        if not found.agreed.reproduced and found.is_own:
            evidence.append(f"observed: rank {self._place.rank} runs on {_device_text(self._place)}")
        BOX.event(
            replace(
                found.facts(),
                local=found.is_own,
                device=self._place.label,
                evidence=tuple(evidence),
                fix=tuple(found.fix()),
                left_out=dump.left_out if dump is not None else (),
                dump=str(dump.safetensors) if dump is not None and dump.safetensors is not None else None,
                action=action,
                not_as_asked=why or None,
            )
        )
        if is_reporter:
            lines = banner_lines(
                self._place.label,
                found.info.step,
                found.info.loss,
                found.info.grad_norm,
                found.replayed.gradients,
                list(bad_tensors(self._model.named_parameters())),
                checkpoint=str(dump.checkpoint) if dump is not None and dump.checkpoint is not None else None,
                tensors=str(dump.pickle) if dump is not None and dump.pickle is not None else None,
            )
            facts = [*evidence, *([f"observed: {why}"] if why else [])]
            cause = [f"Cause: [{found.cause.code}] {found.where}", *(f"  {fact}" for fact in facts)]
            self._show("\n".join([*lines, *cause]))
        return dump

    def _dump(self, found: Explanation, suffix: str) -> Dumped | None:
        """A dump that cannot be written must not hide what was found."""
        try:
            dump = write_dump(
                Path(self._config.checkpoint.dir),
                found.info.step,
                self._model.named_parameters(),
                found.facts().body(),
                limit_bytes=int(self._config.debug.dump_gb * 1e9),
                rank_suffix=suffix,
            )
            self._link(dump)
        except OSError as failure:
            self._say(f"the tensors of step {found.info.step} could not be written: {failure}")
            return None
        return dump

    def _link(self, dump: Dumped) -> None:
        """The run directory lists them; they lie with the checkpoints, where the earlier guides look for them."""
        if self._dumps_dir is None or not dump.files:
            return
        self._dumps_dir.mkdir(parents=True, exist_ok=True)
        for path in dump.files:
            link = self._dumps_dir / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())


def _shown(file: str) -> str:
    return BOX.code.shown(file) or file


def _device_text(place: Place) -> str:
    """Which piece of hardware to suspect; its serial identity outlives a renumbering."""
    if place.device.type != "cuda":
        return place.label
    properties = torch.cuda.get_device_properties(place.device)
    return f"{place.label} ({properties.name}, {getattr(properties, 'uuid', 'no uuid')})"


def _all_ignored(batch: Any) -> bool:
    """Some tensor of labels holds nothing but ignored ones, in all samples or in one."""
    for _, tensor in named_tensors(batch):
        if tensor.dtype == torch.int64 and tensor.ndim and tensor.numel():
            ignored = tensor == IGNORED_LABEL
            if bool(ignored.all()) or (ignored.ndim > 1 and bool(ignored.flatten(1).all(1).any())):
                return True
    return False


def _weight_size(model: nn.Module) -> float | None:
    """Root mean square of this rank's matrices at the start: what an update is compared with."""
    matrices = [local_part(p).detach() for p in model.parameters() if p.ndim >= 2]
    matrices = [m for m in matrices if m.numel() and m.device.type != "meta"]
    if not matrices:
        return None
    norms = [float(norm) for norm in torch._foreach_norm(matrices, 2, dtype=torch.float32)]
    size = math.sqrt(sum(norm * norm for norm in norms) / sum(m.numel() for m in matrices))
    return size if math.isfinite(size) and size > 0 else None


def _largest_weight(model: nn.Module) -> tuple[str, float] | None:
    sizes = [
        (name, float(torch.linalg.vector_norm(local_part(p).detach(), math.inf, dtype=torch.float32)))
        for name, p in model.named_parameters()
        if local_part(p).numel()
    ]
    return max(sizes, key=lambda item: item[1], default=None)


def _widest_gain(model: nn.Module) -> tuple[str, float] | None:
    """The matrix that enlarges what passes through it most: deviation times the root of its width."""
    gains = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding) or not isinstance(weight, torch.Tensor) or weight.ndim < 2:
            continue
        values = local_part(weight).detach()
        if values.numel():
            # In float64: weights that are this large leave float32 when they are squared.
            size = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(values.numel())
            gains.append((f"{name}.weight".lstrip("."), size * math.sqrt(math.prod(weight.shape[1:]))))
    return max(gains, key=lambda item: item[1], default=None)
