"""Jobs that run slower than they should: straggler, data-bound, oversubscription, leak."""

from __future__ import annotations

import pytest

from model_check.record import write_json_atomic


def test_a_straggler_is_named_by_its_own_time_not_by_the_wall(stage):
    a, b = stage.ranks(2)
    for _ in range(12):
        b.step(forward_s=0.060)
        a.step(forward_s=0.010, wait_s=0.051)  # the collective makes both steps equally long
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims, finding.phase) == ("MC701", [1], [0], "forward")
    assert finding.severity == "warning" and stage.line(finding) == 30


@pytest.mark.parametrize(("after_s", "line"), [(-0.5, 30), (0.5, 77)])
def test_stacks_of_the_start_say_nothing_about_the_steps(stage, after_s, line):
    a, b = stage.ranks(2)
    begun = b.t
    for _ in range(12):
        b.step(forward_s=0.060)
        a.step(wait_s=0.059)
    for round in (1, 2):
        b.stack(begun + after_s, round, b.thread(("", 77, "forward")))
    assert stage.line(stage.first(after=0.1)) == line


def test_equal_ranks_have_no_straggler(stage):
    for actor in stage.ranks(2):
        for _ in range(12):
            actor.step(forward_s=0.060)
    assert stage.findings(after=0.1) == []


def test_one_slow_step_makes_no_straggler(stage):
    a, b = stage.ranks(2)
    for step in range(12):
        b.step(forward_s=0.5 if step == 6 else 0.02)
        a.step(forward_s=0.02, wait_s=0.48 if step == 6 else 0.001)
    assert stage.findings(after=0.1) == []


def burst(stage, *, lines, peer_too: bool = False):
    """In every fifth step rank 1 stops for 150 ms, in the phase of each line in turn."""
    a, b = stage.ranks(2)
    for step in range(40):
        stops = step % 5 == 4
        where = lines[step // 5 % len(lines)]
        b.step(forward_s=0.17 if stops and where == 30 else 0.02, data_s=0.15 if stops and where == 20 else 0.001)
        a.step(forward_s=0.17 if stops and peer_too else 0.02, wait_s=0.15 if stops and not peer_too else 0.001)


def test_a_rank_that_stops_now_and_then_is_a_straggler(stage):
    burst(stage, lines=[30])
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.victims, finding.phase) == ("MC701", [1], [0], "forward")
    assert stage.line(finding) == 30 and finding.cause == "now_and_then"


@pytest.mark.parametrize("how", [{"lines": [20, 30]}, {"lines": [30], "peer_too": True}], ids=["places", "peers"])
def test_stops_at_changing_places_or_on_all_ranks_name_no_straggler(stage, how):
    burst(stage, **how)
    assert stage.findings(after=0.1) == []


def test_three_pauses_at_one_place_and_one_elsewhere_name_no_straggler(stage):
    """A data set that builds its index a few times is no rank that is slow again and again."""
    a, b = stage.ranks(2)
    for step in range(40):
        data_s, forward_s = (3.0 if step in (5, 15, 25) else 0.001), (0.3 if step == 30 else 0.02)
        b.step(data_s=data_s, forward_s=forward_s)
        a.step(forward_s=0.02, wait_s=data_s + forward_s - 0.02)
    assert stage.findings(after=0.1) == []


def test_a_loader_that_takes_most_of_the_step(stage):
    for actor in stage.ranks(2):
        for _ in range(15):
            actor.step(data_s=0.05)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.severity) == ("MC702", [0, 1], "warning") and stage.line(finding) == 20


def test_a_loader_on_one_rank_only_is_a_straggler(stage):
    a, b = stage.ranks(2)
    for _ in range(15):
        b.step(data_s=0.05)
        a.step(wait_s=0.05)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.phase) == ("MC701", [1], "data")


