"""What a rank knows about its memory: readings, owners, the sum of a snapshot, marks, and the moment it runs out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from model_check.blackbox import outofmemory
from model_check.blackbox.box import BOX, RANK_PID_VARIABLE
from model_check.blackbox.memory_holdings import find_owners, sum_up
from model_check.blackbox.memory_marks import MemoryMarks, in_words, read_host_limits, read_memory
from model_check.record import RunDir
from model_check.record.events.memory import Holding, MemoryMark, OutOfMemory

MIB = 1 << 20


def test_a_reading_is_the_kernels() -> None:
    before = read_memory()
    held = bytearray(64 * MIB)
    held[::4096] = b"x" * len(held[::4096])
    after = read_memory()
    assert 48 * MIB < after.rss - before.rss < 128 * MIB
    assert after.pss is None or after.pss <= after.rss + MIB
    assert (after.allocated, after.reserved, after.peak) == (None, None, None), "no look may create a CUDA context"
    limits = read_host_limits()
    assert 0 < limits.available <= limits.total and limits.total > after.rss


def test_a_reading_in_words() -> None:
    gib = 1 << 30
    on_gpu = MemoryMark(rss=gib, pss=gib // 2, allocated=3 * gib, reserved=4 * gib, peak=5 * gib)
    words = "RSS 1.00 GiB, PSS 0.50 GiB, device 3.00 GiB allocated, 4.00 reserved, 5.00 at its peak"
    assert in_words(on_gpu) == words
    assert in_words(MemoryMark(rss=gib)) == "RSS 1.00 GiB"


def test_marks_are_made_once_and_in_words() -> None:
    said: list[str] = []
    marks = MemoryMarks(said.append)
    for mark in ("START", "POST-MODEL", "FIRST-STEP", "FIRST-STEP"):
        marks.reach(mark)
    assert [line.split()[0] for line in said] == ["MEM:START", "MEM:POST-MODEL", "MEM:FIRST-STEP"]
    assert all("RSS" in line and "GiB" in line for line in said)


def test_every_tensor_of_a_model_and_its_optimizer_has_an_owner() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    owners = find_owners()
    weight = model[0].weight
    assert owners[weight.untyped_storage().data_ptr()] == Holding(7 * 5 * 4, 1, "parameters", "0.weight")
    assert weight.grad is not None
    assert owners[weight.grad.untyped_storage().data_ptr()] == Holding(7 * 5 * 4, 1, "gradients", "0.weight")
    moment = optimizer.state[weight]["exp_avg"]
    assert owners[moment.untyped_storage().data_ptr()] == Holding(7 * 5 * 4, 1, "optimizer", "exp_avg")
    running = model[1].running_mean
    assert isinstance(running, torch.Tensor)
    assert owners[running.untyped_storage().data_ptr()].category == "parameters"


def block(address: int, size: int, state: str = "active_allocated", line: int = 0) -> dict[str, Any]:
    frames = [{"filename": "torch/nn/functional.py", "line": 1, "name": "linear"}]
    frames += [{"filename": "net.py", "line": line, "name": "forward"}] if line else []
    return {"address": address, "size": size, "state": state, "frames": frames}


def users_line(frames: list[dict[str, Any]]) -> str:
    return next((f"{f['filename']}:{f['line']}" for f in frames if f["filename"] == "net.py"), "")


def test_a_snapshot_summed_up() -> None:
    segments = [
        {"blocks": [block(0, 64 * MIB), block(64 * MIB, 8 * MIB, "inactive"), block(72 * MIB, 32 * MIB, line=7)]},
        {"blocks": [block(200 * MIB, 32 * MIB, line=7), block(300 * MIB, 2 * MIB, "inactive")]},
    ]
    found = sum_up(segments, {0: Holding(64 * MIB, 1, "parameters", "w")}, users_line)
    assert found.categories == {"parameters": 64 * MIB, "activations and temporaries": 64 * MIB}
    assert (found.free_in_pieces, found.largest_piece) == (10 * MIB, 8 * MIB)
    kinds = {(h.category, h.count, h.bytes, h.name, h.line) for h in found.largest}
    assert kinds == {
        ("parameters", 1, 64 * MIB, "w", ""),
        ("activations and temporaries", 2, 64 * MIB, "", "net.py:7"),
    }


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.sampled_from(["active_allocated", "inactive", "other"]))))
def test_no_byte_in_use_is_lost(blocks: list[tuple[int, str]]) -> None:
    rows = [block(number, size, state) for number, (size, state) in enumerate(blocks)]
    found = sum_up([{"blocks": rows}], {}, users_line)
    assert sum(found.categories.values()) == sum(size for size, state in blocks if state == "active_allocated")
    assert found.free_in_pieces == sum(size for size, state in blocks if state == "inactive")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", 2 << 30),
        ("Tried to allocate 20.00 MiB.", 20 << 20),
        ("can't allocate memory: you tried to allocate 70368744177664 bytes. Error code 12", 70368744177664),
        ("std::bad_alloc", None),
    ],
)
def test_the_size_asked_for_is_in_the_message(message: str, size: int | None) -> None:
    assert OutOfMemory.told_by(message).requested == size


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_what_is_about_memory(error: Exception, expected: bool) -> None:
    assert outofmemory.is_out_of_memory(error) is expected


class History:
    """Stands for torch.cuda.memory: notes how its recorder is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record_memory_history(self, enabled: Any, **options: Any) -> None:
        self.calls.append(enabled)


