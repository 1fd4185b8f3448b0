"""Scripts under the guard run as those of tests/blackbox do."""

from tests.blackbox.conftest import lone_group, run, script

__all__ = ["lone_group", "run", "script"]
