"""Errors that another process raised first, lines that never ran, words given to sys.exit, and roots: as recorded."""

from __future__ import annotations

import multiprocessing
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.blackbox.relayed_errors import original

torch = pytest.importorskip("torch")


def worker_text(kind: str, where: str, trace: str) -> str:
    return f"Caught {kind} in {where}.\nOriginal {trace}"


def trace_of(function) -> str:
    try:
        function()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def chained() -> None:
    try:
        raise KeyError("label")
    except KeyError as error:
        raise ValueError("sample 17 has no label\nsecond line") from error


def test_the_last_exception_of_a_chain_is_the_one_that_left_the_worker():
    found = original(RuntimeError(worker_text("ValueError", "DataLoader worker process 2", trace_of(chained))))
    assert found is not None
    assert (found.type, found.message) == ("ValueError", "sample 17 has no label")
    assert (found.where, found.frames[-1].function) == ("DataLoader worker process 2", "chained")
    assert found.frames[-1].file == __file__


class Broken(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return {"a": 1}["missing"]


def test_a_real_worker_of_a_real_loader():
    with pytest.raises(KeyError) as raised:
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    found = original(raised.value)
    assert found is not None
    assert (found.type, found.message, found.where) == ("KeyError", "'missing'", "DataLoader worker process 0")
    assert (found.frames[-1].function, found.frames[-1].file) == ("__getitem__", __file__)


def test_a_real_worker_of_a_real_pool():
    with (
        multiprocessing.get_context("fork").Pool(1) as pool,
        pytest.raises(ValueError, match="invalid literal") as raised,
    ):
        pool.map(int, ["1", "x"])
    found = original(raised.value)
    assert found is not None and found.type == "ValueError" and found.where == "a worker process of its pool"


@pytest.mark.parametrize("error", [ValueError("plain"), RuntimeError("Caught cold in winter."), KeyError(3), OSError()])
def test_errors_of_this_process_have_no_other_origin(error):
    assert original(error) is None


@pytest.mark.slow
@given(st.text(max_size=300), st.text(max_size=40))
def test_texts_of_any_kind_are_read(body, where):
    found = original(RuntimeError(f"Caught X in {where}.\nOriginal Traceback (most recent call last):{body}"))
    assert found is None or all(frame.line >= 0 for frame in found.frames)


def test_a_line_that_does_not_parse_is_the_line_that_is_recorded(run):
    (event,) = run("import json\n\nx = = 1\n").events("exception")
    assert (event["type"], event["user_frame"]["file"], event["user_frame"]["line"]) == ("SyntaxError", "train.py", 3)


def test_words_given_to_exit_are_kept_without_secrets(run):
    ended = run("import sys\nsys.exit('no file for key abcdef123456')\n", env={"HF_TOKEN": "abcdef123456"})
    (event,) = ended.events("exit")
    assert (event["code"], event["via"], event["user_frame"]["line"]) == (1, "sys.exit", 2)
    assert event["message"].startswith("no file for key ") and "abcdef123456" not in event["message"]


ROOTS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(2)
dist.broadcast(x, src=0)
dist.gather(x, [torch.empty(2)])
dist.reduce(x, group_dst=0)
dist.broadcast_object_list([1])
dist.all_reduce(x)
"""


def test_the_root_of_a_collective_is_recorded_named_or_not(run):
    crumbs = run(ROOTS).crumbs(phase="collective", event="begin")
    assert [(c.op, c.peer) for c in crumbs] == [
        ("broadcast", 0),
        ("gather", 0),
        ("reduce", 0),
        ("broadcast_object", 0),
        ("all_reduce", -1),
    ]
