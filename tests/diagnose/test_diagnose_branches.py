"""What the source says about the way to a line, and the verdicts that rest on it."""

from __future__ import annotations

import pytest

from model_check.diagnose.branches import rank_branch, swallowing_handler
from model_check.record.stacks import Frame


def at(tmp_path, source: str, line: int) -> Frame:
    path = tmp_path / "script.py"
    assert not path.exists(), "sources are remembered by their path"
    path.write_text(source)
    return Frame(str(path), line, "f")


@pytest.mark.parametrize(
    "test",
    ["rank == 0", "dist.get_rank() == 0", "is_main_process()", "self.is_global_zero", "args.local_rank in (-1, 0)"],
)
def test_a_condition_on_the_rank_around_the_line(tmp_path, test):
    branch = rank_branch(at(tmp_path, f"if {test}:\n    work()\n", 2))
    assert branch is not None and branch.test == f"if {test}" and branch.site.endswith("script.py:1")


@pytest.mark.parametrize(
    ("source", "line"),
    [("if rank == 0:\n    a()\nelse:\n    b()\n", 4), ("if rank == 0: a()\n", 1), ("if rank:\n  with x:\n    a()", 3)],
)
def test_the_other_branch_a_single_line_and_an_inner_block_count_too(tmp_path, source, line):
    assert rank_branch(at(tmp_path, source, line)) is not None


@pytest.mark.parametrize(
    ("source", "test"),
    [
        ("def save():\n    if rank != 0:\n        return\n    barrier()\n", "if rank != 0: return"),
        ("for x in xs:\n    if rank > 1: continue\n    with y:\n        barrier()\n", "if rank > 1: continue"),
    ],
)
def test_ranks_that_have_left_before_the_line(tmp_path, source, test):
    branch = rank_branch(at(tmp_path, source, source.count("\n")))
    assert branch is not None and branch.test == test and branch.site.endswith("script.py:2")


@pytest.mark.parametrize(
    "check",
    [
        "if rank >= torch.cuda.device_count():\n    raise SystemExit",
        "if 'RANK' not in os.environ:\n    return single()",
        "if rank is None:\n    return",
        "if local_rank != -1:\n    return",
        "if lora_rank <= 0:\n    return model",
    ],
)
def test_a_check_that_all_ranks_pass_has_let_nobody_leave(tmp_path, check):
    source = f"{check}\nbarrier()\n"
    assert rank_branch(at(tmp_path, source, 3)) is None


def test_a_rank_that_only_does_something_first_has_not_left(tmp_path):
    assert (
        rank_branch(at(tmp_path, "if rank == 0:\n    save()\nif rank:\n    return\nelse:\n    a()\nbarrier()\n", 7))
        is None
    )


@pytest.mark.parametrize(
    ("given", "test"),
    [
        ("r = dist.get_rank()", "r == 0"),
        ("r, w = dist.get_rank(), dist.get_world_size()", "r % 2"),
        ("me = int(os.environ['RANK'])\nfirst = me == 0", "first and step > 3"),
        ("i: int = int(os.environ.get('LOCAL_RANK', 0))", "not i"),
        ("r = get_rank()\nquiet = not (r == 0 or r == 4)", "quiet"),
        ("def work(i, n): pass\nmp.spawn(work, args=(2,), nprocs=2)", "i == 0"),
    ],
)
def test_a_name_that_was_given_the_rank_asks_for_it(tmp_path, given, test):
    source = f"{given}\nif {test}:\n    barrier()\n"
    assert rank_branch(at(tmp_path, source, source.count("\n"))) is not None


@pytest.mark.parametrize(
    ("given", "test"),
    [
        ("model = DDP(net, device_ids=[rank])", "model.training"),
        ("device = f'cuda:{rank}'", "device"),
        ("r, w = dist.get_rank(), dist.get_world_size()", "w > 1"),
        ("sampler = DistributedSampler(data, rank=r)", "sampler"),
        ("share = n // world", "share"),
    ],
)
def test_what_was_only_made_with_the_rank_does_not(tmp_path, given, test):
    source = f"{given}\nif {test}:\n    barrier()\n"
    assert rank_branch(at(tmp_path, source, source.count("\n"))) is None


def test_a_function_that_is_called_only_under_the_condition(tmp_path):
    source = "def save():\n    barrier()\n\ndef end():\n    save()\n\nif rank == 0:\n    end()\n"
    branch = rank_branch(at(tmp_path, source, 2))
    assert branch is not None and branch.site.endswith(":7")


@pytest.mark.parametrize(
    "source",
    [
        "def save():\n    barrier()\n\nif rank == 0:\n    save()\nsave()\n",  # called elsewhere too
        "if step > 3:\n    barrier()\n",  # a condition on something else
        "if rank == 0:\n    pass\nbarrier()\n",
        "def f():\n    f()\n",  # nobody but itself calls it
        "this is not Python\nat all",
    ],
)
def test_lines_that_all_ranks_may_reach(tmp_path, source):
    line = next((n for n, text in enumerate(source.splitlines(), 1) if "barrier()" in text), 2)
    assert rank_branch(at(tmp_path, source, line)) is None


