"""Frameworks under the black box: the same output as without it, and their phases in the ring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from model_check.record import RunDir
from tests.blackbox.observed_runs import run_ranks

FSDP2 = """\
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)) for _ in range(3)])
for block in net:
    fully_shard(block)
fully_shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for _ in range(5):
    loss = net(torch.randn(4, 16)).square().mean()
    loss.backward()
    print(repr(loss.item()), torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor().item())
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
"""

COMPILED = """\
import torch, torch.distributed as dist
import torch._dynamo
dist.init_process_group("gloo")
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total.mean()

net = torch.compile(Net(), backend="aot_eager")
whole = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), backend="aot_eager", fullgraph=True)
opt = torch.optim.AdamW([*net.parameters(), *whole.parameters()], lr=1e-2)
for _ in range(4):
    loss = whole(net(torch.randn(4, 8))).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(repr(loss.item()))
counters = torch._dynamo.utils.counters
print(sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])
dist.destroy_process_group()
"""

COMPILED_DDP = """\
import functools
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

net = Net()
compiled = functools.partial(torch.compile, backend="aot_eager")
model = DDP(compiled(net)) if HOW == "inside" else compiled(DDP(net))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for _ in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(repr(loss.item()))
from torch._dynamo.convert_frame import input_codes
counters = torch._dynamo.utils.counters
print(sorted(counters["graph_break"].items()), counters["stats"], counters["frames"])
codes = [code for seen in input_codes.seen if (code := seen()) and "/torch/" not in code.co_filename]
print(*sorted({f"{code.co_filename} {code.co_name}" for code in codes}), sep="\\n")
dist.barrier()
dist.destroy_process_group()
"""

TRAINER = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
data = [{"input_ids": torch.arange(n, n + 8) % 64, "labels": torch.arange(n, n + 8) % 64} for n in range(32)]
quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1}
arguments = TrainingArguments("out", max_steps=5, per_device_train_batch_size=2, use_cpu=True, save_steps=5, **quiet)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
trainer.train()
print([repr(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "world", "steps", "phases"),
    [
        pytest.param(FSDP2, 2, 5, {"forward", "backward", "optimizer", "collective"}, id="fsdp2"),
        pytest.param(COMPILED, 1, 4, {"forward", "backward", "optimizer", "collective"}, id="compiled"),
        pytest.param(TRAINER, 1, 5, {"data", "forward", "backward", "optimizer", "save"}, id="transformers-trainer"),
    ],
)
def test_a_framework_runs_as_it_does_without_us(
    tmp_path: Path, script: Callable[[str], Path], text: str, world: int, steps: int, phases: set[str]
) -> None:
    path = script(text)
    ours = run_ranks(path, RunDir.create(tmp_path / "with"), world=world, timeout=280)
    theirs = run_ranks(path, RunDir.create(tmp_path / "without"), world=world, inject=False, timeout=280)
    assert theirs.codes == [0] * world, theirs.errors
    assert ours.codes == [0] * world, ours.errors
    ignored = "train_runtime"
    for with_box, without in zip(ours.outputs, theirs.outputs, strict=True):
        kept = [line for line in without.splitlines() if ignored not in line]
        assert [line for line in with_box.splitlines() if ignored not in line] == kept
    for rank in range(world):
        assert ours.events("recording_failed", rank) == []
        assert len(ours.crumbs(rank, event="point", phase="step")) == steps
        assert {c.phase for c in ours.crumbs(rank, event="begin")} >= phases
        assert ours.ring(rank).open_spans() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["inside", "around"])
def test_the_compiler_sees_the_script_alone(tmp_path: Path, script: Callable[[str], Path], how: str) -> None:
    """The same graphs, breaks, frames and warnings, and so the same bits of every loss, with the guard on."""
    path = script(COMPILED_DDP.replace("HOW", repr(how)))
    watched = {"MODEL_CHECK_GUARD": "observe"}
    ours = run_ranks(path, RunDir.create(tmp_path / "with"), world=2, env=watched, timeout=200)
    theirs = run_ranks(path, RunDir.create(tmp_path / "without"), world=2, inject=False, timeout=200)
    assert theirs.codes == [0, 0], theirs.errors
    assert ours.codes == [0, 0], ours.errors
    assert [said.splitlines() for said in ours.outputs] == [said.splitlines() for said in theirs.outputs]
    for with_box, without in zip(ours.errors, theirs.errors, strict=True):
        assert with_box.count("does not know how to trace") == without.count("does not know how to trace")
    for rank in range(2):
        assert len(ours.crumbs(rank, event="point", phase="step")) == 4
        assert ours.events("recording_failed", rank) == ours.events("guard_failed", rank) == []