class Careful(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Around(torch.optim.Optimizer):
    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.inner:
            optimizer.step()


def plain() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def careful() -> torch.optim.Optimizer:
    plain()  # from here on torch wraps the step of SGD too
    return Careful([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    "made",
    [plain, careful, lambda: Around(plain(), plain()), lambda: Around(careful(), plain())],
    ids=["plain", "calls that of its base class", "calls two others", "calls one that calls another"],
)
def test_lines_are_noted_for_the_first_steps_only(made: Callable[[], torch.optim.Optimizer]) -> None:
    history = History()
    outofmemory._note_lines(history, register_optimizer_step_post_hook)
    optimizer = made()
    seen = []
    for _ in range(outofmemory.NOTED_STEPS + 2):
        optimizer.step()
        seen.append(list(history.calls))
    assert seen[: outofmemory.NOTED_STEPS - 1] == [["state"]] * (outofmemory.NOTED_STEPS - 1)
    assert seen[outofmemory.NOTED_STEPS - 1 :] == [["state", None]] * 3


def test_hooks_that_the_script_has_registered_after_ours_stay_called() -> None:
    outofmemory._note_lines(History(), register_optimizer_step_post_hook)
    called: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    optimizer = plain()
    try:
        for _ in range(outofmemory.NOTED_STEPS + 2):
            optimizer.step()
    finally:
        handle.remove()
    assert called == [optimizer] * (outofmemory.NOTED_STEPS + 2)


def test_a_script_that_records_for_itself_is_not_stopped() -> None:
    history = History()
    outofmemory._note_lines(history, register_optimizer_step_post_hook)
    history._record_memory_history("all")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(outofmemory.NOTED_STEPS + 1):
        optimizer.step()
    assert history.calls == ["state", "all"]


WITHOUT_AN_OPTIMIZER = """
import sys, threading, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from model_check.blackbox.outofmemory import _note_lines

class History:
    calls, ended = [], threading.Event()
    def _record_memory_history(self, enabled, **options):
        self.calls.append(enabled)
        if enabled is None:
            self.ended.set()

history, taken_over = History(), History()
taken_over.calls, taken_over.ended = [], threading.Event()
_note_lines(taken_over, register_optimizer_step_post_hook, 0.3)
taken_over._record_memory_history("all")
_note_lines(history, register_optimizer_step_post_hook, 0.5)
history.ended.wait(20)
weight = torch.zeros(1, requires_grad=True)
for _ in range(4):
    weight.sum().backward()
print(history.calls, taken_over.calls)
"""


def test_without_an_optimizer_lines_are_noted_for_a_while_only() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_AN_OPTIMIZER], capture_output=True, text=True, timeout=100)
    assert done.stdout == "['state', None] ['state', 'all']\n", done.stderr


def test_a_process_ends_while_lines_are_still_noted() -> None:
    """A script that ends early does not have to wait for us."""
    script = WITHOUT_AN_OPTIMIZER.replace("0.5", "600").replace("history.ended.wait(20)", "")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "['state'] ['state', 'all']\n"), done.stderr


def test_torch_still_has_what_is_asked_of_it() -> None:
    import inspect

    names = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries"} <= set(names)
    assert callable(torch.cuda._lazy_call) and callable(torch.cuda.memory._snapshot)
    outofmemory.patch_cuda(SimpleNamespace())  # type: ignore[arg-type]


COMPILER = """
import sys, torch
from model_check.blackbox.outofmemory import _compiler_left_alone
with _compiler_left_alone(torch):
    assert not hasattr(torch, "_inductor")
assert "torch._inductor" not in sys.modules
assert torch._inductor.__name__ == "torch._inductor"
with _compiler_left_alone(torch):
    assert hasattr(torch, "_inductor")
"""


