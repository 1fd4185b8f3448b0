"""Forks a launcher per line of stdin. Torch is imported once, so that each test pays for its ranks only."""

from __future__ import annotations

import atexit
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import launch_entries

from model_check.launch import Command, ConsoleOptions, launch_job
from model_check.launch.warmstart import preload
from model_check.record import RunDir
from model_check.supervise.hooks import EndJob, Graces, Hooks, JobView

PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo")


def end_when_marked(view: JobView) -> EndJob | None:
    return EndJob("the hook says so", 42) if (view.run_dir.root / "end").exists() else None


def launch(request: dict[str, Any]) -> int:
    options = dict(request["options"])
    if "graces" in options:
        options["graces"] = Graces(**options["graces"])
    if "log_copies" in options:
        options["console"] = ConsoleOptions(log_copies=Path(options.pop("log_copies")))
    if options.pop("hook", False):
        options["hooks"] = Hooks(on_poll=end_when_marked)
    payload = request["payload"]
    entry: Any = Command(tuple(payload)) if request["entry"] == "command" else getattr(launch_entries, request["entry"])
    options.setdefault("nproc", 2)
    result = launch_job(entry, payload, run_dir=RunDir.open(request["run_dir"]), preload_modules=PRELOAD, **options)
    Path(request["result"]).write_text(json.dumps({**asdict(result), "log_dir": str(result.log_dir)}))
    return result.exit_code


def main() -> None:
    preload(PRELOAD)
    atexit.register(print, "the launcher's own goodbye")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            out = os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = 99
            try:
                code = launch(request)
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
