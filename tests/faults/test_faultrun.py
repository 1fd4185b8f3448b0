"""The judge itself: it must object to every way in which a verdict can be wrong."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expectations import FAULTS, Control, Fault
from faultrun import Observation, control_problems, launched, problems_of, processes_with, results_in

FAULT = next(fault for fault in FAULTS if fault.name == "exception_ddp")


def finding(**changes: Any) -> dict[str, Any]:
    line = min(FAULT.lines())
    right = {
        "code": "MC301",
        "title": "rank 1 raised ValueError: label 17 out of range at step 12",
        "severity": "error",
        "ranks": [1],
        "victims": [0],
        "location": f"scripts/{FAULT.path.name}:{line}",
        "evidence": ["the traceback"],
        "fix": ["check the labels"],
        "cause": None,
        "facts": {"exception": "ValueError", "message": "label 17 out of range at step 12"},
    }
    return right | changes


def judged(fault: Fault = FAULT, seen: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    found = finding(**changes)
    verdict = {"outcome": "failed", "findings": [found]}
    values: dict[str, Any] = {"finding": found, "seconds": 0.5, "exit_code": 1, "verdict": verdict, **(seen or {})}
    return problems_of(fault, Observation(**values), {})


def test_a_right_verdict_has_no_problems() -> None:
    assert judged() == []


def test_words_a_cause_and_a_tensor_that_are_promised_are_missed() -> None:
    told = replace(FAULT, says=("label 17",), cause="input", tensor="embed")
    problems = " ".join(judged(told, title="rank 1 failed", facts=FAULT.facts, evidence=["the traceback"]))
    assert all(word in problems for word in ("does not say", "cause None instead of 'input'", "tensor"))


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"location": "scripts/exception_ddp.py:1"}, "location"),
        ({"location": "other.py:14"}, "location"),
        ({"location": None}, "location"),
        ({"severity": "warning"}, "severity"),
        ({"victims": [0, 1]}, "both guilty and victims"),
        ({"facts": {"exception": "KeyError", "message": "label 17 out of range at step 12"}}, "fact exception"),
        ({"facts": {}}, "fact message"),
        ({"fix": []}, "evidence and a fix"),
        ({"evidence": []}, "evidence and a fix"),
        ({"ranks": [0]}, "root cause no more"),
        ({"code": "MC217"}, "root cause no more"),
    ],
)
def test_a_wrong_finding_is_objected_to(changes: dict[str, Any], objection: str) -> None:
    assert any(objection in problem for problem in judged(**changes))


@pytest.mark.parametrize(
    ("seen", "objection"),
    [
        ({"seconds": 2.5}, "found after 2.5 s, promised 2 s"),
        ({"exit_code": 0}, "exit code 0"),
        ({"exit_code": 143}, "exit code 143, expected 1"),
        ({"leftovers": ["77: python"]}, "left behind"),
        ({"finding": None}, "expected MC301 on (1,)"),
        ({"verdict": {"outcome": "completed", "findings": [finding()]}}, "outcome completed"),
    ],
)
def test_a_wrong_run_is_objected_to(seen: dict[str, Any], objection: str) -> None:
    assert any(objection in problem for problem in judged(seen=seen))


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"exit_code": 1}, "exit code 1"),
        ({"output": "RESULT 0 1.0\nRESULT 1 2.5"}, "differ"),
        ({"leftovers": ["77: python"]}, "left behind"),
        ({"verdict": {"outcome": "failed", "findings": []}}, "outcome failed"),
        ({"verdict": {"outcome": "completed", "findings": [{"code": "MC206", "severity": "error"}]}}, "error findings"),
        ({"verdict": {"outcome": "completed", "findings": [{"code": "MC220", "severity": "warning"}]}}, "withdrawn"),
        ({"verdict": {"outcome": "completed", "findings": [{"code": "MC416", "severity": "warning"}]}}, "early"),
    ],
)
def test_a_disturbed_control_is_objected_to(changes: dict[str, Any], objection: str) -> None:
    plain = ["RESULT 0 1.0", "RESULT 1 2.0"]
    healthy: dict[str, Any] = {
        "exit_code": 0,
        "output": "[CPU1] RESULT 1 2.0\n[CPU0] RESULT 0 1.0\n",
        "verdict": {"outcome": "completed", "findings": []},
    }
    control = Control("forks")
    assert control_problems(control, Observation(**healthy), plain) == []
    problems = control_problems(control, Observation(**(healthy | changes)), plain)
    assert any(objection in problem for problem in problems)


def test_results_are_found_behind_any_prefix() -> None:
    assert results_in("[CPU1] RESULT 1 'x'  \nnoise\nRESULT 0 3\n") == ["RESULT 0 3", "RESULT 1 'x'"]


def test_nothing_survives_the_launch_block(tmp_path: Path) -> None:
    daemon = "import os, sys; os.fork() and sys.exit(); os.setsid(); open('ready', 'w').close(); os.read(0, 1)"
    with launched([sys.executable, "-c", daemon], tmp_path, {}, "open") as job:
        assert job.wait(20)
        mark = job.mark
        while not (tmp_path / "ready").exists():
            os.sched_yield()
        assert len(processes_with(mark)) == 1
    assert processes_with(mark) == {}
