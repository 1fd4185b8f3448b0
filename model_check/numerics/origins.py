"""Where the first bad number was made: watches every operation of a replayed step, and the modules that run.

An operation whose result is not finite while all its inputs are is an *origin*; a bad result of bad inputs passes the
origin of its inputs on. The origin of the loss, or of the first bad gradient, is what is reported. The backward pass
has no lines of its own: each node of the graph is known by its number, and so by the line that made it.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from model_check.numerics.finite import checkable, is_finite, local_part, real_part
from model_check.record.events.numerics import Direction, ModuleRange, Range

_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_RUNS_THE_MODEL = tuple(f"{_PACKAGE}{room}/" for room in ("blackbox", "numerics", "engine", "launch", "cli"))
_REPLAYS_A_SCRIPT = f"{_PACKAGE}numerics/replaying.py"
_LIBRARIES = (
    f"{Path(torch.__file__).resolve().parent}/",
    *(f"{sysconfig.get_paths()[key]}/" for key in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})  # a bool counts nothing
_INSTALLED = ("/site-packages/", "/dist-packages/")  # of another place too: a user's own, that of the system
# Their results are not there yet, or hold whatever the memory held before.
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_dtensor", "fsdp", "symm_mem"})
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
# How masks are written: minus infinity here is meant, and softmax makes zeros of it.
_MASKING = frozenset(
    {
        "full",
        "full_like",
        "new_full",
        "fill",
        "fill_",
        "masked_fill",
        "masked_fill_",
        "where",
        "scalar_tensor",
        "lift_fresh",
    }
)
_SUMS = frozenset({"sum", "count_nonzero"})
_KEEPS_A_SUM = frozenset({"_to_copy", "clone", "detach"})
_DIVISIONS = frozenset({"div", "div_", "true_divide"})
_MODULES_BEFORE = 10
# What torch calls otherwise than people do.
_NAMES = {"_to_copy": "cast", "_softmax": "softmax", "nll_loss_forward": "nll_loss", "mm": "matmul", "bmm": "matmul"}


def range_of(tensor: torch.Tensor) -> Range:
    values = real_part(tensor)
    absmax = float(torch.linalg.vector_norm(values, math.inf))
    if math.isfinite(absmax):
        return Range(absmax, _mean(values), 1.0)
    good = values[torch.isfinite(values)].float()
    if not good.numel():
        return Range()
    return Range(float(good.abs().max()), _mean(good), good.numel() / values.numel())


def _mean(values: torch.Tensor) -> float:
    """Of finite numbers; their sum may leave the range of float32 although none of them does."""
    mean = float(values.mean(dtype=torch.float32))
    return mean if math.isfinite(mean) else float(values.mean(dtype=torch.float64))


def first_range(value: Any) -> Range | None:
    """Of the first tensor in whatever a module takes or returns."""
    if isinstance(value, torch.Tensor):
        return range_of(value) if checkable(value) else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_range(part)) is not None), None)


class ModuleTrail:
    """Which module runs now, and those that have run, in order. Works through hooks, so the model knows nothing."""

    def __init__(self) -> None:
        self.passed: list[ModuleRange] = []
        self._running: list[str] = []

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else ""

    def newest(self, end: int | None = None) -> tuple[ModuleRange, ...]:
        """The last ones, or those before number `end`."""
        return tuple(self.passed[:end][-_MODULES_BEFORE:])

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(name)

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._running and self._running[-1] == name:
                self._running.pop()
            with _disable_current_modes():
                self.passed.append(ModuleRange(name, first_range(args), first_range(output)))

        return leave


@dataclass(frozen=True)
class Site:
    """A place in the forward pass: module, line, and how many modules had run by then."""

    op: str
    module: str
    location: str
    function: str
    passed: int


@dataclass(frozen=True)
class Given:
    """A tensor that the pass was given."""

    kind: Literal["parameter", "buffer", "input"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Origin:
    """Where a bad number came into the step."""

    direction: Direction
    site: Site
    kind: str  # nan or inf
    dtype: str
    inputs: tuple[Range, ...] = ()
    magnitude: float | None = None  # what float32 makes of it, where it is float16; infinite: the same
    empty_divisor: bool = False
    given: Given | None = None  # what was not finite to begin with
    received: bool = False  # it was there before any operation that could be watched
    before: tuple[ModuleRange, ...] = field(default=(), compare=False)


_MEANT = Origin("forward", Site("mask", "", "", "", 0), "inf", "", received=True)
"""Of minus infinity in a mask: nobody's fault."""


