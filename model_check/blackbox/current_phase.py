"""What each thread of the script is in the middle of: a batch, a forward, a backward, an optimizer's step.

Of a thread, not of the process: a script may train two models at once. Whatever one thread has begun is asked about
from that thread alone. torch is not made for more: to ask a parameter for its gradient while another thread lets it go
ruins the heap, and the process crashes there or later (seen in torch 2.13).
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from model_check.blackbox.recorder import Recorder

# A loop that calls a tiny network thousands of times a step would feel the records, and fill the ring with them.
FORWARDS_PER_STEP = 64
BEYOND_THEM_EVERY_S = 0.5  # so that an evaluation of a thousand forwards still shows progress


class Now:
    """What is open at the moment. With slots: assigning to a class would throw away the interpreter's caches."""

    __slots__ = (
        "backward",
        "data",
        "forward",
        "forwards_left",
        "next_forward_at",
        "optimizer",
        "optimizer_calls_another",
        "steps",
        "wrapper",
    )

    def __init__(self, backward: int = 0) -> None:
        self.data = 0
        self.forward = False
        self.wrapper: Any = None  # the module that is called, while a framework runs a method of its own in there
        self.backward = backward
        self.forwards_left = FORWARDS_PER_STEP
        self.next_forward_at = 0.0  # monotonic seconds: once no forwards are left, no record before this time
        self.optimizer: tuple[Recorder, int] | None = None
        self.optimizer_calls_another = False  # its step has called that of its base class, or of another optimizer
        self.steps: Any = None  # who watches the numbers of its steps, once somebody does


class _Here(threading.local):
    """This thread's own. Those that no Python code has started are autograd's: the backward of a GPU runs there."""

    def __init__(self) -> None:
        here = threading.get_ident()
        python = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        self.is_the_scripts = any(thread.ident == here for thread in python)
        self.now = Now()


HERE = _Here()
_BACKWARDS: list[Now] = []
_NOBODY_KNOWS_WHOSE = Now(backward=1)


def open_here() -> Now:
    """That of this thread; on a thread of autograd's own, that of the thread whose backward it works for."""
    this = HERE.now
    if HERE.is_the_scripts or this.backward or not (others := tuple(_BACKWARDS)):
        return this
    return others[0] if len(others) == 1 else _NOBODY_KNOWS_WHOSE


def backward_begins(this: Now) -> None:
    """One may begin another in its middle: a layer that is computed anew does."""
    this.backward += 1
    if this.backward == 1:
        _BACKWARDS.append(this)


def backward_ended(this: Now) -> None:
    this.backward -= 1
    if not this.backward and this in _BACKWARDS:  # it is not in the child of a fork in its middle
        _BACKWARDS.remove(this)


def step_around(step: FrameType) -> FrameType | None:
    """The optimizer's step that called this one. Both are frames of the wrapper with which torch calls the hooks.

    torch wraps the step of each class: one that calls `super().step()`, or an optimizer of its own, comes twice.
    """
    above = step.f_back
    while above is not None and above.f_code is not step.f_code:
        above = above.f_back
    return above


def forget_after_fork() -> None:
    HERE.now = Now()
    _BACKWARDS.clear()


class SavedHooks:
    """Whether the script installs autograd hooks for saved tensors, as activation checkpointing does.

    Reading a saved number would then run the model's forward again, including its side effects.
    """

    used = False