def test_a_handler_that_goes_on_with_the_loop(tmp_path):
    source = "for x in xs:\n    try:\n        step(x)\n    except (KeyError, ValueError):\n        bad += 1\n"
    handler = swallowing_handler(at(tmp_path, source, 3))
    assert handler is not None and handler.text == "except (KeyError, ValueError):" and handler.frame.line == 4


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def f():\n    step(x)\n\nfor x in xs:\n    try:\n        f()\n    except KeyError:\n        pass\n", 7),
        ("for x in xs:\n    with suppress(KeyError):\n        step(x)\n", 2),
        ("def f():\n    try:\n        step(x)\n    finally:\n        return 1\n\nwhile True:\n    f()\n", 5),
        (
            "def d(g):\n try:\n  g()\n except E:\n  return\n\n@d\ndef f():\n step(x)\n\nfor x in y: f()\n",
            4,
        ),
    ],
)
def test_ways_to_go_on_without_a_line(tmp_path, source, line):
    lost = next(n for n, text in enumerate(source.splitlines(), 1) if "step(x)" in text)
    handler = swallowing_handler(at(tmp_path, source, lost))
    assert handler is not None and handler.frame.line == line


@pytest.mark.parametrize(
    "source",
    [
        "for x in xs:\n    try:\n        step(x)\n    except KeyError as e:\n        log.info(e)\n",  # was not heard
        "for x in xs:\n    try:\n        if x:\n            step(x)\n    except KeyError:\n        pass\n",
        "for x in xs:\n    try:\n        if x: continue\n        step(x)\n    except KeyError:\n        pass\n",
    ],
)
def test_where_another_way_past_the_line_is_as_likely(tmp_path, source):
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "step(x)" in text)
    assert swallowing_handler(at(tmp_path, source, line)) is None


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    pass\n    step(x)\nexcept KeyError:\n    pass\n",  # no loop to go on with
        "for x in xs:\n    try:\n        step(x)\n    except KeyError:\n        raise\n",
        "for x in xs:\n    try:\n        step(x)\n    except KeyError:\n        break\n",
        "for x in xs:\n    try:\n        step(x)\n    except KeyboardInterrupt:\n        pass\n",
        "for x in xs:\n    try:\n        pass\n    except KeyError:\n        pass\n    step(x)\n",
    ],
)
def test_handlers_that_do_not(tmp_path, source):
    line = next(n for n, text in enumerate(source.splitlines(), 1) if "step(x)" in text)
    assert swallowing_handler(at(tmp_path, source, line)) is None


def test_a_call_under_a_condition_on_the_rank_is_the_wrong_one(stage):
    stage.source("def validate():\n    loss.backward()\n\nif rank == 0:\n    validate()\nbarrier()\n")
    a, b = stage.ranks(2)
    stage.train(3)
    a.collective("all_reduce", 2, open=True, native=True)
    b.collective("barrier", 6, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC207", [0], [1]) and stage.line(finding) == 2
    assert (finding.cause, finding.facts["condition"]) == ("condition", "if rank == 0")


def test_loaders_that_ended_alike_are_not_uneven(stage):
    stage.source("\n" * 60)
    a, b = stage.ranks(2)
    stage.train(6)
    for actor in (a, b):
        actor.exhausted()
    a.collective("barrier", 50, open=True)
    b.span("data", 20)
    b.span("forward", 30)
    b.collective("all_reduce", 40, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks) == ("MC206", [0]) and stage.line(finding) == 50


def test_a_rank_that_left_with_one_call_less_behind_a_quiet_handler(stage):
    stage.source(
        "\n" * 37 + "for batch in batches:\n    try:\n        dist.all_reduce(x)\n    except KeyError:\n        pass\n"
    )
    a, b = stage.ranks(2)
    stage.train(5)
    a.collective(open=True)
    b.exits(0, via="return")
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC302", [1], [0]) and stage.line(finding) == 41
    assert (finding.cause, finding.facts) == ("unseen", {"handler": "except KeyError:"})


def test_a_rank_that_meets_its_peers_at_the_end_with_one_call_less_behind_a_quiet_handler(stage):
    stage.source(
        "\n" * 37 + "for x in xs:\n    try:\n        dist.all_reduce(x)\n    except KeyError:\n        continue\n"
    )
    a, b = stage.ranks(2)
    stage.train(5)
    a.collective(open=True)
    b.collective("barrier", 50, open=True)
    finding = stage.first(after=0.5)
    assert (finding.code, finding.ranks, finding.victims) == ("MC302", [1], [0]) and stage.line(finding) == 41
    assert finding.evidence[0].endswith("train.py:40, step 5") and "barrier" in finding.evidence[1]


@pytest.mark.parametrize(
    ("test", "guilty"),
    [
        ("rank != 2", [2]),
        ("rank < 2", [2]),
        ("not (rank == 2 and step == 5)", [2]),
        ("rank in (0, 1)", [0, 1]),
        ("is_writer_rank in (True,)", [0, 1]),
    ],
)
def test_most_ranks_are_blamed_only_where_a_condition_names_them(stage, test, guilty):
    stage.source("\n" * 48 + f"if {test}:\n    dist.broadcast(x, 0)\n")
    ranks = stage.ranks(3)
    stage.train(5)
    for actor in ranks[:2]:
        actor.collective("broadcast", 50, open=True)
    ranks[2].collective(open=True)
    finding = stage.first(after=0.5)
    assert (finding.ranks, finding.facts["condition"]) == (guilty, f"if {test}")
