"""Finds the rank whose gradients are not finite: looks at a foreign script's gradients before ranks exchange them.

Buckets of DistributedDataParallel, units of FSDP and flat buffers of other libraries pass the dispatcher in the middle
of `backward`, on their way into a reduction. There the sum of each is checked. A script that exchanges its gradients
itself does so after `backward`: all of them are checked before its first exchange. If nothing is exchanged, they are
checked when the optimizer is about to step. A GPU answers later, in one copy a pass; nobody waits for it.

Activations are reduced too, in both passes, by tensor parallelism and by batch norms over all ranks: one rank's bad
number comes back to all of them, and from then on each brings bad gradients. So the inputs of these reductions are
checked as well, and the number of the first bad one is kept: the rank with the lowest number was first.

On the CPU, and with `--guard full`, all gradients are read in every step. On a GPU they are read in turns, because
reading takes memory bandwidth, whatever the script computes, and each kernel delays the others: every eighth bucket is
read in full. The next step reads other buckets, so each has its turn within eight steps. The last two buckets before
the optimizer are checked in every step: a bad number that spreads on its way back from the loss has reached them by
then. One in eight of their groups of 32 numbers is read, and other groups in the next step. That is enough, because
every row of a weight has many groups.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from model_check.blackbox.device_numbers import Reading, capturing, gradient_of, local, norms_of
from model_check.blackbox.native_collectives import Exchange
from model_check.numerics.finite import LocalCheck, checkable, is_finite
from model_check.numerics.hits import peers_met
from model_check.record.events.numerics import Brought

TURNS = 8  # steps until every bucket has been read
LAST = 2  # buckets that are looked at in every step
_GROUP = 32  # numbers
_SMALL = 1 << 16  # numbers that are read in full: biases, norms
_FRAMES_UP = 16
_STEPS_SEARCHED = 3
_FUNCTIONS = torch.autograd.function.__file__
_ENGINE = torch.autograd.graph.__file__
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "._flat_param", "_flat_param")


@dataclass(frozen=True)
class Turn:
    """What is read in one step, of gradients that are read in turns."""

    step: int = 0
    buckets: int = 0  # number of buckets in the previous step; 0: not known yet

    def of_bucket(self, bucket: torch.Tensor, number: int) -> torch.Tensor | None:
        """The part of a bucket to read: all of it, some groups, or None. `number` counts from 1."""
        if number % TURNS == self.step % TURNS:
            return bucket
        return self._groups(bucket) if number > self.buckets - LAST else None

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """One contiguous eighth, because torch reads many tensors at once only if they are contiguous."""
        if _read_in_full(gradient):
            return gradient
        length = -(-gradient.numel() // (_GROUP * TURNS)) * _GROUP
        start = min(self.step % TURNS * length, gradient.numel() - _GROUP)
        return gradient.view(-1)[start : start + length]

    def _groups(self, bucket: torch.Tensor) -> torch.Tensor:
        """Every eighth group of 32 numbers. The remainder at the end is read only when the whole bucket is."""
        if _read_in_full(bucket):
            return bucket
        whole = bucket.numel() // (_GROUP * TURNS) * _GROUP * TURNS
        return bucket.view(-1)[:whole].view(-1, TURNS, _GROUP)[:, self.step % TURNS]


def _read_in_full(tensor: torch.Tensor) -> bool:
    return tensor.numel() < _SMALL or not tensor.is_contiguous()


@dataclass(frozen=True)
class Piece:
    """Something that was looked at."""

    name: str  # in words, without "the"
    exchange: int = 0  # its number among the exchanges of the step's passes, from 1; 0: it was in none of them
    group: Any = ""  # the name of the process group: a str, for which torch has a type of its own
    spreads: bool = False  # what comes back goes on through the pass: it holds no gradients of parameters

    def brought(self) -> Brought | None:
        if not self.exchange:
            return None
        try:
            group = torch.distributed.distributed_c10d._resolve_process_group(self.group)
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
        except (RuntimeError, ValueError, KeyError):  # it has been destroyed since
            return None
        return Brought(self.exchange, ranks, self.spreads)


@dataclass(frozen=True)
class Looked:
    """What a look at a step's gradients will show, once the device has answered."""

    parts: Sequence[tuple[Sequence[Piece], Reading]]  # the nearest to the loss first
    numbers: int  # how many of gradients were looked at
    before_exchange: bool
    in_full: bool = True  # of none of them only a part
    bad_now: Sequence[Piece] = ()  # bad ones that are known already, in their order
    earlier: Looked | None = None  # at what went through the passes
    mixed_at: int = 0  # the first exchange whose result went on through a pass; 0: none

    @property
    def ready(self) -> bool:
        return all(reading.ready for _, reading in self.parts) and (self.earlier is None or self.earlier.ready)

    def bad(self) -> str:
        """The first gradient that was not finite, in words; empty where all were. Waits for the device."""
        return next((piece.name for piece in self.all_bad() if not piece.spreads), "")

    def brought(self, usual: Container[int] = ()) -> Brought | None:
        """The first exchange to which this rank brought a bad number, but for those of which that is known as usual."""
        pieces = [piece for piece in self.all_bad() if piece.exchange and piece.exchange not in usual]
        return min(pieces, key=lambda piece: piece.exchange).brought() if pieces else None

    def all_bad(self) -> list[Piece]:
        found = [*(self.earlier.all_bad() if self.earlier is not None else ()), *self.bad_now]
        for pieces, reading in self.parts:
            for number, value in enumerate(reading.value()):
                piece = pieces[min(number, len(pieces) - 1)]
                if math.isnan(value) if piece.spreads else not math.isfinite(value):
                    found.append(piece)
        return found