@pytest.mark.slow
def test_a_snapshot_does_not_load_the_compiler_and_hides_none_that_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    x = torch.randn(8, 256)
    if step == 3 and dist.get_rank() == 1:
        x = x.new_empty(1 << 44)  # FAULT
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_foreign_script_that_runs_out_of_host_memory(shell: Any) -> None:
    (shell.folder / "hungry.py").write_text(SCRIPT)
    done = shell.model_check("run", "--nproc", "2", "--run-dir", "run", "hungry.py")
    done.run_dir = shell.folder / "run"
    finding = done.verdict()["findings"][0]
    line = next(n for n, row in enumerate(SCRIPT.splitlines(), 1) if "FAULT" in row)
    assert (finding["code"], finding["ranks"], finding["victims"]) == ("MC307", [1], [0])
    assert finding["location"] == f"hungry.py:{line}"
    assert "observed: it asked for 65536.00 GiB" in finding["evidence"]
    assert finding["fix"][0].endswith("the sizes on that line are wrong")
    record = json.loads((Path(done.run_dir) / "dumps" / "oom-rank-1.json").read_text())
    assert record["requested"] == 1 << 46 and record["kind"] == "host"
    weights = (256 * 256 + 256) * 4
    assert record["categories"]["parameters"] == pytest.approx(weights, rel=0.01)
    assert record["categories"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert not (Path(done.run_dir) / "dumps" / "oom-rank-0.json").exists()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    """This process as rank 3 of a run."""
    run_dir = RunDir.create(tmp_path / "run")
    before = BOX.run_dir
    BOX.run_dir = run_dir
    BOX.open(3, world_size=4)
    outofmemory._Captured.count = 0
    yield run_dir.root
    BOX.leave()
    BOX.run_dir = before
    os.environ.pop(RANK_PID_VARIABLE, None)


def events_of(root: Path, kind: str = "out_of_memory") -> list[dict[str, Any]]:
    rows = (root / "events" / "rank-00003.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, rows) if event["event"] == kind]


def test_what_the_allocator_says_is_written_before_it_raises(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU torch's own answers are given here; a test on one has the true ones."""
    here = {"filename": __file__, "line": 12, "name": "forward"}
    rows = [block(0, 96 * MIB), block(96 * MIB, 32 * MIB, "inactive")]
    rows[0]["frames"] = [here]
    snapshot = {"segments": [{"device": 0, "blocks": rows}, {"device": 1, "blocks": rows}], "device_traces": []}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: snapshot)
    stats = {"allocated_bytes.all.current": 96 * MIB, "reserved_bytes.all.current": 128 * MIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    outofmemory._allocator_failed(0, 64 * MIB, 130 * MIB, 2 * MIB)
    (event,) = events_of(box)
    assert (event["requested"], event["total"], event["free"]) == (64 * MIB, 130 * MIB, 2 * MIB)
    assert (event["allocated"], event["reserved"], event["free_in_pieces"]) == (96 * MIB, 128 * MIB, 32 * MIB)
    assert event["categories"] == {"activations and temporaries": 96 * MIB}
    assert event["largest"][0]["line"].endswith("test_observe_memory.py:12")
    assert "test_observe_memory.py:" in event["at"]
    assert pickle.loads((box / "dumps" / "oom-rank-3.pickle").read_bytes()) == snapshot
    assert json.loads((box / "dumps" / "oom-rank-3.json").read_text())["snapshot"] == "dumps/oom-rank-3.pickle"


def test_a_look_that_fails_says_so_and_harms_nobody(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> Any:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "memory_stats", broken)
    for _ in range(outofmemory.MOST_CAPTURES + 2):
        outofmemory._allocator_failed(0, 1, 2, 3)
    events = events_of(box, "recording_failed")
    assert [event["error"] for event in events] == ["RuntimeError: no such device"] * outofmemory.MOST_CAPTURES


def test_an_error_on_its_way_out_is_looked_at_once(box: Path) -> None:
    model = nn.Linear(16, 16, bias=False)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    except torch.OutOfMemoryError as error:
        outofmemory.note(error)
        outofmemory.note(error)
    (event,) = events_of(box)
    assert (event["kind"], event["requested"], event["rank"]) == ("device", 2 << 30, 3)
    assert event["categories"]["parameters"] >= model.weight.nbytes
    outofmemory.note(ValueError("something else"))
    assert len(events_of(box)) == 1
