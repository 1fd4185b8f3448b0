"""Keeps torch's compiler out of our code: a script's graphs, numbers and warnings stay as they are without us.

Dynamo looks at every Python frame that runs inside a compiled call, and would compile ours like the script's own. We
make it skip each of our functions; script functions that ours call are still compiled. If Dynamo meets one of our
wrappers while tracing, it inlines it, and the wrapper calls straight through: it first checks
`torch.compiler.is_compiling()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from model_check.blackbox.box import BOX, FOLLOWER
from model_check.record.events.memory import RecordingFailed

# Our code that runs inside a script. Our own trainer's model is compiled like any other.
OURS = ("model_check.blackbox.", "model_check.numerics.", "model_check.record.")
_GENERATED = "<string>"  # the methods of dataclasses and named tuples
_EVAL_FRAME = "torch._dynamo.eval_frame"


def patch_eval_frame(module: ModuleType) -> None:
    """Right after torch._dynamo.eval_frame is imported: skips all our modules loaded so far."""
    for name, known in list(sys.modules.items()):
        if name.startswith(OURS):
            _leave_alone(known, module)


def imported(module: ModuleType) -> None:
    """Skips a module of ours that is loaded later."""
    eval_frame = sys.modules.get(_EVAL_FRAME)
    if eval_frame is not None:
        _leave_alone(module, eval_frame)


def _leave_alone(module: ModuleType, eval_frame: ModuleType) -> None:
    """If this torch has another API for it, some of our code is compiled, which only costs time."""
    skip = _skip_all_below(eval_frame) if module.__name__ == FOLLOWER.module else None
    skip = skip or getattr(eval_frame, "skip_code", None)
    if skip is None:
        return
    try:
        for code in _code_in(vars(module).values(), module.__name__):
            skip(code)
    except (TypeError, RuntimeError) as error:
        BOX.event(RecordingFailed.by(error))


def _skip_all_below(eval_frame: Any) -> Callable[[CodeType], Any] | None:
    """Skips also everything a function calls, such as the standard library. torch 2.6 lacks this."""
    if not all(hasattr(eval_frame, name) for name in ("set_code_exec_strategy", "FrameExecStrategy", "FrameAction")):
        return None
    skip = eval_frame.FrameAction.SKIP
    return lambda code: eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(skip, skip))


def _code_in(values: Any, module: str) -> Iterator[CodeType]:
    """Code of functions, of methods (including generated ones), and of functions nested in them.

    A third-party decorator shares its code with functions that are not ours, so only the function it wraps counts.
    """
    for value in list(values):
        if isinstance(value, type) and value.__module__ == module:
            yield from _code_in(vars(value).values(), module)
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        while isinstance(function, FunctionType):
            if function.__globals__.get("__name__") == module or function.__code__.co_filename == _GENERATED:
                yield from _with_inner(function.__code__)
            function = getattr(function, "__wrapped__", None)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
