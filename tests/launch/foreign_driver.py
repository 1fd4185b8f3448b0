"""A launcher of foreign scripts for the tests: `RUN_DIR script NPROC SCRIPT ARGS…` or `RUN_DIR command ARGV…`.

The supervisor has no rules here; the last line on standard output is the result.
"""

from __future__ import annotations

import json
import os
import sys

from model_check.launch.foreign import injected_environment
from model_check.numerics.bootstrap import inject_path
from model_check.record import RunDir, Verdict
from model_check.supervise.supervisor import Supervisor


def main(run_dir: str, mode: str, *words: str) -> int:
    directory = RunDir.create(run_dir)
    supervisor = Supervisor(directory, lambda _, live: Verdict(), say=print, show=print)
    if mode == "script":
        from model_check.launch.foreign import ForeignScript, run_script

        script = ForeignScript(words[1], words[2:])
        job = run_script(script, nproc=int(words[0]), run_dir=directory, supervisor=supervisor, bootstrap=inject_path())
        code, exits = job.exit_code, job.exits
    else:
        from model_check.launch.command import run_command

        environment = injected_environment(directory, os.environ, inject_path())
        command = run_command(words, run_dir=directory, env=environment, supervisor=supervisor)
        code, exits = command.exit_code, command.exits
    supervisor.finish("completed" if code == 0 else "failed", exits, code)
    told = [[exit.rank, exit.code, exit.signal] for exit in exits]
    print(json.dumps({"exit_code": code, "exits": told}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
