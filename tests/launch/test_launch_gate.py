"""The gate: at most K ranks import at once, whatever happens to those who hold a slot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_jobs import wait_until

from model_check.blackbox.gate import Gate, GatePlan
from model_check.errors import UsageError
from model_check.launch.gate import free_memory, patience, slot_count
from tests.conftest import Shell

_HERE = Path(__file__).parent
_GB = 1 << 30

Holder = subprocess.Popen[str]
StartHolder = Callable[..., Holder]


@pytest.mark.parametrize(
    ("nproc", "free_gb", "cores", "expected"),
    [
        (8, 100, 64, 8),  # room for everybody
        (8, 100, 6, 3),  # one for every two cores
        (8, 5, 64, 4),  # four fifths of the free memory
        (8, 0.1, 64, 1),  # never none
        (2, 100, 1, 1),
    ],
)
def test_slots_follow_memory_and_cores(nproc: int, free_gb: float, cores: int, expected: int) -> None:
    assert slot_count(nproc, free_bytes=int(free_gb * _GB), cores=cores) == expected


def test_free_memory_is_no_more_than_the_machine_has() -> None:
    assert 0 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@settings(deadline=None)
@given(
    st.builds(
        GatePlan,
        folder=st.just(Path("/some/where")),
        slots=st.integers(0, 512),
        patience_s=st.floats(0.001, 1e6),
        lines=st.sampled_from([None, Path("/some/where/lines.log")]),
    )
)
def test_a_plan_survives_the_environment(plan: GatePlan) -> None:
    assert GatePlan.from_environment(plan.variables()) == plan


@pytest.mark.parametrize("slots", ["", "-1", "many"])
def test_an_environment_without_slots_has_no_gate(slots: str) -> None:
    assert GatePlan.from_environment({"MODEL_CHECK_GATE_DIR": "/x", "MODEL_CHECK_GATE_SLOTS": slots}) is None


def test_without_slots_only_the_same_graph_waits(tmp_path: Path) -> None:
    plan = GatePlan(tmp_path / "gate", 0, patience_s=0.01)
    first, second = Gate(plan, 0), Gate(plan, 1)
    with first.passing(), second.passing():
        assert not first.held and not second.held
    one, same, other = (Gate(plan.of_graph(name), rank) for rank, name in enumerate(("a", "a", "b")))
    with one.passing(), same.passing(), other.passing():
        assert (one.held, same.held, other.held) == (True, False, True)
    with same.passing():
        assert same.held


@pytest.mark.parametrize(("text", "expected"), [(None, 120.0), ("7.5", 7.5), ("0", 0.0)])
def test_patience_can_be_set(text: str | None, expected: float) -> None:
    assert patience({} if text is None else {"MODEL_CHECK_GATE_PATIENCE_S": text}) == expected


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_patience_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"MODEL_CHECK_GATE_PATIENCE_S={text} is not a number of seconds"):
        patience({"MODEL_CHECK_GATE_PATIENCE_S": text})


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[StartHolder]:
    """`start_holder(rank)` starts a process that passes the gate of one slot; its lines are in `lines.log`."""
    started: list[Holder] = []

    def start(rank: int, mode: str = "plain", *, slots: int = 1, patience_s: float = 60) -> Holder:
        plan = GatePlan(tmp_path / "gate", slots, patience_s, tmp_path / "lines.log")
        process = subprocess.Popen(
            [sys.executable, str(_HERE / "gate_holder.py"), str(rank), mode],
            env={**os.environ, **plan.variables(), "PYTHONPATH": str(_HERE.parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def lines_in(folder: Path) -> list[str]:
    path = folder / "lines.log"
    return path.read_text().splitlines() if path.exists() else []


def says(process: Holder) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_out(process: Holder) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


WAITING = "[Rank 1] LOCK: waiting for exclusive access..."


def test_the_second_rank_waits_for_the_first(start_holder: StartHolder, tmp_path: Path) -> None:
    first = start_holder(0)
    assert says(first) == "inside with a slot"
    second = start_holder(1)
    wait_until(lambda: WAITING in lines_in(tmp_path))
    let_out(first)
    assert says(second) == "inside with a slot"
    let_out(second)
    assert says(second) == "outside"
    assert lines_in(tmp_path) == [
        "[Rank 0] LOCK: acquired! Starting initialization...",
        WAITING,
        "[Rank 0] LOCK: released",
        "[Rank 1] LOCK: acquired! Starting initialization...",
        "[Rank 1] LOCK: released",
    ]


@pytest.mark.parametrize("mode", ["plain", "forks"])
def test_a_killed_holder_gives_its_slot_back(start_holder: StartHolder, tmp_path: Path, mode: str) -> None:
    """Also where it has forked a child that lives on."""
    first = start_holder(0, mode)
    assert says(first) == "inside with a slot"
    second = start_holder(1)
    wait_until(lambda: WAITING in lines_in(tmp_path))
    first.send_signal(signal.SIGKILL)
    assert says(second) == "inside with a slot"


def test_a_stopped_holder_is_not_waited_for_forever(start_holder: StartHolder, tmp_path: Path) -> None:
    first = start_holder(0)
    assert says(first) == "inside with a slot"
    first.send_signal(signal.SIGSTOP)
    second = start_holder(1, patience_s=0.3)
    assert says(second) == "inside without a slot"
    assert lines_in(tmp_path)[-1] == "[Rank 1] LOCK: no slot became free in 0.3 s; going on without one"


def test_two_slots_let_two_in(start_holder: StartHolder, tmp_path: Path) -> None:
    for rank in (0, 2):
        assert says(start_holder(rank, slots=2)) == "inside with a slot"
    start_holder(1, slots=2)
    wait_until(lambda: WAITING in lines_in(tmp_path))


def test_files_that_cannot_be_locked_are_no_reason_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    gate = Gate(GatePlan(tmp_path / "file" / "gate", 1), rank=3)
    with gate.passing():
        assert not gate.held
    assert capsys.readouterr().err.startswith("[Rank 3] LOCK: not used, ")


def test_passing_again_while_inside_is_free_and_joining_lets_go(tmp_path: Path) -> None:
    gate = Gate(GatePlan(tmp_path, 1), rank=0)
    other = Gate(GatePlan(tmp_path, 1, patience_s=0.01), rank=1)
    with gate.passing():
        with gate.passing():
            pass
        assert gate.held, "the inner pass must not give back what the outer one holds"
        gate.release()
        with other.passing():
            assert other.held
    assert not gate.held


JOINS_WHILE_IMPORTING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
"""


