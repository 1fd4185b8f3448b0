"""Properties: healthy jobs, in whatever interleaving they are looked at, are never accused."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staging import Stage

OPS = st.sampled_from(["all_reduce", "broadcast", "all_gather", "barrier", "reduce_scatter"])
CALLS = st.lists(st.tuples(OPS, st.integers(40, 44), st.integers(1, 9)), min_size=1, max_size=6)
RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def perform(actor, call, *, open=False):
    op, line, size = call
    actor.collective(op, line, shape=(size,), native=size % 2 == 0 and op != "barrier", open=open)


@RELAXED
@given(
    routine=CALLS,
    steps=st.integers(1, 8),
    world=st.integers(1, 4),
    lags=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    data=st.data(),
)
def test_ranks_that_do_the_same_with_lags_are_never_accused(tmp_path_factory, routine, steps, world, lags, data):
    stage = Stage(tmp_path_factory.mktemp("stage"))
    script = [call for _ in range(steps) for call in routine]
    for actor in stage.ranks(world):
        done = max(0, len(script) - lags[actor.rank])
        for index, call in enumerate(script[:done]):
            perform(actor, call)
            if index % len(routine) == len(routine) - 1:
                actor.recorder.point("step")
                actor.recorder.steps += 1
        if done < len(script) and data.draw(st.booleans()):
            perform(actor, script[done], open=True)
    assert [f for f in stage.findings(after=0.5) if f.severity == "error"] == []
    assert [f for f in stage.findings(after=500.0) if f.severity == "error"] == [], "slowness alone proves nothing"


@RELAXED
@given(branches=st.lists(st.integers(1, 30), min_size=2, max_size=5), steps=st.integers(2, 6))
def test_call_sites_that_differ_between_ranks_consistently_are_legal(tmp_path_factory, branches, steps):
    stage = Stage(tmp_path_factory.mktemp("stage"))
    for actor in stage.ranks(2):
        for _ in range(steps):
            for line in branches:
                actor.collective("all_reduce", line + 100 * actor.rank)
            actor.recorder.steps += 1
    assert stage.findings(after=0.5) == []


@RELAXED
@given(routine=CALLS, steps=st.integers(1, 5), world=st.integers(2, 4), data=st.data())
def test_a_foreign_operation_is_always_found(tmp_path_factory, routine, steps, world, data):
    stage = Stage(tmp_path_factory.mktemp("stage"))
    guilty = data.draw(st.integers(0, world - 1))
    for actor in stage.ranks(world):
        for _ in range(steps):
            for call in routine:
                perform(actor, call)
            actor.recorder.steps += 1
        if actor.rank == guilty:
            actor.collective("scatter", 99, open=True)
        else:
            perform(actor, routine[0], open=True)
    finding = stage.first(after=0.5)
    assert finding.code in ("MC201", "MC206", "MC207") and finding.certainty == "proven"
    assert guilty in finding.ranks and guilty not in finding.victims
    if world > 2:
        assert finding.ranks == [guilty]
