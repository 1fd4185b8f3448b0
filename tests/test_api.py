"""`model_check.observe` in jobs that we did not start, and what `diagnose` and `attach` say about them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import model_check
from model_check.errors import UsageError
from model_check.record import RunDir, Verdict
from tests.blackbox.observed_runs import plain_environment, run_ranks
from tests.conftest import ROOT
from tests.marked_lines import line_of

TRAIN = """
import sys
import time
{first}
import torch
{second}
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel

what = sys.argv[1]
dist.init_process_group("gloo")
{third}
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.full((4, 64), 0.1 * (rank + step))).square().mean()
    loss.backward()
    optimizer.step()
    all_reduce(loss.detach())
    if what == "raise" and rank == 1 and step == 5:
        raise ValueError("label 17 is out of range")  # RAISES
    while what == "hang" and rank == 1 and step == 5:
        time.sleep(0.1)  # STUCK
weights = model.module.weight.detach().double()
sys.stdout.write(f"{{rank}} {{loss.item().hex()}} {{weights.sum().item().hex()}}\\n")
dist.destroy_process_group()
"""
OBSERVE = 'import model_check; model_check.observe(run_dir="run")'
PLACES = ("first", "second", "third")  # before torch is imported, after it, after the ranks have joined


def script(folder: Path, place: str = "first", line: str = OBSERVE) -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN.format(**{name: line if name == place else "" for name in PLACES}))
    return path


@contextmanager
def torchrun(path: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    """Plain torchrun: the only thing of ours is the line in the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path.name, what]
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=path.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def attach(pid: int) -> str:
    return subprocess.run(
        [sys.executable, "-m", "model_check", "attach", str(pid)],
        env={**plain_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def at(path: Path, mark: str) -> str:
    return line_of(str(path), mark).rpartition("/")[2]


def named(verdict: Verdict) -> list[tuple[str, list[int], str | None]]:
    return [(finding.code, finding.ranks, finding.location) for finding in verdict.findings]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_raises_is_named_afterwards(tmp_path: Path, place: str) -> None:
    path = script(tmp_path, place)
    with torchrun(path, "raise") as job:
        job.communicate(timeout=240)
    verdict = model_check.diagnose(tmp_path / "run")
    assert named(verdict) == [("MC301", [1], at(path, "RAISES"))]
    assert (verdict.outcome, verdict.exit_code, verdict.findings[0].victims) == ("failed", 1, [0])


def test_a_rank_that_is_stuck_is_named_while_it_hangs_and_after_the_job_was_ended(tmp_path: Path) -> None:
    path = script(tmp_path)
    stuck = [("MC212", [1], at(path, "STUCK"))]
    with torchrun(path, "hang") as job:
        verdict = when_it_hangs(tmp_path / "run", job)
        assert (named(verdict), verdict.outcome, verdict.findings[0].victims) == (stuck, "running", [0])
        picture = attach(job.pid)
        assert "rank 1 is what the others wait for" in picture
        assert f"{at(path, 'STUCK')}: its own code (rank 1)" in picture
        assert f"model-check diagnose {tmp_path / 'run'}" in picture
    assert named(model_check.diagnose(tmp_path / "run")) == stuck


def when_it_hangs(run_dir: Path, job: subprocess.Popen[str]) -> Verdict:
    """Asks until a hang is named, after some seconds. Until then a busy machine may show a slow rank (MC701)."""
    deadline = time.monotonic() + 240
    while job.poll() is None and time.monotonic() < deadline:
        verdict = model_check.diagnose(run_dir) if (run_dir / "blackbox").is_dir() else Verdict()
        if any(finding.code.startswith("MC2") for finding in verdict.findings):
            return verdict
        time.sleep(0.2)
    raise AssertionError(f"nothing was found; the job's exit code is {job.poll()}")


def test_a_healthy_script_has_the_same_results_and_no_findings(tmp_path: Path) -> None:
    said = []
    for name, line in (("plain", ""), ("observed", OBSERVE)):
        folder = tmp_path / name
        folder.mkdir()
        with torchrun(script(folder, line=line), "") as job:
            out, err = job.communicate(timeout=240)
        said.append(sorted(out.splitlines()))
    # Without us, torch aborts the exit of such a script now and then, because threads of gloo still run.
    assert job.returncode == 0, err
    assert len(said[0]) == 2
    assert said[0] == said[1]
    verdict = model_check.diagnose(tmp_path / "observed" / "run")
    assert (verdict.outcome, verdict.steps_completed, verdict.findings, verdict.notes) == ("completed", 8, [], [])


def test_the_rank_is_taken_from_a_group_that_was_joined_before(tmp_path: Path) -> None:
    """A worker of Ray is not told its rank in the environment, and joins before it runs the user's function."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "import model_check\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model_check.observe(run_dir='run')\n"
        "dist.all_reduce(torch.ones(2))\n"
        "raise ValueError('label 17 is out of range')  # RAISES\n"
    )
    done = run_ranks(path, RunDir(tmp_path / "run"), world=None, inject=False, env={"PYTHONPATH": str(ROOT)})
    assert [(c.op, c.group) for c in done.crumbs(phase="collective", event="begin")] == [("all_reduce", "default")]
    assert done.ring().header.backend == "gloo"
    assert named(model_check.diagnose(tmp_path / "run")) == [("MC301", [0], at(path, "RAISES"))]


def test_the_guard_names_a_nan(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import model_check; model_check.observe()\n"
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(4))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    ratio = (weight * 0) / 0 if step == 2 else weight  # NAN\n"
        "    ratio.sum().backward()\n"
        "    optimizer.step()\n"
    )
    run_dir = RunDir(tmp_path / "run")
    done = run_ranks(
        path, run_dir, world=None, inject=False, env={"PYTHONPATH": str(ROOT), "MODEL_CHECK_RUN_DIR": str(run_dir.root)}
    )
    assert done.codes == [0], done.errors
    found = model_check.diagnose(run_dir.root).findings[0]
    assert (found.code[:3], found.ranks, found.location) == ("MC4", [0], at(path, "NAN"))


def test_under_model_check_run_the_line_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import model_check\nprint(model_check.observe(run_dir='elsewhere'))\n")
    done = run_ranks(path, RunDir.create(tmp_path / "run"), world=1)
    assert done.outputs == [f"{tmp_path / 'run'}\n"]
    assert not (tmp_path / "elsewhere").exists()


def test_observe_brings_neither_torch_nor_a_second_directory(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys\n"
        "import model_check\n"
        "assert model_check.observe('one') == model_check.observe() == model_check.observe('one')\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "model_check.observe('two')\n"
    )
    done = run_ranks(path, RunDir(tmp_path / "one"), world=1, inject=False, env={"PYTHONPATH": str(ROOT)})
    assert f"already records into {tmp_path / 'one'}, so it cannot record into two" in done.errors[0]


def test_a_script_that_cannot_be_recorded_runs_on(tmp_path: Path) -> None:
    (tmp_path / "run" / "blackbox" / "rank-00000.ring").mkdir(parents=True)  # as where the disk is full
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", f"{OBSERVE}; print('it ran')"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "it ran\n" and "this process is not recorded" in done.stderr


def test_observe_says_which_directory_or_mode_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MODEL_CHECK_RUN_DIR", raising=False)
    with pytest.raises(UsageError, match="MODEL_CHECK_RUN_DIR is not set; name a directory that all ranks share"):
        model_check.observe()
    monkeypatch.setenv("MODEL_CHECK_GUARD", "loud")
    with pytest.raises(UsageError, match="MODEL_CHECK_GUARD=loud is not a mode; use observe, full, halt or off"):
        model_check.observe(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_diagnose_stays_the_function_when_its_package_is_imported() -> None:
    import model_check.diagnose.evidence
    from model_check import diagnose
    from model_check.diagnose import examine

    assert model_check.diagnose is diagnose is model_check.api.diagnose
    assert callable(examine)
