"""Healthy but odd scripts: no error finding, no stall left standing, the same result and exit code as without us."""

from __future__ import annotations

from pathlib import Path

import pytest
from expectations import CONTROLS, HEALTHY, Control, markers_of
from faultrun import observe_control

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    "control", [pytest.param(c, id=c.name, marks=[getattr(pytest.mark, m) for m in markers_of(c)]) for c in HEALTHY]
)
def test_the_healthy_script_is_left_alone(control: Control, tmp_path: Path) -> None:
    seen = observe_control(control, tmp_path)
    assert seen.problems == [], f"{seen.problems}\n{seen.output[-4000:]}"


def test_every_control_is_in_the_table() -> None:
    assert {path.stem for path in CONTROLS.glob("*.py")} == {control.path.stem for control in HEALTHY}