def loads_with_workers(stage, cpu_of_slowest):
    """Rank 1's batch always comes last. Its loader worker uses `cpu_of_slowest` of a core, rank 0's half a core."""
    a, b = stage.ranks(2)
    for actor in (a, b):
        actor.event("loader_worker", worker_pid=5000 + actor.rank, worker_id=0)
    for _ in range(15):
        b.step(data_s=0.05)
        a.step(wait_s=0.05)
    for second in range(4):
        for actor, cpu in ((a, 0.5), (b, cpu_of_slowest)):
            child = {"pid": 5000 + actor.rank, "state": "S", "comm": "python", "cpu_s": cpu * second}
            actor.sample(actor.t - 4.0 + second, children=[child])


def test_equal_loaders_make_no_straggler(stage):
    loads_with_workers(stage, 0.5)
    assert stage.findings(after=0.1) == []


def test_a_loader_that_computes_more_than_the_others_makes_one(stage):
    loads_with_workers(stage, 0.9)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.phase) == ("MC701", [1], "data")


def oversubscribe(stage, threads, cpu_per_second):
    write_json_atomic(stage.run_dir.environment, {"cpu_count": 2})
    for actor in stage.ranks(4):
        for _ in range(3):
            actor.step()
        for second in range(4):
            actor.sample(actor.t + second, threads=threads, cpu_s=cpu_per_second * second, state="R")


def test_more_threads_than_cores_can_serve(stage):
    oversubscribe(stage, 30, 0.5)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC704", [0, 1, 2, 3]) and "OMP_NUM_THREADS=1" in finding.fix[0]


def test_threads_that_do_not_compute_are_not_counted(stage):
    """Of the checkpoint's writers, of gloo, of loggers: a rank with OMP_NUM_THREADS=1 has them too."""
    oversubscribe(stage, 30, 0.5)
    for actor in stage.actors:
        actor.event("threads", compute=1)
    assert stage.findings(after=0.1) == []


def test_threads_that_torch_computes_with_are(stage):
    oversubscribe(stage, 30, 0.5)
    for actor in stage.actors:
        actor.event("threads", compute=16)
    assert stage.first(after=0.1).code == "MC704"


def test_idle_threads_harm_nobody(stage):
    oversubscribe(stage, 30, 0.05)
    assert stage.findings(after=0.1) == []


def test_threads_that_get_no_processor_because_others_use_them_too(stage):
    oversubscribe(stage, 30, 0.2)
    for second in range(5):
        stage.say("sample", stage.latest + second, machine_cpu_s=100.0 + 1.9 * second, ranks={})
    finding = stage.first(after=0.1)
    assert finding.code == "MC704" and "1.9 of 2 cores are busy, 0.8 of them" in finding.evidence[1]


def test_threads_that_sleep_while_others_use_the_cores_are_not_blamed(stage):
    oversubscribe(stage, 30, 0.1)
    for second in range(5):
        stage.say("sample", stage.latest + second, machine_cpu_s=100.0 + 1.9 * second, ranks={})
    assert stage.findings(after=0.1) == []


def grow(stage, *, per_second=0, seconds=30, grown=None, mapped=False, step_every=1, **ring):
    """Rank 0 grows, by so much in every second or as `grown` has it; a step every so many seconds."""
    a, b = stage.ranks(2, **ring)
    stage.train(3)
    for second in range(seconds):
        for actor in (a, b):
            actor.t += 1.0
            if second % step_every == 0:
                actor.step()
            more = (grown(second) if grown else per_second * second) if actor.rank == 0 else 0
            actor.sample(actor.t, rss=(1 << 30) + more, rss_file=more if mapped else 4096)
    if step_every > 1:
        a.step(), b.step()


def test_memory_that_climbs_with_every_step(stage):
    grow(stage, per_second=16 << 20)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks, finding.severity) == ("MC705", [0], "warning")
    assert finding.facts == {"gib_per_hour": pytest.approx(55.58, abs=0.005)}  # 16 MiB every 1.012 s
    assert [e.partition(",")[0] for e in finding.evidence] == [
        "observed: resident memory rose from 1.02 to 1.44 GiB in 27 s of training",
        "observed: the line is the forward of the step that ran; what holds the memory is not known",
        "inferred: at this rate it doubles in 2 minutes",
    ]


