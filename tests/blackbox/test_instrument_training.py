"""Two ranks of an ordinary training script under the black box: everything is seen, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model_check.record import RunDir
from model_check.record.ring import FLAG_ASYNC, FLAG_NATIVE, Crumb
from tests.blackbox.observed_runs import Outcome, last_json, run_ranks

SCRIPT = """\
import json
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, fail=False):
        if fail:
            raise ValueError("bad batch")
        for block in self.blocks:
            x = block(x).tanh()
        return x


def train(model, loader, losses):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (x,) in loader:
        loss = model(x).square().mean()
        loss.backward()  # BACKWARD
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())


def collectives(rank):
    group = dist.new_group([0, 1])
    x = torch.full((4, 2), float(rank))
    work = dist.all_reduce(x, group=group, async_op=True)  # ASYNC
    work.wait()  # WAIT
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})  # OBJECTS
    with torch.inference_mode():
        dist.broadcast(torch.ones(3, dtype=torch.bfloat16), src=1)  # BROADCAST
    y = funcol.all_reduce(torch.ones(5), "sum", dist.group.WORLD) + 0  # FUNCTIONAL
    message = torch.arange(6)
    if rank == 0:
        dist.send(message, 1)  # SEND
    else:
        dist.recv(message, 0)  # RECV
    ops = [dist.P2POp(dist.isend, message, 1 - rank), dist.P2POp(dist.irecv, message.clone(), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):  # BATCH
        work.wait()
    dist.barrier()  # BARRIER
    return x.tolist(), objects, y.tolist()


def main():
    dist.init_process_group("gloo")  # INIT
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Net())  # DDP
    data = TensorDataset(torch.randn(48, 16))
    losses = []
    for workers in (0, 2):
        train(model, DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=workers), losses)
    try:
        model(torch.randn(2, 16), fail=True)
    except ValueError:
        pass
    seen = collectives(rank)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")  # SAVE
    dist.destroy_process_group()
    print(json.dumps({"losses": losses, "seen": seen, "pid": os.getpid()}))


