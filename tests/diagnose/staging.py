"""A stage on which tests set up run directories: real recorders and real event files, on a clock of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_check.blackbox.recorder import Recorder
from model_check.diagnose import examine
from model_check.record import Finding, JsonlWriter, RunDir, Verdict
from model_check.record.ring import FLAG_ASYNC, FLAG_NATIVE

T0 = 1000.0
_DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}


class Actor:
    """One rank: does what a script would do, a millisecond a call, and leaves the same traces."""

    def __init__(self, stage: Stage, rank: int, capacity: int, **identity: Any) -> None:
        self.stage = stage
        self.rank = rank
        self.t = T0
        self.pid = 4000 + rank
        self.ended: tuple[int | None, int | None] | None = None  # code and signal
        real_clock = time.monotonic_ns
        time.monotonic_ns = lambda: int(self.t * 1e9)
        try:
            header = {"pid": self.pid, "world_size": stage.world, "backend": "gloo", **identity}
            self.recorder = Recorder(stage.run_dir.ring(rank), rank=rank, capacity=capacity, **header)
        finally:
            time.monotonic_ns = real_clock
        self.events = JsonlWriter(stage.run_dir.events(rank))
        self.counts: dict[Any, int] = {}

    def event(self, name: str, **fields: Any) -> None:
        self.events.write({"t": self.t, "event": name, "pid": self.pid, **fields})

    def begin(self, phase: str, line: int = 1, seconds: float = 0.001, **fields: Any) -> int:
        self.t += seconds
        place = {
            "file": fields.pop("file", str(self.stage.script)),
            "line": line,
            "function": fields.pop("function", "train"),
        }
        return self.recorder.begin(phase, **place, **fields)

    def end(self, span: int, phase: str, seconds: float = 0.001, detail: str = "") -> None:
        self.t += seconds
        self.recorder.end(span, phase, detail=detail)

    def span(self, phase: str, line: int = 1, seconds: float = 0.001, end_detail: str = "", **fields: Any) -> None:
        self.end(self.begin(phase, line, **fields), phase, seconds, end_detail)

    def join(self, line: int = 900) -> None:
        self.span("init", line, op="new_group", detail="init_process_group")
        self.event("versions", torch="2.13.0", python="3.11.7", script_sha256="abc", arguments=["python", "train.py"])

    def collective(
        self,
        op: str = "all_reduce",
        line: int = 40,
        *,
        shape: tuple[int, ...] = (8,),
        dtype: str = "float32",
        group: str = "default",
        open: bool = False,
        native: bool = False,
        seconds: float = 0.001,
        raised: str = "",
        peer: int = -1,
    ) -> int:
        self.counts[group] = self.counts.get(group, 0) + 1
        size = _DTYPE_BYTES.get(dtype, 0)
        for dim in shape:
            size *= dim
        span = self.begin(
            "barrier" if op == "barrier" else "collective",
            line,
            op=op,
            group=group,
            collective_seq=self.counts[group],
            shape=() if op == "barrier" else shape,
            dtype="none" if op == "barrier" else dtype,
            nbytes=0 if op == "barrier" else size,
            flags=FLAG_ASYNC | FLAG_NATIVE if native else 0,
            peer=peer,
        )
        if not open:
            self.end(span, "collective", seconds, f"raised {raised}" if raised else "")
        return span

    def message(self, op: str, peer: int, line: int = 50, *, open: bool = False) -> None:
        key = (op, peer)
        self.counts[key] = self.counts.get(key, 0) + 1
        span = self.begin("p2p", line, op=op, group="default", collective_seq=self.counts[key], peer=peer)
        if not open:
            self.end(span, "p2p")

    def step(
        self, *, forward_s: float = 0.002, data_s: float = 0.001, reduce: bool = True, wait_s: float = 0.001
    ) -> None:
        """One ordinary training step of a script that averages its gradients by hand at line 40."""
        self.span("data", 20, data_s)
        self.span("forward", 30, forward_s)
        self.span("backward", 31, 0.002)
        if reduce:
            self.collective(seconds=wait_s)
        self.span("optimizer", 45)
        self.recorder.point("step")
        self.recorder.steps += 1

    def exhausted(self) -> None:
        self.span("data", 20, end_detail="exhausted")

    def fails(self, kind: str, message: str, line: int, function: str = "train", text: str = "", **more: Any) -> None:
        frame = {"file": str(self.stage.script), "line": line, "function": function, "text": text}
        told = {"frames": [frame], "user_frame": frame, "thread": "MainThread", **more}
        self.event("exception", type=kind, message=message, **told)

    def swallows(self, kind: str, message: str, line: int) -> None:
        frame = {"file": str(self.stage.script), "line": line, "function": "train", "text": ""}
        self.event("swallowed_exception", type=kind, message=message, frames=[frame], user_frame=frame, t_raised=self.t)

    def exits(self, code: int | None = 0, *, signal: int | None = None, via: str = "", line: int = 0) -> None:
        if via:
            frame = {"file": str(self.stage.script), "line": line, "function": "train", "text": ""}
            self.event("exit", code=code, via=via, user_frame=frame if line else None)
        self.t += 0.01
        self.ended = (code, signal)
        self.stage.say("rank_exited", self.t, rank=self.rank, pid=self.pid, code=code, signal=signal)

    def sample(self, t: float, **fields: Any) -> None:
        body = {"pid": self.pid, "state": "S", "cpu_s": 1.0, "rss": 300 << 20, "threads": 4, "children": [], **fields}
        self.stage.say("sample", t, ranks={str(self.rank): body})

    def stack(
        self, t: float, round: int, *threads: dict[str, Any], process: str = "rank", pid: int | None = None
    ) -> None:
        own = self.pid if pid is None else pid
        body = {"t": t, "rank": self.rank, "pid": own, "source": "py-spy", "process": process, "threads": list(threads)}
        suffix = "" if process == "rank" else f".{own}"
        path = self.stage.run_dir.stacks_dir / f"rank-{self.rank:05d}.{round}{suffix}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**body, "error": None}))

    def thread(
        self, *frames: tuple[str, int, str], main: bool = True, gil: bool = False, active: bool = False
    ) -> dict[str, Any]:
        """Frames innermost first, as (file, line, function); "" is the script."""
        return {
            "name": "MainThread" if main else "Thread-1",
            "ident": 1,
            "native_id": self.pid if main else 99,
            "active": active,
            "gil": gil,
            "frames": [{"file": f or str(self.stage.script), "line": n, "function": name} for f, n, name in frames],
        }


class Stage:
    """A run directory in the making."""

    def __init__(self, root: Path) -> None:
        self.run_dir = RunDir.create(root / "run")
        self.script = root / "train.py"
        self.supervisor = JsonlWriter(self.run_dir.supervisor_events)
        self.world = 0
        self.actors: list[Actor] = []

    def source(self, text: str) -> None:
        self.script.write_text(text)

    def ranks(self, world: int, *, join: bool = True, capacity: int = 8192, **identity: Any) -> list[Actor]:
        self.world = world
        self.say("job_started", T0 - 1, nproc=world)
        for rank in range(world):
            self.say("rank_started", T0 - 1, rank=rank, pid=4000 + rank)
        self.actors = [Actor(self, rank, capacity, **identity) for rank in range(world)]
        if join:
            for actor in self.actors:
                actor.join()
        return self.actors

    def say(self, event: str, t: float | None = None, **fields: Any) -> None:
        self.supervisor.write({"t": self.latest if t is None else t, "event": event, **fields})

    @property
    def latest(self) -> float:
        return max((actor.t for actor in self.actors), default=T0)

    def train(self, steps: int = 6, **step: Any) -> None:
        for _ in range(steps):
            for actor in self.actors:
                actor.step(**step)

    def stall(self, after: float = 6.0) -> None:
        self.say("stall", self.latest + after, since_t=self.latest, threshold_s=5.0, waiting_s=after)

    def verdict(self, *, live: bool = True, after: float = 7.0) -> Verdict:
        return examine(self.run_dir, live=live, now=self.latest + after)

    def findings(self, *, live: bool = True, after: float = 7.0) -> list[Finding]:
        return self.verdict(live=live, after=after).findings

    def first(self, *, live: bool = True, after: float = 7.0) -> Finding:
        found = self.findings(live=live, after=after)
        assert found, "no finding"
        return found[0]

    def line(self, finding: Finding) -> int:
        assert finding.location is not None
        file, _, line = finding.location.rpartition(":")
        assert file == str(self.script)
        return int(line)


def held_up(
    stage: Stage, world: int = 2, *, guilty: int = 1, phase: str | None = None, line: int = 30
) -> tuple[list[Actor], Actor]:
    """All ranks but one wait in the step's all_reduce; that one is in `phase`, or in its own code."""
    actors = stage.ranks(world)
    stage.train(6)
    for actor in actors:
        if actor.rank != guilty:
            actor.collective("all_reduce", 40, open=True)
    if phase is not None:
        actors[guilty].begin(phase, line)
    stage.stall()
    return actors, actors[guilty]


def look(
    actor: Actor,
    *frames: tuple[str, int, str],
    rounds: int = 2,
    gil: bool = False,
    state: str = "S",
    cpu: float = 0.0,
    others: Sequence[dict[str, Any]] = (),
    **sample: Any,
) -> None:
    """Two rounds of stacks and two samples a second apart, after the stall began."""
    base = actor.stage.latest + 5.0
    for number in range(1, rounds + 1):
        t = base + number
        actor.stack(t, number, actor.thread(*frames, gil=gil, active=cpu > 0), *others)
        actor.sample(t, state=state, cpu_s=10.0 + cpu * number, **sample)