@dataclass
class _Pieces:
    """What was looked at in the passes of the step in progress."""

    looked_at: dict[torch.device, list[Piece]] = field(default_factory=dict)
    numbers: int = 0  # how many numbers of gradients were read
    in_full: bool = True  # no gradient was left out or read only in part
    buckets: int = 0  # whether or not they were read
    exchanges: int = 0  # whether or not they were looked at
    mixed_at: int = 0  # the first of them whose result went on through a pass; 0: none
    seen: set[int] = field(default_factory=set)  # parameters whose gradients have been
    bad_now: list[Piece] = field(default_factory=list)


class OwnGradients:
    """Looks at the gradients of one process, step by step."""

    def __init__(self, *, in_turns: Container[str]) -> None:
        self.in_turns = in_turns  # device types whose gradients are read in turns
        self.left_out = False  # whether a gradient of a step was left out
        self._turn = Turn()
        self._checks: dict[torch.device, LocalCheck] = {}
        self._names: dict[int, str] = {}  # of parameters
        self._units: dict[int, str] = {}  # of FSDP, by their flat parameters
        self._buckets: dict[tuple[int, int], str] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._usual: set[int] = set()  # exchanges of a pass that bring NaN in good health too, a metric of nothing
        self._in_shards: set[int] = set()  # parameters that show only this rank's part of them
        self._pieces = _Pieces()
        self._computed = False
        self._has_peers = False
        self.forget()

    def forget(self) -> None:
        """A new step begins."""
        if self._computed:
            self._turn = Turn(self._turn.step + 1, self._pieces.buckets)
        self.left_out = self.left_out or not self._pieces.in_full
        self._pieces = _Pieces()
        self._looked: Looked | None = None
        self._earlier: Looked | None = None
        self._computed = False
        self._sought = False
        self._exchanged = False

    def learn_names(self, module: Any) -> None:
        """What its parameters are called and look like; the first time that a module is seen."""
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = _plain(name)
            self._shapes.add(tuple(parameter.shape))
        for name, part in module.named_modules():
            if any(base.__name__ == "FullyShardedDataParallel" for base in type(part).__mro__):
                self._in_shards.update(map(id, part.parameters()))
                # With `use_orig_params` it is no parameter of the module's.
                flat = getattr(part, "_flat_param", None)
                if flat is not None:
                    self._units.setdefault(id(flat), _plain(f"{name}."))

    def sharded(self, parameters: Iterable[Any]) -> bool:
        """This rank holds parts of the parameters: as DTensors, in FSDP's flat ones, or as views of those."""
        return any(map(self._is_shard, parameters))

    @property
    def so_far(self) -> Looked | None:
        """What was seen of this step, as far as the device has answered."""
        return self._looked if self._looked is not None and self._looked.ready else None

    def _is_shard(self, parameter: Any) -> bool:
        own = id(parameter) in self._in_shards
        return own or hasattr(parameter, "_local_tensor") or hasattr(parameter, "_sharded_size")

    # Before an exchange

    def backward_begins(self, trained: Iterable[Any]) -> None:
        """More is added to the gradients: what was seen of them after an earlier pass is no longer all."""
        if self._computed:
            shards = [parameter for parameter in trained if self._is_shard(parameter)]
            if shards and all(parameter.grad is None for parameter in shards):
                self.forget()  # thrown away without a step; where a rank holds whole ones, its gradients tell
        self._looked = None
        self._computed = True
        self._sought = False

    def exchange_in_forward(self, exchange: Exchange) -> None:
        """What a rank brings there are activations, or sums over them."""
        self._pieces.exchanges += 1
        self._look_at_activations(exchange)

    def exchange_in_backward(self, exchange: Exchange, modules: Iterable[Any]) -> torch.cuda.Stream | None:
        """Gradients of parameters travel in flat buffers, or as they are; others are those of activations."""
        pieces, given, behind = self._pieces, exchange.given, None
        pieces.exchanges += 1
        unit, of_activations = _who_reduces(sys._getframe(1), self._known)
        gradients = [t for t in given if not of_activations and (t.dim() == 1 or tuple(t.shape) in self._shapes)]
        if not given and (bucket := _bucket_of_hook(sys._getframe(1), modules)) is not None:
            # A communication hook that gathers, or sends: its bucket is added up by nobody, and still this rank's own.
            unit, gradients = self._several(bucket.parameters()), [bucket.buffer()]
        self._exchanged = self._exchanged or bool(gradients) or not given
        self._meets_peers()
        for tensor in self._readable(gradients):
            pieces.buckets += 1
            read = self._turn.of_bucket(tensor, pieces.buckets) if self._in_turns(tensor) else tensor
            name = unit or self._bucket_name(pieces.buckets - 1, tensor, modules)
            pieces.in_full = pieces.in_full and read is tensor
            if read is not None:
                piece = Piece(name, pieces.exchanges, _name_of(exchange.group))
                pieces.numbers += read.numel()
                behind = self._look(read, piece, modules, overlaps=exchange.overlaps) or behind
        if not gradients:
            self._look_at_activations(exchange)
        return behind

    def _look_at_activations(self, exchange: Exchange) -> None:
        if any(tensor.is_floating_point() for tensor in exchange.given):
            self._pieces.mixed_at = self._pieces.mixed_at or self._pieces.exchanges
        for tensor in self._readable(exchange.given):
            group = _name_of(exchange.group)
            piece = Piece("what goes through a pass", self._pieces.exchanges, group, spreads=True)
            self._look(tensor, piece, (), overlaps=False)

    def _readable(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Nothing while somebody records every operation of torch's: ours would be among them."""
        plain = [t for tensor in given if (t := local(tensor)) is not None and checkable(t) and t.numel()]
        if plain and (capturing(plain[0]) or torch._C._len_torch_dispatch_stack()):
            self.left_out = True
            return []
        return plain

    def _in_turns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in self.in_turns

    def _look(
        self, tensor: torch.Tensor, piece: Piece, modules: Iterable[Any], *, overlaps: bool
    ) -> torch.cuda.Stream | None:
        """Behind the stream that is returned the tensor may be written to."""
        looked_at = self._pieces.looked_at.setdefault(tensor.device, [])
        looked_at.append(piece)
        with torch.no_grad():
            if tensor.is_cpu:
                total = torch.sum(tensor, dtype=torch.float32).item()
                if piece.spreads:
                    self._pieces.bad_now += [piece] * math.isnan(total)  # masks and maxima contain infinities by design
                elif not math.isfinite(total) and not is_finite(tensor):
                    bad = replace(piece, name=self._named_now(tensor, modules) or piece.name)
                    self._pieces.bad_now.append(bad)
                return None
            check = self._checks.get(tensor.device)
            if check is None:
                check = self._checks[tensor.device] = LocalCheck(tensor.device)
            if len(looked_at) == 1:  # not when a step is forgotten: a forked child does that too, and has no device
                check.begin()
            if overlaps:
                return check.look_beside(tensor)
            check.look(tensor)
            return None

    def _bucket_name(self, number: int, bucket: torch.Tensor, modules: Iterable[Any]) -> str:
        """Which parameters' gradients it holds: those that have one since the last, if their sizes add up to it.

        DDP lays them out anew after its first step, and then holds the same ones in the same bucket: it is enough to
        search in the first few.
        """
        key = number, bucket.numel()
        if self._turn.step < _STEPS_SEARCHED:
            seen = self._pieces.seen
            new = [p for m in modules for p in m.parameters() if p.grad is not None and id(p) not in seen]
            seen.update(map(id, new))
            if new and sum(p.numel() for p in new) == bucket.numel():
                self._buckets[key] = self._several(new)
        return self._buckets.get(key) or f"gradients of reduction {number + 1}, counted from the loss,"

    def _several(self, parameters: Sequence[Any]) -> str:
        """Their gradients, in words: from the nearest to the loss to the farthest."""
        wanted = set(map(id, parameters))
        names = [name for known, name in self._names.items() if known in wanted]
        if len(names) < 2:
            return self._name(parameters[0])
        return f"gradients of {names[-1]} to {names[0]}"

    def _named_now(self, bucket: torch.Tensor, modules: Iterable[Any]) -> str:
        """The parameter nearest to the loss whose gradient is bad, while the gradients are still those of this rank.

        A gradient may live in the bucket itself; then those in other buckets may be a peer's by now.
        """
        place = bucket.untyped_storage().data_ptr()
        with_gradient = [
            (parameter, gradient)
            for module in modules
            for parameter in module.parameters()
            if (gradient := gradient_of(parameter)) is not None and gradient.numel()
        ]
        inside = [item for item in with_gradient if item[1].untyped_storage().data_ptr() == place]
        bad = [parameter for parameter, gradient in inside or with_gradient if not is_finite(gradient)]
        return self._name(bad[-1]) if bad else ""

    def backward_ended(self) -> None:
        """Sends for the answers: by the time the optimizer is called they may be here."""
        pieces = self._pieces
        if not pieces.looked_at:
            return
        parts = [(looked_at, self._sums(device)) for device, looked_at in pieces.looked_at.items()]
        self._earlier = Looked(
            parts,
            pieces.numbers,
            before_exchange=True,
            in_full=pieces.in_full,
            bad_now=tuple(pieces.bad_now),
            mixed_at=pieces.mixed_at,
        )
        if pieces.numbers:  # activations alone say nothing of gradients that are still to be exchanged, or never are
            self._looked = self._earlier

    def _sums(self, device: torch.device) -> Reading:
        if device.type == "cpu":
            return Reading([])
        check = self._checks[device]
        with check.beside():
            return Reading.of(check.sums())

    def exchange_after_backward(self, parameters: Callable[[], Sequence[Any]]) -> None:
        """The script's own exchange begins: what it has computed is still its own."""
        if self._computed and not self._sought and self._looked is None:
            self._sought = True  # before its first call only, also where there was nothing to be seen
            self._looked = self._look_at(parameters(), before_exchange=not self._exchanged)
        self._exchanged = self._exchanged or self._computed
        self._meets_peers()

    def _meets_peers(self) -> None:
        if not self._has_peers:
            self._has_peers = True
            peers_met()

    def brought(self, looked: Looked | None) -> Brought | None:
        """Where the bad number of this step first left this rank, as far as that is known."""
        return looked.brought(self._usual) if looked is not None else None

    @property
    def mixed_at(self) -> int:
        """The first exchange of the step in progress whose result went on through a pass; 0: none."""
        return self._pieces.mixed_at

    def step_was_good(self, looked: Looked | None) -> None:
        """Whatever was brought to its exchanges is no sign of a fault."""
        if looked is not None:
            self._usual.update(piece.exchange for piece in looked.all_bad() if piece.spreads)

    # Where nothing was exchanged

    def at_the_optimizer(self, parameters: Sequence[Any]) -> Looked | None:
        """What is known of this step's gradients; None if none can be read."""
        if self._looked is None:
            return self._look_at(parameters, before_exchange=not self._exchanged)
        return self._looked

    def _look_at(self, parameters: Sequence[Any], *, before_exchange: bool) -> Looked | None:
        by_device: dict[torch.device, tuple[list[Piece], list[torch.Tensor]]] = {}
        in_full = True
        for parameter in reversed(parameters):
            gradient = gradient_of(parameter)
            if gradient is not None and gradient.numel() and checkable(gradient):
                whole = gradient.detach()
                read = self._turn.of_gradient(whole) if self._in_turns(whole) else whole
                in_full = in_full and read is whole
                pieces, gradients = by_device.setdefault(gradient.device, ([], []))
                pieces.append(Piece(self._name(parameter)))
                gradients.append(read)
        parts, numbers = [], 0
        for pieces, gradients in by_device.values():
            if (norms := norms_of(gradients)) is None:
                self.left_out = True
                return None
            parts.append((pieces, norms))
            numbers += sum(gradient.numel() for gradient in gradients)
        self._pieces.in_full = self._pieces.in_full and in_full
        looked = Looked(parts, numbers, before_exchange, in_full, earlier=self._earlier, mixed_at=self._pieces.mixed_at)
        return looked if parts else None

    def _name(self, parameter: Any) -> str:
        return self._known(parameter) or f"gradient of a parameter of shape {tuple(parameter.shape)}"

    def _known(self, parameter: Any) -> str:
        """Its gradient in words; empty: nobody has told its name."""
        if (name := self._names.get(id(parameter))) is not None:
            return f"gradient of {name}"
        unit = self._units.get(id(parameter))
        return f"gradients of {unit}" if unit is not None else ""


def _plain(name: str) -> str:
    """What the script's own module is called, without those that were put around it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.").removesuffix(".") or "the root module"


def _name_of(group: Any) -> str:
    return str(torch.distributed.ProcessGroup.unbox(group).group_name)


def _who_reduces(frame: FrameType | None, known: Callable[[Any], str]) -> tuple[str, bool]:
    """The unit whose gradients FSDP is about to reduce, in words, and whether an autograd.Function is in its backward.

    FSDP calls its own reductions out of such a function too; anybody else's there are of activations.
    """
    inside_function = False
    for _ in range(_FRAMES_UP):
        if frame is None:
            break
        called = frame.f_code.co_name
        if called == "post_backward":
            unit = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            return f"gradients of {unit or 'the root module'}", False
        if called == "_post_backward_hook":
            return known(getattr(frame.f_locals.get("handle"), "flat_param", None)), False
        inside_function = inside_function or (called == "apply" and frame.f_code.co_filename == _FUNCTIONS)
        frame = frame.f_back
    return "", inside_function


def _bucket_of_hook(frame: FrameType | None, modules: Iterable[Any]) -> Any:
    """The `GradBucket` that DDP has handed to the communication hook in which this call is made; None outside of one.

    A hook may exchange its bucket in any way, also without adding it up: what it was handed is still this rank's own.
    """
    if not any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in modules):
        return None
    for _ in range(_FRAMES_UP):
        if frame is None or frame.f_code.co_filename == _ENGINE:
            break
        for value in frame.f_locals.values():
            if isinstance(value, torch.distributed.GradBucket):
                return value
        frame = frame.f_back
    return None