def test_the_forecast_of_a_leak_is_the_hosts_memory_where_that_is_known(stage):
    write_json_atomic(stage.run_dir.environment, {"memory_available_bytes": 8 << 30})
    grow(stage, per_second=16 << 20)
    # Two ranks hold 1 GiB and one of them 29 × 16 MiB more: 5.5 GiB are left, at 15.8 MiB a second.
    said = [e for e in stage.first(after=0.1).evidence if "inferred" in e]
    assert said == ["inferred: at this rate the 5.5 GiB that the host has left are used up in 6 minutes"]


def test_memory_that_climbs_behind_a_ring_that_holds_only_the_newest_steps(stage):
    grow(stage, per_second=16 << 20, capacity=32)
    assert stage.first(after=0.1).code == "MC705"


def test_memory_that_stays_is_no_leak(stage):
    grow(stage, per_second=1 << 12)
    assert stage.findings(after=0.1) == []


MIB = 1 << 20


def test_memory_that_grows_between_two_steps_is_no_leak(stage):
    """A compilation or an evaluation: the memory they take does not grow with the steps."""
    grow(stage, per_second=16 << 20, seconds=40, step_every=100)
    assert stage.findings(after=0.1) == []


def test_a_leak_is_told_after_twenty_seconds(stage):
    grow(stage, per_second=16 << 20, seconds=18)
    assert stage.findings(after=0.1) == [], "a cache may grow like that, too"


@pytest.mark.parametrize(
    "grown",
    [
        pytest.param(lambda second: 40 * MIB * min(second, 10), id="a cache that is full after 10 s"),
        pytest.param(lambda second: 40 * MIB * min(second, 32), id="after 32 of 40 s"),
        pytest.param(lambda second: int(600 * MIB * (1 - 0.95**second)), id="a cache of samples drawn at random"),
        pytest.param(lambda second: 300 * MIB * (second > 3) + MIB * second // 4, id="an allocator that warms up"),
        pytest.param(lambda second: 50 * MIB * (second % 8), id="passes of long steps"),
    ],
)
def test_growth_that_flattens_is_no_leak(stage, grown):
    grow(stage, grown=grown, seconds=40)
    assert stage.findings(after=0.1) == []


def test_growth_within_few_steps_is_that_of_a_pass(stage):
    grow(stage, per_second=16 << 20, seconds=40, step_every=8)
    assert stage.findings(after=0.1) == []


def test_pages_of_a_mapped_file_are_no_leak(stage):
    grow(stage, per_second=16 << 20, mapped=True)
    assert stage.findings(after=0.1) == []


def test_a_leak_behind_a_cache_that_filled_first(stage):
    grow(stage, grown=lambda second: 60 * MIB * min(second, 12) + 10 * MIB * second, seconds=60)
    finding = stage.first(after=0.1)
    assert (finding.code, finding.ranks) == ("MC705", [0])
    assert finding.facts["gib_per_hour"] == pytest.approx(34.74, abs=0.005)  # 10 MiB every 1.012 s: without the cache


def test_slowness_is_not_reported_beside_a_crash(stage):
    a, b = stage.ranks(2)
    for _ in range(12):
        b.step(forward_s=0.060)
        a.step(wait_s=0.059)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    assert [f.code for f in stage.findings(after=0.1)] == ["MC301"]


def test_the_threads_that_every_rank_has_do_not_count(stage):
    oversubscribe(stage, 14, 0.5)
    assert stage.findings(after=0.1) == []


def test_what_a_rank_frees_on_its_way_out_does_not_hide_its_leak(stage):
    grow(stage, per_second=16 << 20)
    for actor in stage.actors:
        actor.sample(actor.t + 0.8, rss=1 << 29)
        actor.exits(0, via="return")
    assert [(f.code, f.ranks) for f in stage.findings(live=False)] == [("MC705", [0])]