class OriginFinder(TorchDispatchMode):
    """Active around the forward and backward passes of one rank. `shown` turns a file's path into what a user calls it.

    Memory is told apart by its storage: every operation that writes fresh memory settles what is known about it.
    """

    def __init__(self, model: nn.Module, shown: Callable[[str], str] = str) -> None:
        super().__init__()
        self.trail = ModuleTrail()
        self.forward: Origin | None = None
        self.backward: Origin | None = None
        self._model = model
        self._shown = shown
        self._origins: dict[Any, Origin] = {}  # by what _memory returns
        self._sums: set[Any] = set()
        self._sites: dict[int, Site] = {}
        self._first_made: Origin | None = None  # of those that nothing has masked since

    # What the caller tells

    @contextmanager
    def watching(self, inputs: Iterable[tuple[str, Any]]) -> Iterator[OriginFinder]:
        """Watches; `inputs` are the tensors of the batch, by name."""
        for name, parameter in self._model.named_parameters():
            self._note_given(Given("parameter", name), parameter.detach())
        for name, buffer in self._model.named_buffers():
            self._note_given(Given("buffer", name), buffer)
        for name, tensor in inputs:
            self._note_given(Given("input", name), tensor)
        with self.trail.following(self._model), self:
            yield self

    def _note_given(self, given: Given, tensor: torch.Tensor) -> None:
        if not checkable(tensor) or is_finite(tensor):
            return
        if given.kind != "parameter" and only_minus_infinity(tensor):  # a mask
            self._origins[_memory(tensor)] = _MEANT
            return
        nowhere = Site("", "", "", "", 0)
        self._origins[_memory(tensor)] = Origin(
            "forward", nowhere, _kind(tensor), _dtype(tensor), (range_of(tensor),), given=given
        )

    def loss_reached(self, loss: torch.Tensor) -> None:
        """The forward pass of a micro-batch is done, with this loss."""
        with _disable_current_modes():
            if self.forward is None and checkable(loss) and not is_finite(loss):
                found = self._origins.get(_memory(loss)) or self._first_made
                self.forward = found or Origin(
                    "forward", self._site("loss"), _kind(loss), _dtype(loss), received=True, before=self.trail.newest()
                )

    @property
    def origin(self) -> Origin | None:
        """Of the loss if that was bad, else of the first bad gradient."""
        return self.forward or self.backward

    # What torch tells

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if torch.is_grad_enabled() and not _in_backward():
            self._remember_node(name)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if func.namespace in _COMMUNICATION:
            self._pass_on(_tensors(args), outputs)
            return result
        if name in _UNFILLED:
            for tensor in outputs:
                self._settle(tensor, None)
            return result
        if name.startswith(("_scaled_dot_product", "_cudnn_attention")):
            outputs = outputs[:1]  # the others are of the kernel's own: a row that sees nothing has -inf there
        if not _is_view(func):
            self._judge(func, name, args, kwargs, outputs)
        return result

    def _pass_on(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """What is sent bad arrives bad; nobody waits for it here."""
        sent = next((found for t in inputs if (found := self._origins.get(_memory(t))) is not None), None)
        for tensor in outputs if sent is not None else []:
            self._settle(tensor, sent)

    def _remember_node(self, name: str) -> None:
        """The first operation after a node of the graph was made is the node's own."""
        number = torch.autograd._get_sequence_nr() - 1
        if number not in self._sites:
            self._sites[number] = self._site(name)

    def _judge(self, func: Any, name: str, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        is_sum = name in _SUMS or (name in _KEEPS_A_SUM and any(_memory(t) in self._sums for t in _tensors(args)))
        bad = [t for t in outputs if checkable(t) and not is_finite(t)]
        origin = self._origin_of(func, name, args, kwargs, bad, outputs) if bad else None
        if not bad and self._first_made is not None and self._masks(name, _tensors((args, kwargs)), outputs):
            self._first_made = None
        if self._first_made is None and origin is not None and not origin.received:
            self._first_made = origin  # made now, or still spreading: infinity divided by, say, is 0 and also lives on
        if origin is not None and not origin.received and self.backward is None and _in_backward():
            # A bad number of the forward pass that did not reach the loss may still spoil a gradient.
            self.backward = replace(origin, direction="backward")
        for tensor in outputs:
            self._settle(tensor, origin if any(tensor is t for t in bad) else None, is_sum=is_sum)

    def _masks(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Whether good numbers were made of the bad ones: those that took only the shape or the type say nothing."""
        if name.endswith("_like") or name.startswith("new_") or not any(checkable(t) for t in outputs):
            return False
        return any(self._origins.get(_memory(t)) is self._first_made for t in inputs)

    def _origin_of(
        self, func: Any, name: str, args: Any, kwargs: Any, bad: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Origin:
        inputs = [t for t in _tensors((args, kwargs)) if checkable(t)]
        written = [t for t in inputs if any(t is out for out in outputs)]
        read = [t for t in inputs if not any(t is out for out in outputs)]
        bad_inputs = [t for t in read if not is_finite(t)]
        known = [self._origins.get(_memory(t)) for t in [*bad_inputs, *written]]
        causes = [origin for origin in known if origin is not None]
        meant = [origin for origin in causes if origin is _MEANT]
        if real := [origin for origin in causes if origin is not _MEANT]:
            return real[0]
        masked_out = all(only_minus_infinity(t) for t in bad)
        if masked_out and (meant or (name in _MASKING and not bad_inputs) or _writes_a_mask(name, bad_inputs)):
            return _MEANT
        unknown = bool(bad_inputs) and not meant and name not in _MASKING
        # Softmax of a row that is masked throughout: every weight is 0, and so is what it divides by.
        hidden_row = bool(meant) and "softmax" in name
        if unknown and self._first_made is not None:
            # A kernel that torch does not know (Triton) wrote it, and has read what was spoilt before.
            return self._first_made
        return self._new_origin(func, name, args, kwargs, bad[0], read, received=unknown, empty=hidden_row)

    def _new_origin(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        bad: torch.Tensor,
        read: list[torch.Tensor],
        *,
        received: bool,
        empty: bool,
    ) -> Origin:
        backward = _in_backward()
        direction: Direction = "backward" if backward else "forward"
        site = self._node_site(torch._C._current_autograd_node()) if backward else self._site(name)
        return Origin(
            direction,
            site,
            _kind(bad),
            _dtype(bad),
            tuple(range_of(t) for t in read[:3]),
            magnitude=_magnitude(func, name, args, kwargs, bad, read) if not received else None,
            empty_divisor=empty or (not received and self._divides_by_nothing(name, args)),
            received=received,
            before=self.trail.newest(site.passed),
        )

    def _divides_by_nothing(self, name: str, args: Any) -> bool:
        if name.startswith("nll_loss"):
            return True  # its inputs are finite: only the number of labels that count can be at fault
        if name == "mean":
            return any(t.numel() == 0 for t in _tensors(args))
        if name not in _DIVISIONS or len(args) < 2:
            return False
        if not isinstance(args[1], torch.Tensor):
            return isinstance(args[1], int) and args[1] == 0
        divisor = local_part(args[1])
        # A single whole number is a count too, wherever it was made: transformers' Trainer hands its models one.
        counts = divisor.numel() == 1 and divisor.dtype in _WHOLE
        return (counts or _memory(divisor) in self._sums) and bool((divisor == 0).any())

    def _settle(self, tensor: torch.Tensor, origin: Origin | None, *, is_sum: bool = False) -> None:
        memory = _memory(tensor)
        if origin is None:
            self._origins.pop(memory, None)
        else:
            self._origins[memory] = origin
        if is_sum:
            self._sums.add(memory)
        else:
            self._sums.discard(memory)

    # Places

    def _site(self, op: str) -> Site:
        location, function = _model_line(sys._getframe(1), self._shown)
        return Site(_NAMES.get(op, op.strip("_")), self.trail.current, location, function, len(self.trail.passed))

    def _node_site(self, node: Any) -> Site:
        """Where the forward pass made this node."""
        here = self._sites.get(node._sequence_nr())
        op = node.name().rstrip("0123456789").removesuffix("Backward").rpartition("::")[2]
        return here if here is not None else Site(op, "", "", "", 0)


def _in_backward() -> bool:
    """A node of the graph is at work; not while it has a part of the forward pass computed again, which is recorded."""
    return torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> StorageWeakRef | tuple[str, int]:
    """The tensor's memory, as a key. A weak reference keeps its address from being given to other memory."""
    local = local_part(tensor)
    local = getattr(local, "elem", local)  # a result that is still on its way wraps the memory it will arrive in
    return StorageWeakRef(local.untyped_storage()) if local.layout == torch.strided else ("sparse", id(local))


def _is_view(func: Any) -> bool:
    """It only looks at memory of its input in another way."""
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(info.is_write for info in aliases)


def only_minus_infinity(tensor: torch.Tensor) -> bool:
    values = real_part(tensor)
    return not bool(torch.isnan(values).any()) and not bool(torch.isposinf(values).any())


def _writes_a_mask(name: str, bad_inputs: list[torch.Tensor]) -> bool:
    return name in ("triu", "tril", "triu_", "tril_", "copy_", "_to_copy") and all(map(only_minus_infinity, bad_inputs))


def _kind(tensor: torch.Tensor) -> str:
    return "nan" if bool(torch.isnan(local_part(tensor)).any()) else "inf"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _magnitude(
    func: Any, name: str, args: Any, kwargs: Any, bad: torch.Tensor, read: list[torch.Tensor]
) -> float | None:
    """What left the range of float16: the same operation in float32, where it can be asked again."""
    if bad.dtype != torch.float16:
        return None
    if name in ("_to_copy", "copy_"):
        return max((range_of(t).absmax for t in read), default=None)
    if func._schema.is_mutable:
        return None

    def precise(value: Any) -> Any:
        half = isinstance(value, torch.Tensor) and value.dtype == torch.float16
        return value.float() if half else value

    try:
        wide = tree_map(precise, (args, kwargs))
        results = _tensors(func(*wide[0], **wide[1]))
    except RuntimeError:
        return None  # some operations exist for half precision only
    wide_results = [t for t in results[:1] if checkable(t) and t.dtype != torch.float16]
    if not wide_results:
        return None
    return range_of(wide_results[0]).absmax if is_finite(wide_results[0]) else math.inf


def _model_line(frame: FrameType | None, shown: Callable[[str], str]) -> tuple[str, str]:
    """("file:line", function) of the innermost line that belongs to a model, ours or the user's."""
    # Below a replay lies the line at which the script has arrived by now, which has nothing to do with the operation.
    while frame is not None and frame.f_code.co_filename != _REPLAYS_A_SCRIPT:
        file = frame.f_code.co_filename
        ours = file.startswith(_PACKAGE) and not file.startswith(_RUNS_THE_MODEL)
        theirs = file.startswith(("<", _PACKAGE, *_LIBRARIES)) or any(part in file for part in _INSTALLED)
        if ours or not theirs:
            return f"{shown(file)}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back
    return "", ""
