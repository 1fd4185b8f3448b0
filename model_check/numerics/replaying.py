"""What the forwards of the step in progress were given, and one of them run once more to find where a NaN was made.

What they were given is kept until the next step begins, which is about as long as the script's own variables keep it. A
tensor that belongs to a graph (the logits given to a loss module) is never kept alive: only remembered while somebody
else does. Before a forward only that is asked which the forward itself changes. A script that has just waited for its
GPU, by copying a batch to it for one, has it idle until the first kernel of the forward is queued: whatever is done
before that makes the step longer, whatever is done after it is free.

A replay runs the module as it stands inside its wrappers, so no peer takes part. It works on copies of its buffers,
generators are put back and gradients go nowhere, so that the script's own results stay what they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from model_check.blackbox.batch_samples import RECENT, Drawn
from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import tensors_in
from model_check.numerics.finite import checkable, finite, is_finite
from model_check.numerics.origins import Origin, OriginFinder, only_minus_infinity
from model_check.record.stacks import Frame

_MOST_BYTES = 256 << 20
_MOST_CALLS = 64
_AUTOCAST_DEVICES = ("cpu", "cuda")


class _Gone(Exception):
    """A tensor that the call needs is no longer there."""


@dataclass(frozen=True)
class _Borrowed:
    """A tensor of somebody's graph."""

    tensor: Callable[[], torch.Tensor | None]


def _map(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    if isinstance(value, (torch.Tensor, _Borrowed)):
        return change(value)
    if depth < 3 and type(value) in (list, tuple):
        return type(value)(_map(item, change, depth + 1) for item in value)
    if depth < 3 and type(value) is dict:
        return {key: _map(item, change, depth + 1) for key, item in value.items()}
    return value


def _borrow(tensor: Any) -> Any:
    return _Borrowed(weakref.ref(tensor)) if tensor.grad_fn is not None else tensor


def _given_back(value: Any) -> Any:
    if not isinstance(value, _Borrowed):
        return value
    tensor = value.tensor()
    if tensor is None:
        raise _Gone
    # A copy outside the graph: a second backward must not run into the first one's.
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass
class Call:
    """One outermost forward: what it was given, and the state of the generators when it began."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Tensor
    cuda_generator: torch.Tensor | None
    versions: tuple[int, ...]
    site: tuple[int, int, int]  # the line of the script that makes the call, as the ring numbers it
    nodes: range  # sequence numbers of what it added to the graph
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    nbytes: int = 0
    wrapper: Any = None  # as whose forward the training step is run that made this call
    outputs: list[Callable[[], torch.Tensor | None]] = field(default_factory=list)
    changed_its_input: bool = False  # in place, by its own forward
    drawn: tuple[Drawn, ...] = ()  # the loaders' newest batches when it began

    @property
    def unwrapped(self) -> Any:
        """The module inside DistributedDataParallel, as it was before it was compiled: running it calls no peer."""
        wrapped = type(self.module).__name__ == "DistributedDataParallel"
        inner = self.module.module if wrapped else self.module
        return getattr(inner, "_orig_mod", inner)

    @cached_property
    def learns(self) -> bool:
        """It has parameters; a loss that is written as a module has none, and is looked into like any loss code."""
        return next(self.module.parameters(), None) is not None

    def line(self) -> Frame | None:
        """The script's own line that makes this call."""
        file, line, function = self.site
        texts = {number: text for text, number in BOX.recorder.ids.items()} if BOX.recorder is not None else {}
        return Frame(texts[file], line, texts.get(function, "")) if texts.get(file) else None

    def result_is_bad(self) -> bool:
        """What it returned, as far as that is still there, holds NaN or infinity that a loss can depend on."""
        known = [tensor for output in self.outputs if (tensor := output()) is not None and checkable(tensor)]
        used = [tensor for tensor in known if tensor.requires_grad] or known
        return any(not is_finite(tensor) for tensor in used)

    @property
    def is_gone(self) -> bool:
        """What its forward was given is no longer there."""
        try:
            self.given()
        except _Gone:
            return True
        return not self.args and not self.kwargs

    def is_sharded(self, *, backward: bool = False) -> bool:
        """Its parameters are in shards now: running it would call the other ranks, which know nothing of it."""
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
            return True
        # FSDP2 leaves parameters gathered between micro-batches; its hooks would still reduce the replay's gradients.
        wrappers = ("FullyShardedDataParallel", "FSDPModule") if backward else ("FullyShardedDataParallel",)
        return any(base.__name__ in wrappers for m in self.module.modules() for base in type(m).__mro__)

    def why_not_again(self, *, backward: bool = False) -> str:
        """Why the call cannot be run once more by this rank alone; empty: it can."""
        if self.is_gone:
            return "what its forward was given is no longer there"
        if self.is_sharded(backward=backward):
            return "its parameters are sharded: the other ranks would have to take part"
        if _versions(tensors_in(*self.given())) != self.versions:
            return "the script has changed its forward's inputs in place"
        return ""

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _map(self.args, _given_back), _map(self.kwargs, _given_back)

    def hold(self) -> None:
        """Keeps what it was given, though the backward lets it go: more will be asked about it."""
        self.args, self.kwargs = self.given()

    def surroundings(self) -> AbstractContextManager[Any]:
        """The generators and the autocast of the original call; afterwards everything is as before."""
        stack = ExitStack()
        device = [torch.cuda.current_device()] if self.cuda_generator is not None else []
        stack.enter_context(torch.random.fork_rng(device))
        torch.set_rng_state(self.generator)
        if self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator)
        for device_type, dtype in self.autocast:
            stack.enter_context(torch.autocast(device_type, dtype))
        return stack

    def free(self) -> None:
        self.args, self.kwargs = (), {}


