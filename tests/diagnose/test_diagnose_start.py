"""How a job starts: versions, code, import storm, hub and tracker on every rank."""

from __future__ import annotations

from model_check.record import write_json_atomic


def identify(actor, **fields):
    base = {
        "torch": "2.13.0",
        "python": "3.11.7",
        "script_sha256": "abc",
        "arguments": ["python", "train.py", "--lr", "3e-4"],
    }
    actor.span("init", 10, op="new_group")
    actor.event("versions", **{**base, **fields})


def test_other_versions_on_one_rank(stage):
    for actor in stage.ranks(3, join=False):
        identify(actor, torch="2.9.1" if actor.rank == 1 else "2.13.0")
    finding = stage.first(after=1.0)
    assert (finding.code, finding.ranks, finding.severity) == ("MC105", [1], "warning") and stage.line(finding) == 10
    assert finding.facts == {"differs": ["torch"], "other": {"torch": {1: "2.9.1"}}}


def test_other_arguments_or_code_on_one_rank(stage):
    for actor in stage.ranks(3, join=False):
        identify(actor, arguments=["python", "train.py", "--lr", "3e-3" if actor.rank == 2 else "3e-4"])
    finding = stage.first(after=1.0)
    assert (finding.code, finding.ranks) == ("MC106", [2])
    assert finding.facts["other"] == {"arguments": {2: "python train.py --lr 3e-3"}}


def test_what_a_launcher_gives_each_rank_of_its_own_is_no_difference(stage):
    for actor in stage.ranks(2, join=False):
        identify(actor, arguments=["python", "train.py", f"--local_rank={actor.rank}", "--rank", str(actor.rank)])
    assert stage.findings(after=1.0) == []


def test_spawned_children_have_command_lines_of_their_own(stage):
    for actor in stage.ranks(2, join=False):
        identify(actor, arguments=["python", "-c", f"from multiprocessing.spawn import spawn_main; ({actor.rank})"])
    assert stage.findings(after=1.0) == []


def import_together(stage, world, seconds):
    write_json_atomic(stage.run_dir.environment, {"cpu_count": 64, "cores": 2})  # a container's share of its host
    for actor in stage.ranks(world, join=False):
        actor.span("import", 5, seconds, detail="transformers")
        actor.join()


def test_what_slows_the_steps_down_comes_before_a_start_that_is_over(stage):
    import_together(stage, 4, 12.0)
    for actor in stage.actors:
        for _ in range(12):
            actor.step(data_s=0.1)
    assert [f.code for f in stage.findings(after=0.1)] == ["MC702", "MC101"]


def test_an_import_storm(stage):
    import_together(stage, 4, 12.0)
    finding = stage.first(after=1.0)
    assert (finding.code, finding.ranks, finding.severity) == ("MC101", [0, 1, 2, 3], "warning") and stage.line(
        finding
    ) == 5


def test_quick_imports_are_no_storm(stage):
    import_together(stage, 4, 2.0)
    assert stage.findings(after=1.0) == []


def test_as_many_ranks_as_cores_are_no_storm(stage):
    import_together(stage, 2, 12.0)
    assert stage.findings(after=1.0) == []


def test_every_rank_downloads_and_every_rank_tracks(stage):
    for actor in stage.ranks(3):
        actor.span("hub", 7, detail="gpt2")
        actor.span("tracker", 8, detail="wandb.init")
    findings = stage.findings(after=1.0)
    assert {f.code: (f.ranks, f.severity, stage.line(f)) for f in findings} == {
        "MC108": ([0, 1, 2], "warning", 7),
        "MC109": ([0, 1, 2], "warning", 8),
    }


def test_one_rank_that_does_it_for_all_is_right(stage):
    actors = stage.ranks(3)
    actors[0].span("hub", 7)
    actors[0].span("tracker", 8)
    assert stage.findings(after=1.0) == []


def test_other_code_in_checkouts_of_different_places(stage):
    for actor in stage.ranks(3, join=False):
        script = f"/tmp/{actor.rank}/train.py"
        digest = "xyz" if actor.rank == 1 else "abc"
        identify(actor, arguments=["/usr/bin/python3", script], script=script, script_sha256=digest)
    finding = stage.first(after=1.0)
    assert (finding.code, finding.ranks) == ("MC106", [1])
    assert finding.facts["other"] == {"hash of train.py": {1: "xyz"}}
