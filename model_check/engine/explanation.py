"""A bad step, explained: the facts that one rank gathered, and the forms in which they leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model_check.engine.batches import sample_count
from model_check.engine.inputs import StepInputs
from model_check.engine.loop import StepInfo
from model_check.engine.replaying import Replayed
from model_check.errors import NumericsError
from model_check.numerics.causes import Cause
from model_check.numerics.dump import Dumped
from model_check.record.events.numerics import MadeIn, NonFinite

Row = tuple[int, int]
"""(micro-batch, row): one sample of a step."""

_TOKENS_SHOWN = 32
_SAMPLES_SHOWN = 16


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after they compared notes."""

    guilty: tuple[int, ...]
    reproduced: bool
    forward: bool = False  # on some rank the loss itself was bad
    verdict: tuple[str, str] = ("MC401", "")  # the reporter's cause and place, for those who have none of their own

    @property
    def reporter(self) -> int:
        """The lowest guilty rank; rank 0 where nobody is known to be."""
        return self.guilty[0] if self.guilty else 0


@dataclass(frozen=True)
class Explanation:
    """Why a step was not finite, as far as this rank can tell."""

    rank: int
    info: StepInfo
    inputs: StepInputs
    replayed: Replayed
    agreed: Agreed
    cause: Cause
    bad_rows: tuple[Row, ...] | None  # samples that are bad alone; None: not tried

    @property
    def is_own(self) -> bool:
        return self.rank in self.agreed.guilty

    @property
    def where(self) -> str:
        origin, agreed = self.replayed.origin, self.agreed
        if not agreed.reproduced:
            return f"not reproduced by a replay, suspect {ranks_text(agreed.guilty) or 'the exchange of gradients'}"
        if self.replayed.failure is not None:
            return f"the replay failed ({self.replayed.failure})"
        if origin is None:
            return "the gradient norm is too large for float32"
        if origin.given is not None:
            return f"{origin.given} is not finite"
        site = origin.site
        module = f" in {site.module}" if site.module else ""
        return f"{origin.direction} of {site.op}{module}" + (f" at {site.location}" if site.location else "")

    @property
    def tensor(self) -> str | None:
        """The first bad tensor."""
        origin, gradients = self.replayed.origin, self.replayed.gradients
        if origin is not None and origin.given is not None:
            return origin.given.name if origin.given.kind == "parameter" else str(origin.given)
        if origin is not None and origin.direction == "forward":
            return f"{origin.site.module or 'model'}: output of {origin.site.op}"
        # The backward pass comes from the end of the model: the last is the one it met first.
        return f"{gradients[-1].name}.grad" if gradients else None

    def fix(self) -> list[str]:
        """What to do where the general advice on the code does not apply: no rate and no line made a weight bad that
        was so before the step. Empty: it applies."""
        origin = self.replayed.origin
        if origin is None or origin.given is None or origin.given.kind != "parameter":
            return []
        return ["start from weights that are finite: look at model.model_path, or --resume an older checkpoint"]

    def evidence(self, dump: Dumped | None) -> list[str]:
        lines = list(self.cause.evidence)
        if self.replayed.failure is not None:
            lines.append(f"observed: the replay failed, so that no line can be named: {self.replayed.failure}")
        if not self.agreed.reproduced and self.agreed.guilty:
            whose = ranks_text(self.agreed.guilty)
            lines.append(f"observed: the gradients of {whose} were bad before they were exchanged")
        if self.bad_rows and len(self.bad_rows) < sum(sample_count(batch) for batch in self.inputs.micro_batches):
            lines.append(f"observed: bad alone: samples {', '.join(map(str, self.sample_ids()))}")
        if dump is not None and dump.left_out:
            lines.append(f"observed: {len(dump.left_out)} tensors did not fit into the dump (debug.dump_gb)")
        return lines

    def facts(self) -> NonFinite:
        """What the event and the dump both say."""
        origin = self.replayed.origin
        site = origin.site if origin is not None else None
        return NonFinite(
            step=self.info.step,
            rank=self.rank,
            loss=self.info.loss,
            grad_norm=self.info.grad_norm,
            direction=origin.direction if origin is not None else None,
            made_in=self._made_in(),
            module=site.module if site is not None else None,
            op=site.op if site is not None else None,
            location=site.location if site is not None else None,
            function=site.function if site is not None else None,
            tensor=self.tensor,
            ranges=origin.before if origin is not None else (),
            sample_ids=tuple(self.sample_ids()),
            token_ids=tuple(map(tuple, self.token_ids())),
            deterministic=self.agreed.reproduced,
            cause=self.cause.code,
            facts=self.cause.facts,
        )

    def _made_in(self) -> MadeIn:
        origin = self.replayed.origin
        if origin is None:
            return "unknown"
        if origin.given is None:
            return "model"
        return "batch" if origin.given.kind == "input" else "weight"

    def error(self) -> NumericsError:
        gradients = self.replayed.gradients
        named = ", ".join(f"{t.name} ({t.bad}/{t.total})" for t in gradients[:3])
        if self.is_own or not self.agreed.guilty:
            bad = f"non-finite gradients in {len(gradients)} parameters, first {named}"
            loss = f"a loss of {self.info.loss} and a gradient norm of {self.info.grad_norm}"
            what = f"has {bad if gradients else loss}: {self.where}"
        else:
            what = f"has non-finite numbers from {ranks_text(self.agreed.guilty)}: {self.agreed.verdict[1]}"
        code = self.cause.code if self.is_own else self.agreed.verdict[0]
        return NumericsError(
            f"step {self.info.step} {what}", remedy=f"model-check explain {code} says what to do", code=code
        )

    def _rows(self) -> list[Row]:
        """The samples that are bad alone, else all of the batch."""
        batches = self.inputs.micro_batches
        all_rows = [(number, row) for number, batch in enumerate(batches) for row in range(sample_count(batch))]
        return list(self.bad_rows or all_rows)[:_SAMPLES_SHOWN]

    def sample_ids(self) -> list[int]:
        """The loader's numbers of the samples; of batches that have none, the place in the step."""
        batches = self.inputs.micro_batches
        before = [sum(sample_count(b) for b in batches[:number]) for number in range(len(batches))]
        ids = []
        for number, row in self._rows():
            known = getattr(batches[number], "sample_ids", None)
            ids.append(int(known[row]) if isinstance(known, torch.Tensor) else before[number] + row)
        return ids

    def token_ids(self) -> list[list[int]]:
        """The beginnings of the same samples, where they are tokens."""
        found = []
        for number, row in self._rows():
            tokens = getattr(self.inputs.micro_batches[number], "tokens", None)
            if isinstance(tokens, torch.Tensor):
                found.append(tokens[row][:_TOKENS_SHOWN].tolist())
        return found


def ranks_text(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
