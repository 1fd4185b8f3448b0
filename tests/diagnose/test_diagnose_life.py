"""Ranks that write no records but still make progress: each sign of life, with a near miss."""

from __future__ import annotations

import pytest
from staging import held_up, look

LOADER = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
THREADING = "/usr/lib/python3.11/threading.py"
COMPILER = "/venv/lib/python3.11/site-packages/torch/_inductor/async_compile.py"
GENERATED = "/tmp/torchinductor_root/qz/cqzhzbz5rhhjxz2f3x4m5n6o7p2q3r4s5t6u7v2w3x4y5z6a7b2c.py"


def test_a_rank_that_waits_for_its_compiler_compiles(stage):
    """Inductor runs a file it has generated, and that file waits for the processes that compile its kernels."""
    _, guilty = held_up(stage)
    wait = (
        (THREADING, 327, "Condition.wait"),
        ("/usr/lib/python3.11/concurrent/futures/_base.py", 451, "Future.result"),
    )
    look(guilty, *wait, (COMPILER, 613, "wait"), (GENERATED, 90, "<module>"), ("", 26, "evaluate"))
    finding = stage.first()
    assert (finding.code, finding.severity, finding.ranks) == ("MC220", "info", [1]) and stage.line(finding) == 26
    assert finding.title.startswith("rank 1 has been compiling for ")
    assert not any("checkpoint" in line or "save" in line for line in finding.fix)


def test_code_that_was_compiled_is_not_compiling(stage):
    """While a compiled model runs, its stack holds frames from the compiler's package."""
    _, guilty = held_up(stage)
    ran = "/venv/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py"
    look(guilty, ("", 9, "lookup"), (GENERATED, 90, "call"), (ran, 700, "_fn"), ("", 26, "evaluate"))
    finding = stage.first()
    assert (finding.code, finding.severity) == ("MC219", "warning") and stage.line(finding) == 9


def looks(actor, *stacks, state="R", cpu=1.0, **sample):
    """A burst of looks, each with its own stack, and samples around it."""
    base = actor.stage.latest + 5.0
    for number, frames in enumerate(stacks):
        actor.stack(base + 0.15 * number, number + 1, actor.thread(*frames, active=cpu > 0))
        actor.sample(base + 0.15 * number, state=state, cpu_s=10.0 + cpu * 0.15 * number, **sample)


SCORING = "def score(texts):\n    while texts:\n        text = texts.pop()\n        n = count(text)\n        clip(n)\n"


def test_lines_that_change_are_life(stage):
    stage.source(SCORING + "\n" * 30)
    _, guilty = held_up(stage, line=33)
    at = [("", 4, "score"), ("", 33, "train")]
    looks(
        guilty, [("", 9, "count"), *at], [("", 11, "count"), *at], [("", 5, "score"), at[1]], [("", 12, "count"), *at]
    )
    finding = stage.first()
    assert (finding.code, finding.severity, finding.ranks) == ("MC220", "info", [1])
    assert any("rank 1 gets on: seen at " in line for line in finding.evidence)


def test_the_same_few_lines_again_and_again_are_none(stage):
    stage.source("def wait(self):\n    while not self.ready():\n        pass\n" + "\n" * 30)
    _, guilty = held_up(stage, line=33)
    at = ("", 33, "train")
    looks(
        guilty,
        [("", 2, "wait"), at],
        [("", 9, "ready"), ("", 2, "wait"), at],
        [("", 3, "wait"), at],
        [("", 2, "wait"), at],
    )
    assert stage.first().severity == "warning"


def test_one_long_line_in_a_loop_that_has_an_end_is_life(stage):
    """Weights are drawn one by one, in a separate function."""
    stage.source("def draw(weights):\n    for weight in weights:\n        fill(weight)\n" + "\n" * 30)
    _, guilty = held_up(stage, line=33)
    look(guilty, ("", 8, "fill"), ("", 3, "draw"), ("", 33, "train"), state="R", cpu=1.0)
    assert (stage.first().code, stage.first().severity) == ("MC220", "info")


def test_our_own_trainer_draws_its_weights(stage):
    _, guilty = held_up(stage, phase="model")
    ours = "/venv/lib/python3.11/site-packages/model_check/models/initialize.py"
    door = "/venv/lib/python3.11/site-packages/model_check/cli/train.py"
    look(guilty, (ours, 75, "_normal"), (ours, 69, "initialize"), (door, 80, "train"), state="R", cpu=1.0)
    finding = stage.first()
    assert (finding.code, finding.severity) == ("MC220", "info") and "building the model" in finding.title


