"""A script that trains two models in two threads at once: what one thread does is never looked at from the other."""

from __future__ import annotations

import _thread
import queue
import threading

import pytest

from model_check.blackbox import current_phase
from tests.blackbox.observed_runs import Runner

OBSERVED = {"MODEL_CHECK_GUARD": "observe"}

# The side thread stands still with its gradients made while the main thread does whole steps of its own.
READERS = """
import json, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

readers = set()

class Noted(torch.nn.Parameter):
    @property
    def grad(self):
        readers.add(threading.current_thread().name)
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)

def train(model, turn, other, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        turn.acquire()
        model(torch.randn(4, 8)).square().mean().backward()
        other.release()
        turn.acquire()
        opt.step()
        opt.zero_grad()
        other.release()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
side = torch.nn.Linear(8, 8)
side.weight, side.bias = Noted(side.weight.data), Noted(side.bias.data)
mine, theirs = threading.Semaphore(0), threading.Semaphore(1)
thread = threading.Thread(target=train, args=(side, theirs, mine, 6), name="side")
thread.start()
train(DDP(torch.nn.Linear(8, 8)), mine, theirs, 6)
thread.join()
dist.destroy_process_group()
print(json.dumps(sorted(readers)))
"""

# The side thread does its steps while the main thread is in the middle of a forward, or of an optimizer's step.
IN_BETWEEN = """
import threading
import torch

go, done = threading.Semaphore(0), threading.Semaphore(0)

def let_the_other_do_a_step(*_):
    go.release()
    done.acquire()

class Waits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x):
        let_the_other_do_a_step()
        return self.inner(x)

class Divides(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x, scale):
        return self.inner(x) / scale  # HERE

def train(model, steps, before_update, *more):
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    opt.register_step_pre_hook(before_update)
    for step in range(steps):
        loss = model(torch.randn(6, 4), *(given(step) for given in more)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield

def scale(step):
    scale = torch.ones(6, 1)
    scale[4] = float(step != 4)
    return scale

def side():
    steps = train(Divides(), 8, lambda *_: None, scale)
    go.acquire()
    for _ in steps:
        done.release()
        go.acquire()

thread = threading.Thread(target=side, daemon=True)
thread.start()
for _ in train(Waits(), 4, let_the_other_do_a_step):
    pass
"""

HALTED = """
import threading
import torch

def train(model, scale):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.randn(4, 8)).square().mean() / scale).backward()
    opt.step()

thread = threading.Thread(target=train, args=(torch.nn.Linear(8, 8), 0.0))
thread.start()
thread.join()
print("the side thread is over")
train(torch.nn.Linear(8, 8), 1.0)
print("applied")
"""

TWO_PACES = """
import threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        yield

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
side = train(torch.nn.Linear(8, 8), 99)

def several():
    for _ in range(1 + 2 * dist.get_rank()):
        next(side)

for _ in train(DDP(torch.nn.Linear(8, 8)), 22):
    thread = threading.Thread(target=several)
    thread.start()
    thread.join()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_gradient_is_read_by_the_thread_that_trains_it_alone(run: Runner) -> None:
    outcome = run(READERS, env=OBSERVED)
    assert outcome.codes == [0], outcome.errors
    assert outcome.outputs[0].split() == ['["side"]']
    assert outcome.events("guard_failed") == []


@pytest.mark.slow
def test_a_bad_number_is_judged_with_the_inputs_of_its_own_thread(run: Runner) -> None:
    outcome = run(IN_BETWEEN, env=OBSERVED)
    assert outcome.codes == [0], outcome.errors
    assert outcome.events("guard_failed") == []
    (event,) = outcome.events("nonfinite")
    line = 1 + IN_BETWEEN[: IN_BETWEEN.index("# HERE")].count("\n")
    assert (event["module"], event["location"], event["sample_ids"]) == ("Divides", f"train.py:{line}", [4])
    optimizers = outcome.crumbs(phase="optimizer")
    assert len(optimizers) == 2 * (4 + 8) and not [crumb for crumb in optimizers if "raised" in crumb.detail]


@pytest.mark.slow
def test_a_step_that_is_refused_in_one_thread_ends_the_run(run: Runner) -> None:
    outcome = run(HALTED, env={"MODEL_CHECK_GUARD": "halt"})
    assert outcome.codes == [1] and outcome.outputs[0].splitlines() == ["the side thread is over"]
    assert outcome.errors[0].count("step 0 is not applied: this rank's own pass made its gradients non-finite") == 2
    assert len(outcome.events("nonfinite")) == 1


@pytest.mark.slow
def test_replicas_are_compared_after_as_many_steps_of_their_own(run: Runner) -> None:
    outcome = run(TWO_PACES, world=2, env=OBSERVED)
    assert outcome.codes == [0, 0], outcome.errors
    first, second = ([(e["step"], e["hashes"]) for e in outcome.events("param_hash", rank)] for rank in (0, 1))
    assert [step for step, _ in first] == [0, 10, 20]
    assert first == second


def seen_by_a_thread_of_autograds() -> current_phase.Now:
    """Started past the `threading` module, as those of C++ are."""
    answers: queue.Queue[current_phase.Now] = queue.Queue()
    _thread.start_new_thread(lambda: answers.put(current_phase.open_here()), ())
    return answers.get(timeout=60)


def test_a_thread_of_autograds_works_for_the_only_backward_there_is() -> None:
    mine = current_phase.open_here()
    assert seen_by_a_thread_of_autograds() is not mine
    current_phase.backward_begins(mine)
    current_phase.backward_begins(mine)  # a layer computed anew
    assert seen_by_a_thread_of_autograds() is mine
    current_phase.backward_ended(mine)
    assert seen_by_a_thread_of_autograds() is mine
    current_phase.backward_ended(mine)
    assert seen_by_a_thread_of_autograds() is not mine


def test_of_two_backwards_at_once_a_thread_of_autograds_takes_neither() -> None:
    mine, other = current_phase.open_here(), current_phase.Now()
    current_phase.backward_begins(mine)
    current_phase.backward_begins(other)
    seen = seen_by_a_thread_of_autograds()
    assert seen is not mine and seen is not other
    assert seen.backward and seen.steps is None
    current_phase.backward_ended(other)
    assert seen_by_a_thread_of_autograds() is mine
    current_phase.backward_ended(mine)


def test_a_thread_of_the_scripts_keeps_to_itself_while_another_is_in_backward() -> None:
    mine = current_phase.open_here()
    current_phase.backward_begins(mine)
    answers: queue.Queue[current_phase.Now] = queue.Queue()
    thread = threading.Thread(target=lambda: answers.put(current_phase.open_here()))
    thread.start()
    thread.join()
    current_phase.backward_ended(mine)
    assert not answers.get(timeout=60).backward
