"""Scripts under the guard run as those of tests/observe do."""

from tests.observe.conftest import lone_group, run, script

__all__ = ["lone_group", "run", "script"]
