"""The phases of a training step: data, forward, backward, optimizer. The optimizer's step is the step counter."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import torch

from model_check.blackbox import batch_samples, current_phase, memory_marks
from model_check.blackbox.box import BOX, FOLLOWER, SpanKind
from model_check.blackbox.current_phase import (
    BEYOND_THEM_EVERY_S,
    FORWARDS_PER_STEP,
    HERE,
    Now,
    SavedHooks,
    open_here,
    step_around,
)
from model_check.blackbox.exceptions import NOTES
from model_check.blackbox.spans import Original, spanned
from model_check.errors import NumericsError
from model_check.record.events.process import LoaderWorker
from model_check.record.ring import RAISED

_FORWARD = SpanKind("forward")
_OPTIMIZER = SpanKind("optimizer")
_WRAPPED = ("module", "_fsdp_wrapped_module")  # what DDP and FSDP call the module inside


def forget_after_fork() -> None:
    current_phase.forget_after_fork()
    if _watchers.cache_info().currsize and (steps := _watchers()) is not None:
        steps.forget_after_fork()


@functools.cache
def _watchers() -> Any:
    """Who watches the numbers of steps; None where nobody does. Asked for late: torch must be whole by then."""
    steps = FOLLOWER.load()
    if steps is not None:
        from model_check.blackbox import native_collectives

        native_collectives.tell_of_exchanges(_exchange_begins)
    return steps


def _numbers(this: Now) -> Any:
    """Who watches the numbers of this thread's steps; None where nobody does."""
    if this.steps is None and this is HERE.now and (steps := _watchers()) is not None:
        this.steps = steps.of_this_thread()
    return this.steps


def _exchange_begins(exchange: Any) -> Any:
    """Tells the watchers of an exchange, but not inside an optimizer, except in the passes of its closure."""
    this = open_here()
    if this.steps is None:  # a thread that has not trained: what it exchanges is no part of a step
        return None
    if this.forward or this.backward:
        return this.steps.exchange_in_pass(exchange, in_backward=this.backward > 0)
    if this.optimizer is None:
        this.steps.exchange_after_backward(exchange)
    return None


def _during_data(original: Original) -> Original:
    """The same function; it is known while it runs."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        this = HERE.now
        this.data += 1
        try:
            return original(*args, **kwargs)
        finally:
            this.data -= 1

    return call


def _during_backward(original: Original) -> Original:
    """The same function; it is known while it runs."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        this = open_here()
        current_phase.backward_begins(this)
        try:
            return original(*args, **kwargs)
        finally:
            current_phase.backward_ended(this)

    return call


