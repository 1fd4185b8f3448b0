"""What reading all gradients in every step would cost a DDP script on a GPU, however they are read.

    python benchmarks/whole_look.py --model llama         four layers of the 8B shape in bf16, fp32 gradients
    python benchmarks/whole_look.py --model mlp           eight fp32 layers

It is why the guard of any script reads a part in most steps (docs/lab-notes.md). Each bucket of DDP is read before its
exchange: by `torch.sum`, or by a kernel of one warp a block that needs hardly anything of a multiprocessor; in line
with the backward pass, or on a stream beside it. Blocks of steps take turns with blocks that read nothing, of which
there are two, so that the difference between those two tells what the machine's noise is.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from blackbox_overhead import interval
from result_file import result_path, write_result
from steps_in_turns import VOCABULARY, Llama, Mlp
from torch.nn.parallel import DistributedDataParallel as DDP

NUMBERS = 512  # that one warp reads at a time: 16 for each of its threads


@triton.jit
def _any_bad(gradients, answer, length, numbers: tl.constexpr):
    """Each program goes over its share of the gradients with one warp, and writes only when a number is not finite."""
    place = tl.arange(0, numbers)
    worst = tl.zeros((numbers,), tl.float32)
    for start in range(tl.program_id(0) * numbers, length, tl.num_programs(0) * numbers):
        here = start + place
        # Of a number that is not finite, zero times it is NaN; NaN stays in a sum.
        worst += 0.0 * tl.load(gradients + here, mask=here < length, other=0.0).to(tl.float32)
    worst = tl.sum(worst, 0)
    if worst != worst:
        tl.store(answer, worst)


@dataclass(frozen=True)
class Way:
    """Of reading a bucket: `blocks` to a multiprocessor with one warp each, or `torch.sum` where there are none."""

    beside: bool
    blocks: int = 0

    @property
    def name(self) -> str:
        kernel = f"one warp, {self.blocks} blocks a multiprocessor" if self.blocks else "torch.sum"
        return f"{kernel}, {'beside' if self.beside else 'in line'}"

    def read(self, gradients: torch.Tensor, answer: torch.Tensor) -> None:
        if not self.blocks:
            torch.sum(gradients, dim=(0,), out=answer)
            return
        grid = self.blocks * torch.cuda.get_device_properties(gradients.device).multi_processor_count
        _any_bad[(grid,)](gradients, answer, gradients.numel(), NUMBERS, num_warps=1)


WAYS = [Way(beside=False), Way(beside=True), Way(False, blocks=16), Way(True, blocks=16), Way(True, blocks=1)]
NOTHING, NOTHING_AGAIN = "nothing", "nothing, again"


class Exchange:
    """DDP's communication hook: reads each bucket in the way that is set, then sums it over the ranks."""

    def __init__(self) -> None:
        self.way: Way | None = None
        self.answers: list[torch.Tensor] = list(torch.zeros(256, device="cuda").unbind())
        self.read = 0
        self._beside = torch.cuda.Stream()

    # DDP asks for these very types: annotations must not be postponed in this file.
    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        if self.way is None:
            return _summed(gradients)
        answer = self.answers[self.read % len(self.answers)]
        self.read += 1
        if not self.way.beside:
            self.way.read(gradients, answer)
            return _summed(gradients)
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self.way.read(gradients, answer)
            return _summed(gradients)  # after the reading, which the exchange would otherwise overtake


def _summed(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def blocks_of(kind: str, steps: int) -> tuple[Exchange, Callable[[], float], int]:
    """The hook; a function that trains `steps` steps and returns the seconds of the mean one; the gradients' bytes."""
    llama = kind == "llama"
    torch.manual_seed(0)
    net = DDP((Llama(4096, 4) if llama else Mlp(2048, 8)).cuda())
    batch = torch.randint(0, VOCABULARY, (4, 2049), device="cuda") if llama else torch.randn(1024, 2048, device="cuda")
    exchange = Exchange()
    net.register_comm_hook(None, exchange.hook)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)

    def block() -> float:
        start = 0.0
        for number in range(-1, steps):
            if number == 0:  # the step before it belongs to the switch
                torch.cuda.synchronize()
                start = time.perf_counter()
            out = net(batch)
            (out if llama else out.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    return exchange, block, sum(p.numel() * p.element_size() for p in net.parameters())


def check(way: Way) -> None:
    """A way that misses a bad number, or sees one where there is none, has no price."""
    gradients, answer = torch.randn(1_000_003, device="cuda"), torch.zeros((), device="cuda")
    way.read(gradients, answer)
    assert answer.isfinite(), f"{way.name} called good gradients bad"
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 777_777, len(gradients) - 1):
            spoilt = gradients.clone()
            spoilt[place] = bad
            way.read(spoilt, answer.zero_())
            assert not answer.isfinite(), f"{way.name} missed {bad} at {place}"


def measure(kind: str, rounds: int, steps: int) -> dict[str, object]:
    exchange, block, size = blocks_of(kind, steps)
    levels: dict[str, Way | None] = {NOTHING: None, NOTHING_AGAIN: None} | {way.name: way for way in WAYS}
    names = list(levels)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round compiles, and counts for nothing
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else turned[::-1]:
            exchange.way = levels[name]
            took = block()
            if number >= 0:
                seconds[name].append(took)
    usual = [(a + b) / 2 for a, b in zip(seconds[NOTHING], seconds[NOTHING_AGAIN], strict=True)]
    shares = {name: [took / base - 1 for took, base in zip(seconds[name], usual, strict=True)] for name in names}
    print(f"{kind}: a step without reading {statistics.median(usual) * 1e3:.1f} ms, {size / 1e9:.2f} GB of gradients")
    for name, share in shares.items():
        low, high = interval(share)
        print(f"  {name:42s} {statistics.median(share):7.2%} (95 %: {low:.2%} to {high:.2%})")
    return {
        "gradient_bytes": size,
        "step_ms": statistics.median(usual) * 1e3,
        "cost": {name: {"median": statistics.median(s), "interval": interval(s)} for name, s in shares.items()},
        "ways": [asdict(way) | {"name": way.name} for way in WAYS],
        "rounds": rounds,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("mlp", "llama"), default="llama")
    parser.add_argument("--rounds", type=int, default=16, help="blocks of each kind, in turns (default 16)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block (default 4)")
    parser.add_argument("--out", type=Path, help="the file to write; by default one of today in benchmarks/results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU: torch sees none here")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    for way in WAYS:
        check(way)
    result = {"model": options.model} | measure(options.model, options.rounds, options.steps)
    write_result(options.out or result_path(f"whole-look-{options.model}"), result, ("torch", "triton"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