class Inputs:
    """The calls of the step in progress, oldest first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @staticmethod
    def begins(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """A call with what its forward is about to change; to be kept once its first kernels are queued."""
        if not torch.is_grad_enabled():
            return None
        flat = not kwargs and all(type(value) is torch.Tensor for value in args)
        return Call(
            module,
            args,
            kwargs,
            generator=torch.default_generator.get_state(),
            cuda_generator=_cuda_generator(),
            versions=_versions(args if flat else tensors_in(args, kwargs)),
            site=BOX.last_site,
            nodes=range(torch.autograd._get_sequence_nr(), 1 << 62),
        )

    def keep(self, call: Call) -> None:
        """Adds a call to those of the step."""
        if len(self.calls) >= _MOST_CALLS:
            return
        call.nbytes = sum(tensor.nbytes for tensor in tensors_in(call.args, call.kwargs) if not tensor.requires_grad)
        call.args, call.kwargs = _map(call.args, _borrow), _map(call.kwargs, _borrow)
        call.autocast = _autocast()
        call.drawn = tuple(RECENT)
        self.calls.append(call)
        self._stay_small()

    def _stay_small(self) -> None:
        """Of many micro-batches the oldest inputs are let go."""
        held = sum(call.nbytes for call in self.calls if call.args or call.kwargs)
        for call in self.calls[:-1]:
            if held <= _MOST_BYTES:
                return
            if call.args or call.kwargs:
                held -= call.nbytes
                call.free()

    def all_of_step(self) -> list[Call]:
        """None where there were more than are kept: which of them is meant could not be told."""
        return list(self.calls) if len(self.calls) < _MOST_CALLS else []

    def ended(self, call: Call, result: Any) -> None:
        call.nodes = range(call.nodes.start, torch.autograd._get_sequence_nr())
        call.outputs = [weakref.ref(tensor) for tensor in tensors_in(result)]
        if call.args or call.kwargs:
            call.changed_its_input = _versions(tensors_in(call.args, call.kwargs)) != call.versions

    def forget(self) -> None:
        self.calls.clear()


def _versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """How often each has been changed in place; of those that are part of a graph, autograd itself keeps watch."""
    return tuple([tensor._version for tensor in tensors if not tensor.requires_grad])


def _cuda_generator() -> torch.Tensor | None:
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    # What `torch.cuda.get_rng_state` does, without looking up the device by its name.
    return torch.cuda.default_generators[torch.cuda.current_device()].get_state()


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)
    )


# Once more


_MOST_SAMPLES = 32


@dataclass(frozen=True)
class Replay:
    """What one more run of a forward, and of its backward, showed."""

    origin: Origin | None
    outputs_finite: bool
    gradients_finite: bool | None  # None: no backward was run
    computes_loss: bool  # the module's result is the loss; else a stand-in was used for what the script does with it


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
    if call.is_sharded():  # by now: after its backward FSDP2 has taken the gathered parameters apart again
        return []
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
    if call.is_gone or call.changed_its_input:
        return []
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
