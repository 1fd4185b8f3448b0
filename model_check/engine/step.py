"""One optimizer step: forward and backward over the micro-batches, clip, update. No host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model_check.engine.gradient_norm import whole_norm
from model_check.engine.passes import Passes, WholeModel
from model_check.engine.place import Place
from model_check.engine.precision import LossScale, Precision
from model_check.numerics.finite import LocalCheck


class TrainStep:
    """Callable: micro-batches in, numbers out. Holds what every step needs and nothing that changes otherwise.

    The numbers stay on the device, in one tensor for one copy: loss, gradient norm, skipped, ranks asked to stop, the
    same on every rank; whether this rank's own loss or gradients were bad before they were exchanged; whether the step
    must be explained; the loss scale it ran with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        place: Place,
        *,
        max_grad_norm: float,
        passes: Passes | None = None,
        norm_of: Callable[[Sequence[torch.Tensor]], torch.Tensor] = whole_norm,
        losses_in_job: int | None = None,
        local_check: LocalCheck | None = None,
    ) -> None:
        """`losses_in_job`: how many ranks compute a loss (None: all of them).

        `local_check` says of the gradients what they were before the exchange (None: nothing is exchanged).
        """
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.place = place
        self.max_grad_norm = max_grad_norm
        self.loss_scale = LossScale(place.device, enabled=precision.name == "fp16")
        self.passes: Passes = passes or WholeModel(model, precision, place.device)
        # Called before parameters and moments change: a checkpoint may still be copying them.
        self.before_update: Callable[[], None] = lambda: None
        self._norm_of = norm_of
        self._losses_in_job = losses_in_job or place.world_size
        self._local_check = local_check
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # Where the host runs ahead, a step that must be explained keeps the weights as they were until it has looked.
        self.holds_after_hit = False
        self._held = torch.zeros((), device=place.device)

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        self.optimizer.zero_grad(set_to_none=True)
        if self._local_check is not None:
            self._local_check.begin()

    def own_gradients_bad(self) -> bool:
        """This rank's own gradients were not finite, before they were exchanged. Waits for the device."""
        return self._local_check is not None and bool(self._local_check.bad())

    def release(self) -> None:
        """The host has looked: weights may change again."""
        self._held.zero_()

    def __call__(self, micro_batches: Sequence[Any], rate: float, *, stop_requested: bool = False) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.begin()
        scale = self.loss_scale.scale.clone()
        loss = self.passes.accumulate(micro_batches, self.loss_scale.apply)
        if self._local_check is not None:
            self._local_check.close()
        norm = self._gradient_norm()
        mean_loss, stops = self._share(loss, stop_requested)
        # Norm and mean loss are the whole job's, the same on every rank, so all ranks decide alike.
        skipped = (~(torch.isfinite(norm) & torch.isfinite(mean_loss))).float()
        hit = skipped * self._is_no_mere_overflow(mean_loss, scale)
        self.before_update()
        self._update(norm, torch.maximum(skipped, self._held))
        self.loss_scale.update(skipped)
        if self.holds_after_hit:
            torch.maximum(self._held, hit, out=self._held)
        return torch.stack([mean_loss, norm, skipped, stops, self._own_fault(loss, skipped), hit, scale])

    def _is_no_mere_overflow(self, mean_loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """A scaled float16 gradient may overflow now and then: the scale is lowered, and that is all."""
        if not self.loss_scale.enabled:
            return torch.ones_like(mean_loss)
        return (~torch.isfinite(mean_loss) | (scale <= 1.0)).float()

    def _own_fault(self, loss: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        if self._local_check is None:
            return skipped
        return torch.maximum((~torch.isfinite(loss)).float(), self._local_check.bad())

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = self._norm_of(gradients)
        return norm / self.loss_scale.scale if self.loss_scale.enabled else norm

    def _update(self, norm: torch.Tensor, skipped: torch.Tensor) -> None:
        divisor = self.loss_scale.scale.clone()
        if self.max_grad_norm > 0:
            divisor = divisor * torch.clamp(norm / self.max_grad_norm, min=1.0)
        # The optimizers divide by grad_scale on the way in and change nothing where found_inf is 1. With offloaded
        # parameters they run on the host, and must not read a copy that is still on its way.
        home = self._parameters[0].device
        self.optimizer.grad_scale = divisor.to(home)  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped.to(home)  # type: ignore[attr-defined]
        self.optimizer.step()

    def _share(self, loss: torch.Tensor, stop_requested: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """One small reduction a step carries the mean loss and whether any rank was asked to stop."""
        shared = torch.stack([loss, torch.full_like(loss, float(stop_requested))])
        if self.place.world_size > 1:
            dist.all_reduce(shared)
            shared = shared / torch.tensor([self._losses_in_job, 1.0], device=shared.device)
        return shared[0], shared[1]
