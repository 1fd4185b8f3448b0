"""Every command of the README runs here, or stands below with the reason why not; a new one that does neither fails.

What counts: lines of ```bash fences, lines behind `$ `, lines of the overview of verbs, and inline code that begins
with a program or a verb. Every flag and alternative of the overview must exist, and one command of each line is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_check.cli.main import VERBS, main
from model_check.config import PRESETS
from tests.conftest import BIN, ROOT

TEXT = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_PROGRAMS = ("model-check", "bash", "python", "pip", "torchrun", ".")

TRAIN_PY = """\
import os

if os.environ["RANK"] == "1":
    raise ValueError("label 17 out of range")
"""


@dataclass(frozen=True)
class Typed:
    """A command as a user types it, how it ends, and what it must print. RUN_DIR is the newest run's."""

    command: str
    code: int = 0
    prints: str = ""


FIRST = Typed("model-check run --nproc 2 train.py", 1, "error[MC301]: rank 1 raised ValueError: label 17 out of range")
RUN = {
    "model-check run": Typed("model-check run", 2, "run needs a script"),
    "model-check diagnose RUN_DIR": Typed("model-check diagnose RUN_DIR", 0, "train.py:4"),
    "model-check explain MC204": Typed("model-check explain MC204", 0, "MC204"),
    "explain memory": Typed("model-check explain memory", 0, "MC705"),
    "python benchmarks/startup.py": Typed(f"python {ROOT}/benchmarks/startup.py --help", 0, "--storm"),
}
OVERVIEW = {
    "train": Typed("model-check train --preset debug --set training.max_steps=1 --gpus all --nproc 1 --dry-run"),
    "run": Typed("model-check run --nproc 1 train.py"),
    "run --": Typed("model-check run -- python -c 'print(6 * 7)'", 0, "42"),
    "diagnose": Typed("model-check diagnose RUN_DIR"),
    "explain": Typed("model-check explain MC301", 0, "MC301"),
    "plan": Typed("model-check plan --gpu H100 --world-size 8", 0, '"strategy"'),
    "doctor": Typed("model-check doctor --only basic", 0, "python"),
    "prepare": Typed("model-check prepare --verify", 0, "every block matches its checksum"),
    "gpus": Typed("model-check gpus --gpus auto"),
}
ELSEWHERE = {
    "bash run.sh --debug": "tests/docs/test_readme.py::test_run_sh_trains",
    "model-check attach": "tests/launch/test_launch_attach.py",
    "model-check diagnose runs/1": "tests/test_api.py",
    "model-check doctor": "tests/cli/test_cli_doctor.py",
    "model-check plan": "tests/cli/test_cli_plan.py",
    "torchrun --nproc_per_node=2 pretrain_main.py": (
        "tests/cli/test_cli_doors.py::test_torchrun_makes_ranks_of_pretrain_main"
    ),
    "pip install PATH_OF_THIS_CLONE": "tests/cli/test_cli_light_install.py",
    "attach": "tests/launch/test_launch_attach.py",
    "checkpoint": "tests/cli/test_cli_checkpoint.py",
    "bench": "tests/doctor/test_doctor_bench.py",
}
NOT_RUN = {
    "bash test.sh": "it is what runs this test",
    'pip install "PATH_OF_THIS_CLONE[train]"': "needs a network, and is what .venv was made with",
    ". .venv/bin/activate": "changes the shell that types it, not a program",
    "python benchmarks/throughput.py": "needs a GPU",
}


def overview() -> list[str]:
    """The lines of the fence that lists the verbs."""
    (fence,) = [body for _, body in _FENCE.findall(TEXT) if body.startswith("model-check train ")]
    return [line for line in fence.splitlines() if line]


def typed() -> set[str]:
    """Every other command that the page shows."""
    found = set()
    for language, body in _FENCE.findall(TEXT):
        for line in body.splitlines():
            if language == "bash" or line.startswith("$ "):
                found.add(re.split(r"\s+# ", line.removeprefix("$ "))[0].strip())
    prose = " ".join(_FENCE.sub("", TEXT).split())
    for code in re.findall(r"`([^`]+)`", prose):
        first, *rest = code.split()
        if rest and (first in _PROGRAMS or first in VERBS):
            found.add(code)
    return found


def key_of(line: str) -> str:
    verb = line.split()[1]
    return f"{verb} --" if f"{verb} -- " in " ".join(line.split()) else verb


def test_every_command_is_run_or_has_a_reason() -> None:
    known = {FIRST.command, *RUN, *ELSEWHERE, *NOT_RUN}
    keys = [key_of(line) for line in overview()]
    assert typed() - known == set(), "commands of the README that no test runs"
    assert {key for key in keys if key not in OVERVIEW and key not in ELSEWHERE} == set()
    assert known - typed() - set(keys) == set() and OVERVIEW.keys() <= set(keys), "listed here, gone from the README"


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_what_is_said_to_run_elsewhere_does(place: str) -> None:
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text()
    assert (f"def {test}(" if test else "\ndef test_") in text


@pytest.mark.parametrize("line", overview(), ids=key_of)
def test_every_flag_of_the_overview_exists(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    verb = line.split()[1]
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert not ended.value.code
    flags = set(re.findall(r"--[a-z][\w-]*", line))
    assert flags - set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)) == set()
    if subverbs := VERBS[verb].subverbs:
        assert line.split()[2] == "|".join(subverbs)
    if presets := re.search(r"--preset (\S+)", line):
        assert set(presets[1].split("|")) == set(PRESETS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a script that fails on rank 1, and the run directory that it left."""
    path = tmp_path_factory.mktemp("readme")
    (path / "train.py").write_text(TRAIN_PY)
    execute(FIRST, path)
    return path


def execute(typed: Typed, folder: Path) -> str:
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GPU_RANK")}
    environ = {**outside, "PATH": f"{BIN}{os.pathsep}{outside['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    runs = sorted((folder / ".outputs").glob("*"))
    command = typed.command.replace("RUN_DIR", str(runs[0])) if runs else typed.command
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    output = done.stdout + done.stderr
    assert done.returncode == typed.code, f"$ {command}\n{output}"
    assert typed.prints in output, f"$ {command}\ndoes not print: {typed.prints}\n{output}"
    return output


@pytest.mark.parametrize("command", [*RUN.values(), *OVERVIEW.values()], ids=lambda typed: typed.command[:60])
def test_the_command_runs(command: Typed, folder: Path) -> None:
    execute(command, folder)


@pytest.mark.slow
def test_the_examples_in_python_run(tmp_path: Path) -> None:
    observed, trained = [body for language, body in _FENCE.findall(TEXT) if language == "python"]
    for program in (observed, trained):
        python = [sys.executable, "-c", program]
        done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "1" / "events").is_dir()
    assert float(done.stdout.splitlines()[-1]) > 0


@pytest.mark.slow
def test_run_sh_trains(tmp_path: Path) -> None:
    """In a clone whose .venv is there already: what it installs needs a network."""
    for name in ("run.sh", "pyproject.toml", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("scripts", "model_check"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "model-check"):
        (tmp_path / ".venv" / "bin" / name).symlink_to(BIN / name)
    pins = "cat requirements*.txt pyproject.toml | cksum > .venv/.installed-requirements.txt"
    subprocess.run(["bash", "-c", pins], cwd=tmp_path, check=True)
    output = execute(Typed("bash run.sh --debug", 0, "done: 10 steps, final loss 8."), tmp_path)
    assert "[CPU1] Step [9/10] | Loss: 8." in output
