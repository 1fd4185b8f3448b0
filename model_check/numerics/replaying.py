"""Runs a forward of the script's once more and finds the first operation that made a number non-finite.

The module is run as it stands inside its wrappers, so no peer takes part. It works on copies of its buffers, generators
are put back and gradients go nowhere, so that the script's own results stay what they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import local, tensors_in
from model_check.numerics.forward_inputs import Call
from model_check.numerics.origins import Origin, OriginFinder, only_minus_infinity
from model_check.numerics.ranges import ModuleRange, checkable, is_finite

_MOST_SAMPLES = 32
_MODULES_BEFORE = 10


@dataclass(frozen=True)
class Replay:
    """What one more run of a forward, and of its backward, showed."""

    origin: Origin | None
    outputs_finite: bool
    gradients_finite: bool | None  # None: no backward was run
    computes_loss: bool  # the module's result is the loss; else a stand-in was used for what the script does with it
    passed: tuple[ModuleRange, ...] = field(default=(), compare=False)


def finite(tensor: Any) -> bool:
    plain = local(tensor)
    return plain is None or not checkable(plain) or is_finite(plain)


def _call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the module with copies of its buffers: running statistics move with every forward, and this one must not
    count. They are not put back into place either: a backward that is still to come would find them changed."""
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    return torch.func.functional_call(module, buffers, args, kwargs)


def run_again(call: Call, *, backward: bool) -> Replay:
    """Runs the call once more, and its backward where asked."""
    module = call.unwrapped
    args, kwargs = call.given()
    finder = OriginFinder(module, lambda file: BOX.code.shown(file) or file)
    named = [(str(number), tensor) for number, tensor in enumerate(tensors_in(args, kwargs))]
    gradients_finite = None
    # A script that looks for anomalies itself would have its exception raised here too, before the origin is found.
    quiet = torch.autograd.set_detect_anomaly(False)
    with quiet, call.surroundings(), torch.enable_grad(), finder.watching(named):
        result = _call(module, args, kwargs)
        outputs = [tensor for tensor in tensors_in(result) if checkable(tensor)]
        loss = _loss_in(result, outputs)
        root = loss if loss is not None else _stand_in(outputs)
        if root is not None:
            finder.loss_reached(root)
            if backward and finder.forward is None and root.requires_grad:
                gradients_finite = _backward(module, root)
    return Replay(
        origin=finder.origin,
        outputs_finite=all(finite(tensor) for tensor in outputs),
        gradients_finite=gradients_finite,
        computes_loss=loss is not None,
        passed=tuple(finder.trail.passed[-_MODULES_BEFORE:]),
    )


def _loss_in(result: Any, outputs: list[torch.Tensor]) -> torch.Tensor | None:
    named = getattr(result, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    return outputs[0] if len(outputs) == 1 and outputs[0].numel() == 1 else None


def _stand_in(outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """What the script does with the outputs is not known here; any slope that is not 0 finds an infinite one."""
    used = [tensor for tensor in outputs if tensor.requires_grad] or outputs
    return torch.stack([tensor.float().sum() for tensor in used]).sum() if used else None


def _backward(module: Any, root: torch.Tensor) -> bool:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(root, parameters, allow_unused=True) if parameters else ()
    return all(finite(gradient) for gradient in gradients if gradient is not None)


def samples_alone(call: Call) -> list[int]:
    """Which samples of the batch give a non-finite output each by itself; none where that cannot be told."""
    args, kwargs = call.given()
    given = list(tensors_in(args, kwargs))
    size = given[0].shape[0] if given and given[0].dim() else 0
    if not 1 < size <= _MOST_SAMPLES or any(tensor.dim() == 0 or tensor.shape[0] != size for tensor in given):
        return []
    module, bad = call.unwrapped, []
    for number in range(size):
        one_args, one_kwargs = _cut((args, kwargs), number)
        with call.surroundings(), torch.no_grad():
            try:
                result = _call(module, one_args, one_kwargs)
            except (RuntimeError, ValueError):
                return []  # a module that needs more than one sample, as batch normalisation does
        if any(not finite(tensor) for tensor in tensors_in(result)):
            bad.append(number)
    return bad


def samples_with_bad_input(call: Call) -> list[int]:
    """Which samples of the batch hold NaN or infinity before any operation has touched them; not that of a mask."""
    args, kwargs = call.given()
    bad: set[int] = set()
    for tensor in tensors_in(args, kwargs):
        if tensor.dim() and checkable(tensor) and not finite(tensor) and not only_minus_infinity(tensor):
            rows = torch.isfinite(tensor.detach().reshape(tensor.shape[0], -1)).all(dim=1)
            bad |= set((~rows).nonzero().flatten().tolist())
    return sorted(bad)


def _cut(value: Any, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[number : number + 1]
    if type(value) in (list, tuple):
        return type(value)(_cut(item, number) for item in value)
    if type(value) is dict:
        return {key: _cut(item, number) for key, item in value.items()}
    return value
