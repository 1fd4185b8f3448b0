"""Reading evidence: torn, missing and hostile files; incremental reading; the flight recorder's dumps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from staging import T0

from model_check.diagnose import Examiner, examine, load
from model_check.diagnose.reading import JsonlTail, Reader, read_fault_text
from model_check.record import JsonlWriter, RunDir
from model_check.record.events.memory import MemoryMark
from model_check.record.events.numerics import Losses
from model_check.record.events.process import JobStarted
from model_check.record.flight import op_name, read_flight
from model_check.record.process_sample import ProcessSample, RankSample
from model_check.record.stacks import Frame, innermost_user, read_stacks
from model_check.record.user_code import is_user_file


def test_an_empty_directory_is_an_empty_run(tmp_path):
    verdict = examine(RunDir.create(tmp_path / "run"), live=False)
    assert (verdict.outcome, verdict.world_size, verdict.findings) == ("interrupted", 0, [])


def test_a_torn_last_event_is_left_out_and_said(stage):
    a, _ = stage.ranks(2)
    a.event("memory", rss=1)
    with stage.run_dir.events(0).open("ab") as file:
        file.write(b'{"t": 1001.0, "event": "exc')
    evidence = load(stage.run_dir)
    assert evidence.of(0).happened(MemoryMark) and not evidence.of(0).exceptions
    assert any("torn" in sentence for sentence in evidence.damage)


def test_a_sample_of_an_earlier_version_is_read(stage):
    """It had no time of its own, and wrote null where nothing was known."""
    stage.ranks(1)
    child = {"pid": 8, "state": "Z", "cpu_s": 0.1, "comm": "python", "rss": 1, "io_bytes": 0, "switches": None}
    unknown = dict.fromkeys(("rss_file", "syscall", "syscall_fd", "syscall_target", "switches"))
    rank = {"pid": 7, "state": "S", "cpu_s": 1.5, "rss": 5, "threads": 3, "fd0": "pipe:[1]", "children": [child]}
    stage.say("sample", 12.0, ranks={"0": {**rank, **unknown}})
    (sample,) = load(stage.run_dir).of(0).samples
    zombie = ProcessSample(pid=8, state="Z", cpu_s=0.1, comm="python", rss=1)
    assert sample == RankSample(
        t=12.0, pid=7, state="S", cpu_s=1.5, rss=5, threads=3, fd0="pipe:[1]", children=(zombie,)
    )


def test_a_file_that_is_not_a_ring_is_damage_not_a_crash(stage):
    stage.ranks(2)
    stage.run_dir.ring(1).unlink()
    stage.run_dir.ring(1).write_bytes(b"\x00garbage" * 999)
    evidence = load(stage.run_dir)
    assert any("rank-00001.ring" in sentence for sentence in evidence.damage)
    assert len(evidence.of(0).crumbs) == 2 and evidence.of(1).crumbs == ()


def test_a_run_copied_elsewhere_gives_the_same_verdict(stage, tmp_path):
    a, b = stage.ranks(2)
    stage.train(4)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    a.exits(1)
    here = examine(stage.run_dir, live=False).to_json()
    shutil.copytree(stage.run_dir.root, tmp_path / "copy")
    assert examine(RunDir.open(tmp_path / "copy"), live=False).to_json() == here
    assert here["findings"][0]["code"] == "MC301"


def test_the_examiner_reads_on_and_keeps_the_time_of_the_first_detection(stage):
    a, b = stage.ranks(2)
    examiner = Examiner(stage.run_dir)
    stage.train(4)
    assert examiner.update(live=True, now=stage.latest).findings == []
    stage.train(4)
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 41, open=True)
    first = examiner.update(live=True, now=stage.latest + 0.5).findings[0]
    later = examiner.update(live=True, now=stage.latest + 60.0).findings[0]
    assert (first.code, first.seconds_to_detect) == ("MC201", 0.5)
    assert later.seconds_to_detect == 0.5


def test_the_examiner_and_a_fresh_look_agree(stage):
    a, b = stage.ranks(2, capacity=128)
    examiner = Examiner(stage.run_dir)
    for _ in range(30):
        stage.train(2)
        examiner.update(live=True, now=stage.latest)
    a.collective("all_reduce", 40, open=True)
    b.begin("data", 20)
    stage.stall()
    now = stage.latest + 7
    assert examiner.update(live=True, now=now).to_json() == examine(stage.run_dir, live=True, now=now).to_json()


def test_what_ended_the_first_life_of_a_restarted_rank_is_not_said_of_the_second(stage):
    stage.ranks(2)
    before = JsonlWriter(stage.run_dir.events(1))
    frame = {"file": str(stage.script), "line": 33, "function": "train", "text": ""}
    failed = {"event": "exception", "type": "ValueError", "message": "x", "user_frame": frame, "thread": "MainThread"}
    before.write({**failed, "t": T0 - 3, "pid": 3999})
    before.write({"event": "exit", "code": 1, "via": "exception", "t": T0 - 3, "pid": 3999})
    before.write({"event": "memory", "rss": 1, "t": T0 - 1, "pid": 4001})
    before.close()
    stage.train(3)
    assert stage.findings(after=0.1) == []
    events = load(stage.run_dir, live=True, now=stage.latest).of(1).told
    assert [e.kind for e in events if e.t < T0] == ["memory"], "its own, from before its ring was open"


def test_a_restarted_rank_is_alive_again(stage):
    (only,) = stage.ranks(1)
    only.exits(1)
    stage.say("rank_started", only.t + 1, rank=0, pid=5000)
    assert load(stage.run_dir).of(0).alive


def test_times_of_detection_survive_in_the_verdict_file(stage):
    a, b = stage.ranks(2)
    a.collective("all_reduce", 40, open=True)
    b.collective("broadcast", 41, open=True)
    verdict = examine(stage.run_dir, live=True, now=stage.latest + 1.5)
    verdict.write(stage.run_dir.verdict)
    assert examine(stage.run_dir, live=False).findings[0].seconds_to_detect == 1.5
    stage.run_dir.verdict.unlink()
    assert examine(stage.run_dir, live=False).findings[0].seconds_to_detect is None


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"event": "x"}')), max_size=12), st.integers(0, 200))
def test_event_files_of_any_content_are_read_in_pieces_or_at_once(tmp_path_factory, lines, cut):
    path = tmp_path_factory.mktemp("events") / "e.jsonl"
    data = b"\n".join(lines)
    in_pieces = JsonlTail(path)
    in_pieces.update()
    path.write_bytes(data[:cut])
    in_pieces.update()
    path.write_bytes(data)
    in_pieces.update()
    at_once = JsonlTail(path)
    at_once.update()
    assert in_pieces.events == at_once.events


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda c: (
            st.lists(c, max_size=3)
            | st.dictionaries(
                st.sampled_from(["threads", "frames", "entries", "rank", "t", "file", "line", "retired"]), c, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_dumps_of_any_json_are_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("dump") / "rank-00003.2.json"
    path.write_text(json.dumps(value))
    dump = read_stacks(path)
    assert dump is None or dump.rank in (3, value.get("rank"))
    assert isinstance(read_flight(path), tuple)


@given(st.text(max_size=300))
def test_any_text_is_searched_for_a_crashed_thread(text):
    assert all(isinstance(frame, Frame) for frame in read_fault_text("Fatal Python error: x\n" + text))


FLIGHT = {
    "entries": [
        {
            "collective_seq_id": 1,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "retired": True,
            "input_sizes": [[8]],
            "input_dtypes": ["Float"],
            "frames": [{"name": "train", "filename": "train.py", "line": 40}],
        },
        {
            "collective_seq_id": 2,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:broadcast",
            "state": "scheduled",
            "retired": False,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "frames": [
                {"name": "f", "filename": "/x/site-packages/torch/y.py", "line": 1},
                {"name": "train", "filename": "train.py", "line": 41},
            ],
        },
        {"p2p_seq_id": 1, "is_p2p": True, "profiling_name": "nccl:send 0->1"},
    ]
}


def test_the_flight_recorder_of_gloo(tmp_path):
    path = tmp_path / "rank-00000.1.json"
    path.write_text(json.dumps(FLIGHT))
    first, second = read_flight(path)
    assert (first.op, first.in_flight, first.input_sizes) == ("all_reduce", False, ((8,),))
    assert (second.op, second.in_flight, second.collective_seq_id) == ("broadcast", True, 2)
    assert [entry.user_frame and entry.user_frame.site for entry in (first, second)] == ["train.py:40", "train.py:41"]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:all_reduce", "all_reduce"),
        ("gloo:allreduce", "all_reduce"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:all_to_all", "all_to_all"),
        ("gloo:barrier", "barrier"),
        ("", "other"),
    ],
)
def test_one_name_for_an_operation_of_any_backend(name, op):
    assert op_name(name) == op


def test_a_mismatch_that_only_the_flight_recorder_saw(stage):
    stage.ranks(3)
    stage.run_dir.flight_dir.mkdir()
    for rank in range(3):
        dump = json.loads(json.dumps(FLIGHT))
        if rank == 1:
            dump["entries"][1]["profiling_name"] = "gloo:all_gather"
        (stage.run_dir.flight_dir / f"rank-{rank:05d}.1.json").write_text(json.dumps(dump))
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.location) == ("MC201", [1], "train.py:41")


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("train.py", True),
        ("/home/me/project/train.py", True),
        ("/home/me/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("/opt/model_check/blackbox/recorder.py", False),
        ("/opt/model_check/observe/recorder_of_an_earlier_version.py", False),
        ("/opt/model_check/launch/of_another_version.py", False),
        ("/opt/model_check/engine/loop.py", False),
        ("model_check/engine/loop.py", False),
        ("/home/me/model_check/train.py", True),
        ("/home/me/model_check/lib/steps.py", True),
        ("/home/me/model_check/model_check/engine/loop.py", False),
        ("", False),
    ],
)
def test_what_counts_as_the_users_own_code(path, user):
    assert is_user_file(path) is user


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (("/v/site-packages/torch/x.py", "/home/me/train.py", "/v/bin/torchrun"), "/home/me/train.py"),
        (("/v/lib/model_check/data/packed.py", "/home/me/use.py"), "/home/me/use.py"),
        (
            ("/v/lib/model_check/blackbox/a.py", "/v/lib/model_check/engine/loop.py", "/v/lib/model_check/cli/rank.py"),
            "/v/lib/model_check/engine/loop.py",
        ),
        (
            ("/v/lib/model_check/engine/loop.py", "/v/lib/model_check/cli/main.py", "/v/bin/model-check"),
            "/v/lib/model_check/engine/loop.py",
        ),
        (("/v/lib/model_check/models/llama.py", "/v/lib/model_check/cli/train.py", "pretrain_main.py"), None),
        (("/usr/lib/python3.12/threading.py",), ""),
    ],
)
def test_whoever_opens_our_trainer_is_a_door_and_no_user(files, named):
    found = innermost_user(Frame(file, 7, "f") for file in files)
    assert (found.file if found is not None else "") == (files[0] if named is None else named)


def test_a_long_run_is_held_in_bounded_memory_and_its_newest_records_are_there(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    reader = Reader(run_dir)
    launcher, rank = JsonlWriter(run_dir.supervisor_events), JsonlWriter(run_dir.events(0))
    launcher.write({"event": "job_started", "t": 0.0, "nproc": 1})
    for t in range(1, 4001):
        launcher.write({"event": "sample", "t": float(t), "ranks": {"0": {"pid": 1, "cpu_s": t}}})
        rank.write({"event": "losses", "t": float(t), "steps": [t], "values": [1.0]})
        if t % 500 == 0:
            evidence = reader.read(live=True, now=float(t))
            assert len(evidence.journal) < 100 and len(evidence.of(0).told) <= 1400
            assert evidence.of(0).samples[-1].cpu_s == t and evidence.of(0).happened(Losses)[-1].steps == (t,)
    assert evidence.said(JobStarted) and evidence.of(0).happened(Losses)[0].steps == (1,)
    assert len(evidence.of(0).samples) == 600