@pytest.mark.parametrize(("leave", "code"), [("pass", "MC220"), ("break", "MC212")])
def test_a_loop_that_may_leave_early_may_only_wait(stage, leave, code):
    stage.source(
        f"def fetch():\n    for n in range(100):\n        time.sleep(0.1)\n        if n: {leave}\n" + "\n" * 30
    )
    _, guilty = held_up(stage, line=33)
    look(guilty, ("", 3, "fetch"), ("", 33, "train"), cpu=0.02)
    assert stage.first().code == code


def test_moved_bytes_are_life(stage):
    _, guilty = held_up(stage)
    base = stage.latest + 5.0
    for number in (1, 2):
        guilty.stack(base + number, number, guilty.thread(("", 12, "copy"), ("", 30, "train")))
        guilty.sample(base + number, state="S", io_bytes=number * (8 << 20))
    finding = stage.first()
    assert (finding.code, finding.severity) == ("MC220", "info") and any("moves bytes" in e for e in finding.evidence)


@pytest.mark.parametrize("cpu", [1.0, 0.2], ids=["whole_core", "shared_core"])
def test_a_loader_worker_that_builds_its_index_gets_on(stage, cpu):
    stage.source("def build(self):\n    for line in self.lines:\n        self.index(line)\n")
    _, guilty = held_up(stage, phase="data", line=20)
    loop = (LOADER.replace("dataloader", "_utils/worker"), 300, "_worker_loop")
    base = stage.latest + 5.0
    for number in (1, 2):
        guilty.stack(base + number, number, guilty.thread((LOADER, 1200, "_try_get_data"), ("", 20, "train")))
        worker = guilty.thread(("", 3, "build"), loop, ("", 20, "train"))
        worker["native_id"] = 5001
        guilty.stack(base + number, number, worker, process="loader_worker", pid=5001)
        child = {"pid": 5001, "state": "R", "comm": "python", "cpu_s": cpu * number}
        guilty.sample(base + number, children=[child])
    finding = stage.first()
    assert (finding.code, finding.severity, finding.ranks) == ("MC220", "info", [1])
    assert finding.title.startswith("rank 1 has been loading data for ")


@pytest.mark.parametrize(
    ("head", "gil", "code"),
    [("if self.keys:", False, "MC220"), ("while self.keys:", False, "MC204"), ("if self.keys:", True, "MC204")],
)
def test_a_dataset_that_sorts_its_index_in_one_native_call_gets_on(stage, head, gil, code):
    """Not in a loop that may be endless, nor while it holds the interpreter lock, as an endless regex does."""
    stage.source(f"def build(self):\n    {head}\n        order = np.argsort(self.keys)\n" + "\n" * 30)
    _, guilty = held_up(stage, phase="data", line=20)
    fetch = (LOADER.replace("dataloader", "_utils/fetch"), 54, "fetch")
    look(guilty, ("", 3, "build"), fetch, (LOADER, 700, "__next__"), ("", 20, "train"), state="R", cpu=1.0, gil=gil)
    finding = stage.first()
    assert (finding.code, finding.severity) == (code, "info" if code == "MC220" else "warning")
    said = any("computes in one call: seen at " in line for line in finding.evidence)
    assert said is (code == "MC220")


def test_workers_of_an_earlier_loader_are_not_missed(stage):
    _, guilty = held_up(stage, phase="data", line=20)
    guilty.event("loader_worker", worker_pid=5001, worker_id=0)
    guilty.sample(stage.latest, children=[{"pid": 5001, "state": "S", "comm": "python"}])
    fetch = LOADER.replace("dataloader", "_utils/fetch")
    look(guilty, ("", 9, "__getitem__"), (fetch, 50, "fetch"), (LOADER, 700, "__next__"), ("", 20, "train"))
    assert stage.first().code == "MC204"


def test_a_rank_that_works_on_after_its_peers_have_finished(stage):
    a, b = stage.ranks(2)
    stage.train(6)
    a.exits(0)
    stage.stall()
    look(b, ("", 33, "upload"))
    finding = stage.first(after=8.0)
    assert (finding.code, finding.severity, finding.ranks) == ("MC220", "info", [1])


