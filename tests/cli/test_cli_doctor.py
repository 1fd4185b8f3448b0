"""`model-check doctor` as a user calls it: the table, the JSON, the exit code, the doors of the guides."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from model_check.cli.doctor import stage_table, summary
from model_check.cli.installation import broken_package
from model_check.cli.main import main
from model_check.cli.unwinding import signals_unwind_us
from model_check.doctor import STAGES, Check, chosen_stages
from model_check.errors import UsageError
from tests.conftest import BIN, ROOT, Outcome, Shell
from tests.signals import hear_signals

CHECKS = [
    Check("memory", "ok", "21.8 GiB of memory, 2 cores"),
    Check("shared memory", "fail", "64 MiB free of 64 MiB in /dev/shm " * 3, "docker run --shm-size=8g"),
    Check("hub", "warn", "does not answer", "connect this machine"),
    Check("nccl", "skip", "torch has no NCCL"),
]


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    return int(stopped.value.code or 0), capsys.readouterr().out


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("offline")
def test_json_has_the_fields_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_doctor(capsys, "--only", "disk,hub,data", "--json")
    checks = json.loads(out)["checks"]
    assert code == 0, checks
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in checks)
    assert {check["status"] for check in checks} <= {"ok", "warn", "fail", "skip"}
    names = [check["name"] for check in checks]
    assert len(names) == len(set(names)) and names.index("checkpoint folder") < names.index("hub")
    assert all(check["fix"] for check in checks if check["status"] in ("warn", "fail"))


@pytest.mark.usefixtures("offline")
def test_a_failure_is_exit_code_1_and_shown_with_its_remedy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    code, out = run_doctor(capsys, "--only", "disk", "--set", "checkpoint.dir=taken/below")
    assert code == 1
    assert re.search(r"✗ checkpoint folder +\S*/taken is a file\s", out)
    assert "→ move it away, or set checkpoint.dir to another disk" in out
    assert out.splitlines()[-1].startswith("not ready: ")


@pytest.mark.usefixtures("offline")
def test_warnings_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_doctor(capsys, "--only", "hub")
    assert code == 0
    assert "! hub" in out and out.splitlines()[-1].startswith(
        "ready, with warnings: 0 passed, 1 warning, 1 skipped, in"
    )


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_keeps_to_its_width(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(stage_table(CHECKS))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert [line[2] for line in lines if line[2] != " "] == ["✓", "✗", "!", "–"]
    assert {line.index("→") for line in lines if "→" in line} == {27}, "remedies stand below their sentence"


def test_the_summary_counts() -> None:
    assert summary(CHECKS, 12.3) == "not ready: 1 passed, 1 warning, 1 failed, 1 skipped, in 12 s"
    assert summary(CHECKS[:1], 1.0) == "ready: 1 passed, in 1 s"


def test_stages_are_chosen_by_name_and_keep_their_order() -> None:
    assert chosen_stages(None) == list(STAGES)
    assert list(STAGES) == ["basic", "imports", "gpu", "train", "ranks", "comm", "disk", "hub", "data"]
    assert chosen_stages("data, Basic") == ["basic", "data"]
    with pytest.raises(UsageError, match="did you mean imports"):
        chosen_stages("basic,import")
    with pytest.raises(UsageError, match="names no stage"):
        chosen_stages(",")


def test_a_closed_terminal_means_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_unwind_us():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("package", "distribution"), [("typer", "typer"), ("yaml", "PyYAML"), ("psutil", "psutil"), ("rich", "rich")]
)
def test_a_broken_package_that_the_doctor_itself_needs_is_named(shell: Shell, package: str, distribution: str) -> None:
    done, file = with_package(shell, package, "raise ImportError('GLIBC_2.38 not found')\n")
    assert done.code == 1 and done.out == ""
    assert done.err == (
        f"model-check: error: the package {package} cannot be imported: ImportError: GLIBC_2.38 not found ({file}:1); "
        f"move that file away if it is not the real {package}, else pip install --force-reinstall {distribution}\n"
    )


def test_whatever_a_package_raises_is_told_as_its_own(shell: Shell) -> None:
    done, file = with_package(shell, "psutil", "import json\njson.no_such_function()\n")
    assert done.code == 1
    said = "AttributeError: module 'json' has no attribute 'no_such_function'"
    assert done.err.startswith(f"model-check: error: the package psutil cannot be imported: {said} ({file}:2); ")


def test_a_package_that_python_cannot_read_is_named(shell: Shell) -> None:
    done, file = with_package(shell, "typer", "import os\nmatch = (\n")
    said = "SyntaxError: '(' was never closed (__init__.py, line 2)"
    assert done.code == 1 and done.out == ""
    assert done.err.startswith(
        f"model-check: error: the package typer cannot be imported: {said} ({file}:2); move that"
    )


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_fault_of_our_own_is_nobody_elses() -> None:
    assert broken_package(raised(ValueError("step"))) is None
    assert broken_package(raised(SyntaxError("invalid syntax", ("train.py", 1, 1, "def (")))) is None
    assert broken_package(raised(ImportError("cannot import name 'x'", name="model_check.cli"))) is None
    assert broken_package(raised(ModuleNotFoundError("No module named 'model_check'", name="model_check"))) is None


def test_a_library_in_machine_code_is_named_without_a_frame() -> None:
    refused = broken_package(raised(ImportError("libfoo.so: cannot open shared object file", name="xxhash._xxhash")))
    assert refused is not None and refused.message.startswith("the package xxhash cannot be imported: ImportError: lib")
    part = broken_package(raised(ModuleNotFoundError("No module named 'yaml.reader'", name="yaml.reader")))
    assert part is not None and part.message.startswith("the package yaml cannot be imported: ModuleNotFoundError: No")


def test_a_missing_package_that_the_doctor_itself_needs_is_named(shell: Shell) -> None:
    done, _ = with_package(shell, "psutil", "import _psutil_linux_of_another_python\n")
    assert done.code == 1
    assert done.err == (
        "model-check: error: the package _psutil_linux_of_another_python is not installed; "
        "bash run.sh installs what is needed\n"
    )


@pytest.mark.parametrize("package", ["numpy", "xxhash"])
def test_a_broken_package_keeps_no_other_stage_away(shell: Shell, package: str) -> None:
    done, file = with_package(shell, package, "raise ImportError('GLIBC_2.38 not found')\n", only="disk,data")
    checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert done.code == 1 and checks["file locks"]["status"] == "ok" and checks["data"]["status"] == "fail"
    said = f"the rest of this stage could not be done: ImportError: GLIBC_2.38 not found ({file}:1)"
    assert checks["data"]["detail"] == said


def with_package(shell: Shell, name: str, source: str, only: str = "disk") -> tuple[Outcome, Path]:
    """The doctor where this package stands in front of the installed one."""
    file = shell.folder / "packages" / name / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    path = os.pathsep.join([str(file.parents[1]), os.environ.get("PYTHONPATH", "")])
    return shell.run(sys.executable, "-m", "model_check", "doctor", "--json", "--only", only, PYTHONPATH=path), file


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf8_shows_plain_signs(shell: Shell, encoding: str) -> None:
    (shell.folder / "file").touch()
    done = shell.run(
        *(sys.executable, "-m", "model_check", "doctor", "--only", "disk", "--set", "checkpoint.dir=file/below"),
        PYTHONIOENCODING=encoding,
    )
    assert done.code == 1 and done.err == ""
    assert re.search(r"^ +x checkpoint folder .* is a file", done.out, re.M)
    assert re.search(r"^ +-> move it away", done.out, re.M)
    assert re.search(r"^ +\+ file locks ", done.out, re.M)


def test_a_closed_output_is_no_failure_of_the_doctor(shell: Shell) -> None:
    done = shell.run("bash", "-c", f"{sys.executable} -m model_check doctor --only disk >&-")
    assert (done.code, done.err) == (0, "")


def test_a_current_folder_that_is_gone(shell: Shell) -> None:
    gone = shell.folder / "gone"
    gone.mkdir()
    move_on = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})"
    done = shell.run(sys.executable, "-c", f"{move_on}; from model_check.cli.main import main; main(['doctor'])")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "model-check: error: the current folder cannot be used: No such file or directory; cd to one that exists\n"
    )


@pytest.mark.slow
def test_a_trained_model_leaves_nothing_behind(shell: Shell) -> None:
    """The job of the doctor is a real one, in a folder of its own; logs, checkpoints and caches go with it."""
    done = shell.model_check("doctor", "--only", "train", "--json")
    [check] = json.loads(done.out)["checks"]
    falls = re.fullmatch(r"loss (\d\.\d+) → (\d\.\d+) in 12 steps, .*", check["detail"])
    assert done.code == 0 and falls and float(falls[2]) < float(falls[1]) - 1, check
    assert list(shell.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_doctor_that_is_ended_ends_its_job(shell: Shell, how: signal.Signals) -> None:
    command = [str(BIN / "model-check"), "doctor", "--only", "train"]
    env = shell.environment()
    with subprocess.Popen(
        command, cwd=shell.folder, env=env, stdout=subprocess.DEVNULL, preexec_fn=hear_signals
    ) as doctor:
        us = psutil.Process(doctor.pid)
        deadline = time.monotonic() + 60
        while len(job := us.children(recursive=True)) < 2:
            assert doctor.poll() is None and time.monotonic() < deadline, "the trainer and its rank must appear"
            time.sleep(0.05)
        doctor.send_signal(how)
        assert doctor.wait(30) == 128 + how
    _, alive = psutil.wait_procs(job, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("script", "stages"),
    [("test_basic.py", "basic"), ("test_imports.py", "imports"), ("test_single_gpu.py", "train")],
)
def test_doors_of_the_guides_run_their_stage(tmp_path: Path, script: str, stages: str) -> None:
    """The door passes its stage to the command: a package that prints its arguments shows what it passes."""
    (tmp_path / "scripts").mkdir()
    for name in (script, "doors.py"):
        (tmp_path / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
    (tmp_path / "model_check" / "cli").mkdir(parents=True)
    for package in ("model_check", "model_check/cli"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "model_check" / "cli" / "main.py").write_text("def main(words):\n    print(*words)\n")
    done = subprocess.run(
        [sys.executable, tmp_path / "scripts" / script, "--json"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["doctor", "--only", stages, "--json"], done.stderr


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["train --debug"]),
        ({"RUN_IMPORT_TEST": "1"}, ["doctor --only imports", "train --debug"]),
        ({"RUN_SINGLE_GPU_TEST": "1"}, ["doctor --only train", "train --debug"]),
        ({"RUN_IMPORT_TEST": "1", "RUN_SINGLE_GPU_TEST": "1"}, ["doctor --only imports,train", "train --debug"]),
        ({"RUN_IMPORT_TEST": "0"}, ["train --debug"]),
        ({"RUN_IMPORT_TEST": "1", "DOCTOR_FAILS": "1"}, ["doctor --only imports"]),
    ],
)
def test_run_sh_tests_first_where_asked(tmp_path: Path, environ: dict[str, str], expected: list[str]) -> None:
    """A model-check that prints its arguments shows what run.sh calls; where the doctor fails, nothing is trained."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "run.sh").write_text((ROOT / "run.sh").read_text())
    (tmp_path / "scripts" / "setup.sh").write_text("model_check_setup() { :; }\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command = tmp_path / ".venv" / "bin" / "model-check"
    command.write_text('#!/bin/sh\necho "$@"\n[ "$1" != doctor ] || [ -z "$DOCTOR_FAILS" ]\n')
    command.chmod(0o755)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RUN_")}
    done = subprocess.run(
        ["bash", tmp_path / "run.sh", "--debug"], env={**plain, **environ}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == expected, done.stderr
    assert (done.returncode != 0) == ("DOCTOR_FAILS" in environ)