@pytest.mark.slow
def test_a_foreign_script_imports_in_turn_and_the_gate_is_not_held_while_it_joins(shell: Shell) -> None:
    """The package joins the process group in the middle of its import: a gate held there would never open."""
    package = shell.folder / "peft"
    package.mkdir()
    (package / "__init__.py").write_text(JOINS_WHILE_IMPORTING)
    (shell.folder / "script.py").write_text("import peft\nprint('sum', int(peft.total), flush=True)\n")
    done = shell.model_check("run", "--start", "gate", "--nproc", "2", "--run-dir", "out", "script.py", timeout=100)
    assert done.code == 0, done.err
    assert sorted(re.findall(r"^\[CPU(\d)\] sum 2$", done.out, re.M)) == ["0", "1"]
    lines = re.findall(r"^\[Rank (\d)\] LOCK: (acquired|released|waiting)", done.out, re.M)
    assert {rank for rank, what in lines if what == "released"} == {"0", "1"}
    free = [what for _, what in lines if what != "waiting"]
    if free.count("acquired") > 2:
        pytest.fail(f"each rank passes once: {lines}")
    slots = len(list((shell.folder / "out" / "gate").glob("*/slot-*.lock")))
    if slots == 1:
        assert free == ["acquired", "released"] * 2, "one slot: never two inside"


def test_an_unknown_way_to_start_is_refused(shell: Shell) -> None:
    done = shell.model_check("run", "--start", "slowly", "script.py")
    assert done.code == 2 and "--start does not know the value slowly; use cold or gate" in done.err


COMPILES = """
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
dist.init_process_group("gloo")
double = torch.compile(lambda x: (x * 2).sum())
double(torch.ones(8))
dist.barrier()
seen = counters["inductor"]
print("hits", seen["fxgraph_cache_hit"], "misses", seen["fxgraph_cache_miss"], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_one_rank_compiles_and_the_other_loads_what_it_made(shell: Shell) -> None:
    (shell.folder / "script.py").write_text(COMPILES)
    started = ["run", "--start", "gate", "--nproc", "2", "--run-dir", "out", "script.py"]
    cache = str(shell.folder / "cache")
    done = shell.model_check(*started, TORCHINDUCTOR_CACHE_DIR=cache, MODEL_CHECK_GATE_PATIENCE_S="1000")
    assert done.code == 0, done.err
    counts = sorted(re.findall(r"hits (\d) misses (\d)", done.out))
    assert counts == [("0", "1"), ("1", "0")], counts


@pytest.mark.slow
def test_of_warm_ranks_one_compiles_too(shell: Shell) -> None:
    """Two layers are one graph, compiled once; the log of the compiler says which rank had it from the cache."""
    options = ("--max-steps", "1", "--nproc", "2", "--set", "training.compile=on", "--set", "training.batch_size=1")
    cache = str(shell.folder / "cache")
    done = shell.train(*options, TORCHINDUCTOR_CACHE_DIR=cache, TORCH_LOGS="torch._inductor.codecache")
    assert done.code == 0, done.err
    logs = [log.read_text() for log in sorted((done.run_dir / "logs").glob("rank-*.log"))]
    made, found = ([log.count(f"fx graph cache {what}") for log in logs] for what in ("miss", "hit"))
    assert len(logs) == 2 and sum(made) == sum(found) > 0, (made, found)


@pytest.mark.slow
def test_training_through_the_gate_gives_the_same_losses(shell: Shell) -> None:
    gated = shell.train("--max-steps", "2", "--nproc", "2", "--set", "launch.start=gate")
    assert gated.code == 0, gated.err
    acquired = re.findall(r"^\[Rank (\d)\] LOCK: acquired! Starting initialization\.\.\.$", gated.out, re.M)
    assert sorted(acquired) == ["0", "1"]
    assert gated.losses() == shell.train("--max-steps", "2", "--nproc", "2").losses()