def test_a_rank_that_completes_forwards_is_not_named_beside_one_that_is_stuck(stage):
    actors = stage.ranks(3)
    stage.train(6)
    actors[0].collective("all_reduce", 40, open=True)
    actors[1].begin("data", 20)
    stage.stall()
    for _ in range(20):
        actors[2].t += 0.5
        actors[2].span("forward", 30)
    findings = stage.findings(after=0.1)
    assert [(f.code, f.ranks, f.severity) for f in findings] == [("MC204", [1], "warning"), ("MC220", [2], "info")]


def test_a_look_at_ranks_that_have_gone_on_since_the_stall_was_said(stage):
    """The launcher says it, takes stacks, and then reads the rings: the next step may have begun."""
    first, last = stage.ranks(2)
    stage.train(6)
    stage.stall()
    for actor in (first, last):
        actor.t += 8.0
        actor.step()
    first.collective(open=True)
    assert stage.findings(after=0.1) == []
    assert [(f.code, f.ranks) for f in stage.findings(after=6.0)] == [("MC219", [1])]


@pytest.mark.parametrize("phase", ["collective", "init", "p2p"])
def test_the_last_rank_has_only_just_entered_what_all_are_in(stage, phase):
    actors = stage.ranks(2)
    stage.train(6)
    for actor, waited in zip(actors, (0.0, 11.0), strict=True):
        actor.t += waited
        if phase == "init":
            actor.begin("init", 40, op="new_group", detail="ranks 0,1")
        elif phase == "p2p":
            actor.message(("send", "recv")[actor.rank], 1 - actor.rank, open=True)
        else:
            actor.collective(open=True)
    stage.say("stall", actors[0].t + 6, since_t=actors[0].t, threshold_s=5.0, waiting_s=6.0)
    assert stage.findings(after=0.2) == []
    assert [(f.code, f.ranks) for f in stage.findings(after=6.0)] == [("MC220", [])]


def test_a_look_before_one_rank_has_left_a_call_and_after_another_has(stage):
    """The rings are read one after the other: rank 0 seems to wait for nobody, rank 1 is already past the call."""
    first, last = stage.ranks(2)
    stage.train(6)
    first.collective(open=True)
    last.t += 11.0
    last.collective()
    stage.say("stall", first.t + 6, since_t=first.t, threshold_s=5.0, waiting_s=6.0)
    assert stage.findings(after=0.1) == []


@pytest.mark.parametrize("phase", ["data", "forward", "tracker"])
def test_a_rank_that_has_just_begun_something_is_not_stuck_in_it(stage, phase):
    """Two ranks wait for the third since long ago. It was busy elsewhere, and enters what it may be stuck in next."""
    *_, guilty = held_up(stage, 3, guilty=2)[0]
    guilty.t += 11.0
    guilty.begin(phase, 20)
    assert stage.first(after=0.2).severity == "info"
    assert stage.first(after=6.0).severity == "warning"


def test_a_rank_that_has_just_come_back_from_a_subgroup_is_not_stuck(stage):
    waiting, peer, guilty = stage.ranks(3)
    stage.train(6)
    waiting.collective(open=True)
    stage.stall()
    for actor in (peer, guilty):
        actor.t += 11.0
        actor.collective(group="ranks 1,2", line=41)
    peer.collective(open=True)
    assert stage.first(after=0.2).severity == "info"
    assert [(f.code, f.ranks, f.severity) for f in stage.findings(after=6.0)] == [("MC219", [2], "warning")]


def test_a_poll_of_the_store_is_no_progress(stage):
    waiting, guilty = stage.ranks(2)
    stage.train(6)
    waiting.collective(open=True)
    stage.stall()
    for _ in range(30):
        guilty.span("store", 25, 0.3)
    assert [(f.ranks, f.severity) for f in stage.findings(after=0.1)] == [([1], "warning")]


@pytest.mark.parametrize(("state", "cpu", "codes"), [("R", 0.2, []), ("R", 1.0, ["MC220"]), ("S", 0.0, ["MC220"])])
def test_ranks_of_an_overloaded_machine_that_get_no_core_do_not_hang_in_a_call(stage, state, cpu, codes):
    """A rank that spins in a call, as NCCL does, has a core of its own; one that shares its core may be slow."""
    for actor in stage.ranks(2):
        actor.collective(open=True)
    stage.stall()
    for actor in stage.actors:
        look(actor, ("", 40, "train"), state=state, cpu=cpu)
    assert [finding.code for finding in stage.findings()] == codes
