"""The terms of a call that must be the same on all ranks: reductions, numbers of objects, sizes, members of a group."""

from __future__ import annotations

from typing import Any

import pytest

from model_check.blackbox.joining import _members
from tests.blackbox.observed_runs import Runner

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(2)
for op in ({}, {"op": dist.ReduceOp.SUM}, {"op": dist.ReduceOp.MAX}):
    dist.all_reduce(x, **op)
dist.all_reduce(x, dist.ReduceOp.MIN)
dist.reduce(x, 0, dist.ReduceOp.PRODUCT)
dist.broadcast_object_list([1, "two", None], src=0)
dist.new_group([0])
dist.new_group((0,), sort_ranks=False)
dist.new_group([0], use_local_synchronization=True)
dist.destroy_process_group()
"""


def test_the_terms_of_a_call_are_written_down(run: Runner) -> None:
    seen = run(SCRIPT)
    assert seen.codes == [0], seen.errors
    reductions = [c.detail for c in seen.crumbs(event="begin") if c.op in ("all_reduce", "reduce")]
    assert reductions == ["ranks 0", "", "by max", "by min", "by product"], "a group's first record names its members"
    assert [c.shape for c in seen.crumbs(event="begin", op="broadcast_object")] == [(3,)]
    made = [c.detail for c in seen.crumbs(event="begin", phase="init")]
    assert made == ["init_process_group", "ranks 0", "ranks 0", "ranks 0, members only"]
    assert [e["world_size"] for e in seen.events("joining")] == [1]
    assert seen.events("recording_failed") == []


def test_a_size_that_the_script_names_itself_goes_before_the_environment(run: Runner) -> None:
    seen = run(
        "import os, tempfile\nimport torch.distributed as dist\n"
        "path = os.path.join(tempfile.mkdtemp(), 'meet')\n"
        "dist.init_process_group('gloo', init_method=f'file://{path}', rank=0, world_size=1)\n",
        env={"WORLD_SIZE": "7"},
        world=None,
    )
    assert seen.codes == [0], seen.errors
    assert [e["world_size"] for e in seen.events("joining")] == [1]


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (([1, 0],), {}, "ranks 0,1"),
        ((), {"ranks": (2, 1), "sort_ranks": False}, "ranks 2,1"),
        (([3, 1], None, None, None, True), {}, "ranks 1,3, members only"),
        ((), {}, "all ranks"),
    ],
)
def test_a_group_is_named_as_torch_orders_it(args: tuple[Any, ...], kwargs: dict[str, Any], said: str) -> None:
    assert _members(args, kwargs) == said