main()
"""


def line(mark: str) -> str:
    (number,) = [n for n, text in enumerate(SCRIPT.splitlines(), start=1) if text.endswith(f"# {mark}")]
    return f"train.py:{number}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Outcome, Outcome]]:
    """(with the black box, without it)"""
    folder = tmp_path_factory.mktemp("training")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    with_box = run_ranks(path, RunDir.create(folder / "with"), world=2)
    without = run_ranks(path, RunDir.create(folder / "without"), world=2, inject=False)
    yield with_box, without


@pytest.fixture(scope="module")
def seen(runs: tuple[Outcome, Outcome]) -> Outcome:
    assert runs[0].codes == [0, 0], runs[0].errors
    return runs[0]


def begins(seen: Outcome, rank: int = 0, **wanted: object) -> list[Crumb]:
    return seen.crumbs(rank, event="begin", **wanted)


def test_results_are_the_same_to_the_last_digit(runs: tuple[Outcome, Outcome]) -> None:
    with_box, without = runs
    assert without.codes == with_box.codes == [0, 0]
    for ours, theirs in zip(with_box.outputs, without.outputs, strict=True):
        assert {**last_json(ours), "pid": 0} == {**last_json(theirs), "pid": 0}
    assert [e.count("WorkerServer") for e in with_box.errors] == [0, 0]


def test_every_span_is_closed_and_nothing_of_ours_failed(seen: Outcome) -> None:
    for rank in (0, 1):
        assert seen.ring(rank).open_spans() == []
        assert seen.events("recording_failed", rank) == []
        assert [e["via"] for e in seen.events("exit", rank)] == ["return"]
        assert seen.ring(rank).header.pid == last_json(seen.outputs[rank])["pid"]


def test_the_header_knows_the_job(seen: Outcome) -> None:
    header = seen.ring(1).header
    assert (header.rank, header.world_size, header.backend) == (1, 2, "gloo")
    assert header.torch.startswith("2.") and Path(header.service).name == "rank-00001.sock"
    assert [c.site for c in begins(seen, phase="init", detail="init_process_group")] == [line("INIT")]
    versions = seen.events("versions")[0]
    assert versions["script_sha256"] == seen.events("versions", rank=1)[0]["script_sha256"] is not None


def test_steps_have_their_phases_in_order(seen: Outcome) -> None:
    assert [c.step for c in seen.crumbs(event="point", phase="step")] == list(range(12))
    third = [c for c in seen.ring().crumbs if c.step == 2 and c.thread == seen.ring().header.pid]
    phases = [c.phase for c in third if c.event != "end" and c.phase != "collective"]
    assert phases == ["data", "forward", "backward", "optimizer", "step"]
    assert [c.detail for c in third if c.phase == "forward" and c.event == "begin"] == ["DistributedDataParallel"]
    assert {c.site for c in third if c.phase == "backward" and c.event == "begin"} == {line("BACKWARD")}


def test_the_end_of_the_data_is_said(seen: Outcome) -> None:
    assert [c.detail for c in seen.crumbs(event="end", phase="data") if c.detail] == ["exhausted", "exhausted"]
    assert len({e["worker_pid"] for e in seen.events("loader_worker")}) == 2


def test_collectives_that_ddp_starts_in_cpp_are_seen(seen: Outcome) -> None:
    native = [c for c in begins(seen, phase="collective", group="default") if c.flags & FLAG_NATIVE]
    assert {c.op for c in native if c.site == line("DDP")} >= {"all_gather", "broadcast"}
    reductions = [c for c in native if c.site == line("BACKWARD")]
    gradients = 3 * (16 * 16 + 16)
    assert [(c.op, c.dtype, c.bytes, c.shape) for c in reductions] == [
        ("all_reduce", "float32", 4 * gradients, (gradients,))
    ] * 12


def test_all_ranks_count_the_same_collectives(seen: Outcome) -> None:
    def signature(rank: int) -> list[tuple[object, ...]]:
        calls = [c for c in begins(seen, rank) if c.phase in ("collective", "barrier") and c.detail != "wait"]
        return [(c.group, c.collective_seq, c.op, c.dtype, c.shape, c.site) for c in calls]

    assert signature(0) == signature(1)
    default = [c[1] for c in signature(0) if c[0] == "default"]
    assert default == list(range(1, len(default) + 1))


def test_each_kind_of_call_is_one_record_with_its_line(seen: Outcome) -> None:
    def one(mark: str, rank: int = 0) -> Crumb:
        (crumb,) = [c for c in begins(seen, rank) if c.site == line(mark)]
        return crumb

    issued = one("ASYNC")
    assert (issued.op, issued.group, issued.collective_seq, issued.shape) == ("all_reduce", "ranks 0,1", 1, (4, 2))
    assert issued.flags == FLAG_ASYNC and issued.detail == "ranks 0,1"
    waited = one("WAIT")
    assert (waited.detail, waited.collective_seq, waited.group) == ("wait", 1, "ranks 0,1")
    assert one("OBJECTS").op == "all_gather_object"
    broadcast = one("BROADCAST")
    assert (broadcast.op, broadcast.dtype, broadcast.bytes, broadcast.peer) == ("broadcast", "bfloat16", 6, 1)
    assert (one("FUNCTIONAL").op, one("FUNCTIONAL").shape) == ("all_reduce", (5,))
    assert (one("SEND").op, one("SEND").peer, one("SEND").phase) == ("send", 1, "p2p")
    assert (one("RECV", 1).op, one("RECV", 1).peer, one("RECV", 1).dtype) == ("recv", 0, "int64")
    assert (one("BARRIER").op, one("BARRIER").phase, one("BARRIER").flags) == ("barrier", "barrier", 0)
    assert (one("SAVE").phase, one("SAVE").detail) == ("save", "model.pt")
    messages = [c for c in begins(seen) if c.site == line("BATCH")]
    assert [(c.op, c.peer, c.collective_seq) for c in messages] == [
        ("batch_p2p", -1, 0),
        ("send", 1, 2),
        ("recv", 1, 1),
    ]


def test_a_group_is_introduced_with_its_members(seen: Outcome) -> None:
    groups = {e["name"]: e["ranks"] for e in seen.events("group", rank=1)}
    assert groups == {"default": [0, 1], "ranks 0,1": [0, 1]}


def test_an_exception_swallowed_in_forward_is_an_event(seen: Outcome) -> None:
    (event,) = seen.events("swallowed_exception")
    assert (event["type"], event["during"]) == ("ValueError", "forward")
    assert event["user_frame"]["text"] == 'raise ValueError("bad batch")'
    ends = [c.detail for c in seen.crumbs(event="end", phase="forward") if c.detail]
    assert ends == ["raised ValueError"]


def test_memory_has_marks(seen: Outcome) -> None:
    marks = [e["at"] for e in seen.events("memory")]
    assert marks[0] == "start" and "joined" in marks and marks[-1] == "exit"
