"""Checks that wait for programs at the same time, where there are cores for it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from model_check.doctor.check import Check
from model_check.doctor.imports import Package, check_imports
from model_check.doctor.probe import call, side_by_side
from model_check.doctor.settings import Settings
from model_check.record.cgroups import granted_cores


def test_the_results_come_in_the_order_of_the_tasks_and_the_tasks_together() -> None:
    meeting = threading.Barrier(3, timeout=30)

    def task(number: int) -> int:
        meeting.wait()
        return number

    assert side_by_side([partial(task, number) for number in range(3)], at_once=3) == [0, 1, 2]


def test_on_few_cores_one_comes_after_the_other() -> None:
    seen: list[str] = []

    def task(name: str) -> None:
        seen.append(f"{name} begins on {threading.current_thread().name}")
        seen.append(f"{name} ends")

    side_by_side([partial(task, "a"), partial(task, "b")], at_once=0)
    here = threading.current_thread().name
    assert seen == [f"a begins on {here}", "a ends", f"b begins on {here}", "b ends"]


def test_an_interrupt_ends_the_programs_under_way(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def program() -> object:
        return call(["sh", "-c", 'echo $$ > "$0"; exec sleep 100', str(begun)], limit_s=100, environ=os.environ)

    def interrupt() -> object:
        while not begun.exists() or not begun.read_text().strip():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupt, program], at_once=2)
    assert not psutil.pid_exists(int(begun.read_text()))


def test_imports_are_the_same_on_many_cores() -> None:
    packages = (Package("json", "json"), Package("no_such_thing", "nothing"), Package("string", "string"))

    def found(cores: int) -> dict[str, str]:
        checks: list[Check] = list(check_imports(replace(Settings(), cores=cores), packages))
        return {check.name: check.status for check in checks}

    assert found(16) == found(1) == {"import json": "ok", "import string": "ok", "import no_such_thing": "fail"}


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "12800000 100000"}, 64),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64),
        ({"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_cores_that_a_container_sees_but_is_not_granted(tmp_path: Path, files: dict[str, str], granted: int) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert granted_cores(64, [tmp_path, tmp_path / "gone"]) == granted


def test_a_kernel_that_gives_no_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refuse)
    answer = call(["sh", "-c", "echo done"], limit_s=30, environ=os.environ)
    assert (answer.problem, answer.output) == ("", "done\n")