def _handing_out(original: Original) -> Original:
    """Wraps the function to remember which samples it hands out."""

    @functools.wraps(original)
    def call(self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            raise
        except BaseException:
            batch_samples.handed_out(self, None)
            raise
        batch_samples.handed_out(self, batch)
        return batch

    return call


def patch_loader(module: Any) -> None:
    """torch.utils.data.dataloader: each batch, the start of an iterator, and the workers behind it."""
    base = module._BaseDataLoaderIter
    batch_samples.watch(base)
    base.__next__ = spanned(_during_data(_handing_out(base.__next__)), "data", adopt=True)
    module.DataLoader.__iter__ = spanned(
        module.DataLoader.__iter__, "data", describe=lambda args, kwargs: "iter", adopt=True
    )
    several = module._MultiProcessingDataLoaderIter
    start = several.__init__

    @functools.wraps(start)
    def start_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        for number, worker in enumerate(getattr(self, "_workers", ())):
            BOX.event(LoaderWorker(worker_pid=worker.pid, worker_id=number))

    several.__init__ = start_workers


def patch_module_call(module: Any) -> None:
    """torch.nn.modules.module: the outermost module that is called, whatever it is."""
    if "torch._dynamo" in sys.modules:
        # The compiler has already taken down what a module's call looks like; it must not change any more.
        return
    original = module.Module.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        this = HERE.now
        inside = this.forward and this.wrapper is None
        if inside or this.backward or this.data:
            return original(self, *args, **kwargs)
        return _outermost_call(original, self, args, kwargs)

    module.Module.__call__ = __call__


def _outermost_call(original: Original, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder, this = BOX.recorder, open_here()
    # DataParallel calls replicas on threads of its own, in the middle of its forward.
    if this.backward or "_is_replica" in module.__dict__ or (this.wrapper is not None and _is_only_a_way_in(module)):
        return original(module, *args, **kwargs)
    this.forwards_left -= 1
    if recorder is None:
        return original(module, *args, **kwargs)
    if this.forwards_left < 0:
        return _one_of_many(original, module, args, kwargs)
    try:
        NOTES.moved_on()
        span = BOX.begin(recorder, _FORWARD, type(module).__name__)
    except Exception as error:
        BOX.give_up(error)
        return original(module, *args, **kwargs)
    this.forward = True
    around, this.wrapper = this.wrapper, module if _is_only_a_way_in(module) else None
    steps = _numbers(this)
    learns_by_itself = steps is not None and this.wrapper is None
    call = steps.forward_begins(module, args, kwargs, around) if learns_by_itself else None
    try:
        result = original(module, *args, **kwargs)
    except BaseException as error:
        if learns_by_itself:
            steps.forward_failed()
        BOX.end(recorder, _FORWARD, span, f"{RAISED}{type(error).__name__}")
        NOTES.left_a_call(error, "forward")
        raise
    finally:
        this.wrapper, this.forward = around, around is not None
    if learns_by_itself:
        steps.forward_ended(module, args, kwargs, call, result)
    elif steps is not None:
        steps.wrapper_ended(module, args, kwargs)
    BOX.end(recorder, _FORWARD, span)
    return result


def _one_of_many(original: Original, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For forwards beyond the number that a step may record: an occasional mark, after a forward has returned."""
    result = original(module, *args, **kwargs)
    now_s = time.monotonic()
    if now_s >= HERE.now.next_forward_at and (recorder := BOX.recorder) is not None:
        HERE.now.next_forward_at = now_s + BEYOND_THEM_EVERY_S
        try:
            BOX.end(recorder, _FORWARD, BOX.begin(recorder, _FORWARD, type(module).__name__))
        except Exception as error:
            BOX.give_up(error)
    return result


def _is_only_a_way_in(module: Any) -> bool:
    """Lightning calls DDP with a whole training step in place of the forward of the module inside, for this one call.

    Nothing could be run once more: the step writes logs, it may even update the weights. The modules that it calls are
    the model, and what it computes with their results is loss code, as without DDP.
    """
    parts = module.__dict__.get("_modules")
    # A module of TorchScript keeps its parts in something else, and is called by nobody's framework in this way.
    inner = [parts[name] for name in _WRAPPED if name in parts] if isinstance(parts, dict) else []
    forwards = (known.__dict__.get("forward") for known in (module, *inner) if known is not None)
    return any(getattr(forward, "__name__", "") == "wrapped_forward" for forward in forwards)


def patch_autograd(module: Any) -> None:
    """torch.autograd: Tensor.backward comes here too."""
    original = module.backward
    recorded = spanned(_during_backward(original), "backward", adopt=True)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        this = open_here()
        if not this.backward and (steps := _numbers(this)) is not None:
            roots = args[0] if args else kwargs.get("tensors")
            steps.backward_begins(roots[0] if isinstance(roots, (list, tuple)) and roots else roots)
            result = recorded(*args, **kwargs)
            steps.backward_ended()
            return result
        return recorded(*args, **kwargs)

    module.backward = backward


def patch_saved_hooks(module: Any) -> None:
    """Patches torch.autograd.graph to learn whether reading saved tensors would run the script's code."""
    original = module.saved_tensors_hooks.__enter__

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if not SavedHooks.used and not torch.compiler.is_compiling():
            SavedHooks.used = True
        return original(self)

    module.saved_tensors_hooks.__enter__ = enter


def patch_scaler(module: Any) -> None:
    """torch.amp.grad_scaler: which loss is scaled, and whether the optimizer was called."""
    owner = module.GradScaler
    scale, step = owner.scale, owner.step

    @functools.wraps(scale)
    def recorded_scale(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if self.is_enabled() and (steps := _numbers(open_here())) is not None:
            steps.loss_scaled(outputs, result)
        return result

    @functools.wraps(step)
    def recorded_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = _numbers(open_here()) if self.is_enabled() else None
        if steps is None:
            return step(self, optimizer, *args, **kwargs)
        steps.scaler_step_begins()
        result = step(self, optimizer, *args, **kwargs)
        steps.scaler_step_ended(self)
        return result

    owner.scale, owner.step = recorded_scale, recorded_step


def patch_clipping(module: Any) -> None:
    """torch.nn.utils.clip_grad: the norm that a script takes of its gradients, to clip them or to show it."""
    original = getattr(module, "_get_total_norm", None)
    if original is None:
        return

    @functools.wraps(original)
    def total_norm(*args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and (steps := _numbers(open_here())) is not None:
            steps.norm_taken(norm)
        return norm

    module._get_total_norm = total_norm


def patch_optimizer(module: Any) -> None:
    """torch.optim.optimizer: its own hooks, so that every optimizer ever made is covered."""
    module.register_optimizer_step_pre_hook(_before_optimizer)
    module.register_optimizer_step_post_hook(_after_optimizer)


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling():
        return None
    this = open_here()
    looked_at = False
    try:
        caller = step_around(sys._getframe(1)) if this.optimizer is not None else None
        if caller is None:
            _optimizer_begins(optimizer, this)
        else:
            this.optimizer_calls_another = True
            looked_at = _parameters(optimizer) <= _parameters(caller.f_locals["self"])
    except Exception as error:
        BOX.give_up(error)
    steps = _numbers(this)
    if steps is None or looked_at:
        return None
    if "closure" in kwargs and kwargs["closure"] is not None:
        return args, {**kwargs, "closure": _checked_after(kwargs["closure"], optimizer, steps)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked_after(args[1], optimizer, steps), *args[2:]), kwargs
    try:
        steps.optimizer_begins(optimizer)
    except NumericsError as refused:
        # Without the lines on the way to it: they are ours, and tell the script's author nothing.
        raise refused.with_traceback(None) from None
    return None


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _checked_after(closure: Original, optimizer: Any, steps: Any) -> Original:
    """A closure makes the gradients inside the optimizer's own step: they are looked at when it has."""

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        try:
            steps.optimizer_begins(optimizer)
        except NumericsError as refused:
            raise refused.with_traceback(None) from None
        return result

    return call


def _optimizer_begins(optimizer: Any, this: Now) -> None:
    recorder = BOX.recorder or BOX.adopt()
    if recorder is None or BOX.thread.depth:
        return
    NOTES.moved_on()
    if this.optimizer is not None:
        # The last one raised: torch calls no hook then.
        BOX.end(this.optimizer[0], _OPTIMIZER, this.optimizer[1], "raised")
    this.optimizer = recorder, BOX.begin(recorder, _OPTIMIZER, type(optimizer).__name__)
    this.optimizer_calls_another = False


def _after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or (this := open_here()).optimizer is None:
        return
    if this.optimizer_calls_another and step_around(sys._getframe(1)) is not None:
        return
    recorder, span = this.optimizer
    this.optimizer = None
    if recorder is not BOX.recorder:
        return
    BOX.end(recorder, _OPTIMIZER, span)
    BOX.step_done(recorder)
    if (steps := _numbers(this)) is not None:
        steps.step_done()
    this.forwards_left = FORWARDS_PER_STEP
    memory_marks.mark_now_and_then()
