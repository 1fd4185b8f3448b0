"""A signal that was ignored when a command started stays ignored."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORMS = {
    "verb": "from model_check.cli.unwinding import signals_unwind_us as installed",
    "rank": "from model_check.engine.rank import _StopFlag\n"
    "from contextlib import nullcontext as keep\ndef installed(): return keep(_StopFlag())",
}


@pytest.mark.parametrize(("form", "number"), [("verb", "SIGTERM"), ("verb", "SIGHUP"), ("rank", "SIGUSR1")])
def test_an_ignored_signal_stays_ignored(form: str, number: str) -> None:
    code = (
        f"import signal\nsignal.signal(signal.{number}, signal.SIG_IGN)\n{FORMS[form]}\n"
        f"with installed(): assert signal.getsignal(signal.{number}) is signal.SIG_IGN\n"
        f"assert signal.getsignal(signal.{number}) is signal.SIG_IGN\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
