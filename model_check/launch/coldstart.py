"""The first code of a rank started cold: takes its function from the launcher's file descriptor and runs it."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import nullcontext

from model_check.blackbox.gate import Gate, GatePlan
from model_check.launch.ranks import finish_interpreter, prepare_interpreter, run_entry


def main(fd: int) -> int:
    """Runs the entry and returns the rank's exit code. The bytes come from our own launcher, not from outside."""
    plan = GatePlan.from_environment(os.environ)
    with os.fdopen(fd, "rb") as file:
        sys.path[:] = pickle.load(file)
        # What follows imports the entry's module, and torch with it.
        with Gate(plan, int(os.environ["RANK"])).passing() if plan is not None else nullcontext():
            entry, payload = pickle.load(file)
        context = pickle.load(file)
    prepare_interpreter()
    return run_entry(entry, context, payload)


if __name__ == "__main__":
    finish_interpreter(main(int(sys.argv[1])))
