"""The script that `blackbox_overhead.py` runs under the black box: blocks of steps with it, without, and in between.

Before each block its ranks switch: everything off (nothing is recorded, and the dispatcher's kernels and the wrappers
of the hot path are taken out), the black box alone, or the numerics guard as well, as `model-check run` has it. The
first steps after a switch are dropped: the interpreter fills its caches again.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from model_check.blackbox import native_collectives, step_phases
from model_check.blackbox.box import BOX
from model_check.blackbox.current_phase import HERE
from model_check.numerics.step_watchers import _Watching

HEAD = 128
VOCABULARY = 32_000


class Block(nn.Module):
    """A transformer's, as people write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 7 * width // 2
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        query, key, value = (part.view(rows, length, -1, HEAD).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        y = self.before_mlp(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Learns the next token in bf16 under autocast; its parameters and gradients are fp32."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = self.head(self.blocks(self.embed(ids[:, :-1])))
        return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class Mlp(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        pairs = [(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
        self.layers = nn.Sequential(*[layer for pair in pairs for layer in pair])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Switch:
    """Takes the black box and the guard out of this process, and puts them back."""

    def __init__(self) -> None:
        self.recorder = BOX.recorder
        wrapped: list[tuple[Any, str]] = [(nn.Module, "__call__"), (torch.autograd, "backward")]
        wrapped += [(_BaseDataLoaderIter, "__next__"), (dist.distributed_c10d, "all_reduce")]
        self._wrapped = [(owner, name, getattr(owner, name)) for owner, name in wrapped]
        tables = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        self._hooks = [(hooks, key, hook) for hooks in tables for key, hook in hooks.items()]

    def to(self, level: str) -> None:
        on = level != "without"
        BOX.recorder = self.recorder if on else None
        native_collectives.install() if on else native_collectives.uninstall()
        for owner, name, function in self._wrapped:
            setattr(owner, name, function if on else inspect.unwrap(function))
        for hooks, key, hook in self._hooks:
            hooks[key] = hook if on else _nothing
        native_collectives.stop_telling(step_phases._exchange_begins)
        _Watching.on = level == "guard"
        if level == "guard" and step_phases._watchers() is not None:
            native_collectives.tell_of_exchanges(step_phases._exchange_begins)


def _nothing(*_: Any) -> None:
    pass


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Endless(IterableDataset[torch.Tensor]):
    def __init__(self, item: torch.Tensor) -> None:
        self._item = item

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self._item


def best(call: Callable[[], object], calls: int = 20, repeats: int = 40) -> float:
    """Microseconds of this thread's CPU time, at best: the rest of the machine only ever adds."""
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            call()
        seconds.append(time.thread_time() - start)
    return min(seconds) / calls * 1e6


def hooks_one_by_one(switch: Switch, device: str) -> dict[str, float]:
    """Microseconds that each adds when it is called in a row."""
    one = torch.ones(8, requires_grad=True)
    nested = nn.Sequential(*[nn.Identity() for _ in range(20)])
    batches = iter(DataLoader(Endless(one), batch_size=None))
    message = torch.ones(8, device=device)
    world = dist.distributed_c10d._get_default_group()
    small = nn.Linear(8, 8)
    small_optimizer = torch.optim.SGD(small.parameters(), lr=0.0)

    def forward_of(module: nn.Module) -> Callable[[], object]:
        def call() -> None:
            HERE.now.forwards_left = 64
            module(one)

        return call

    def small_step() -> None:
        small(one.detach()).sum().backward()
        small_optimizer.step()
        small_optimizer.zero_grad()

    calls: dict[str, Callable[[], object]] = {
        "forward of the outermost module": forward_of(nested[0]),
        "twenty modules inside one": forward_of(nested),
        "backward": lambda: torch.autograd.backward(one.sum()),
        "next of a loader": lambda: next(batches),
        "collective from Python": lambda: dist.distributed_c10d.all_reduce(message),
        "collective from C++": lambda: world.allreduce([message]).wait(),
        "a whole step without collectives": small_step,
    }
    found = {}
    for name, call in calls.items():
        rounds = []
        for level in ("guard", "without", "guard", "without"):
            switch.to(level)
            rounds.append(best(call))
        found[name] = min(rounds[0::2]) - min(rounds[1::2])
    switch.to("guard")
    return found


def main() -> None:
    kind, device = sys.argv[1:3]
    width, depth, batch, length, rounds, steps, dropped, waits = map(int, sys.argv[3:11])
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = Llama(width, depth) if kind == "llama" else Mlp(width, depth)
    net = DDP(model.to(device))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-5)
    rows = batch * (steps + dropped)
    llama = kind == "llama"
    data = TensorDataset(torch.randint(0, VOCABULARY, (rows, length + 1)) if llama else torch.randn(rows, width))
    switch = Switch()

    def block() -> tuple[float, float]:
        # The mean, because the gradients that are read, and their cost, change from step to step.
        start = start_cpu = 0.0
        for number, (x,) in enumerate(DataLoader(data, batch_size=batch)):
            if number == dropped:
                settle()
                start, start_cpu = time.perf_counter(), time.process_time()
            out = net(x.to(device))
            (out if llama else out.square().mean()).backward()
            opt.step()
            opt.zero_grad()
            if waits:
                settle()
        settle()
        return (time.perf_counter() - start) / steps, (time.process_time() - start_cpu) / steps

    switch.to("guard")
    first = switch.recorder.point("step") if switch.recorder is not None else 0
    block()
    records = (switch.recorder.point("step") - first - 1) / (steps + dropped) if switch.recorder is not None else 0
    levels = ["without", "box", "guard"]
    turns = []
    for number in range(rounds):
        order = [levels[(number + place) % 3] for place in range(3)]
        turn = {}
        for level in order if number % 2 else order[::-1]:
            switch.to(level)
            turn[level] = block()
        turns.append(turn)
    told = {
        "turns": turns,
        "records_per_step": records,
        "parameters": sum(p.numel() for p in net.parameters()),
        "hooks_us": hooks_one_by_one(switch, device),
    }
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
