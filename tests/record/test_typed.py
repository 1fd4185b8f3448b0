"""Typed records: what is written is read again, and what comes from anywhere never breaks a reader."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.record.events import KINDS, UnknownEvent, read_event
from model_check.record.events.process import GroupJoined
from model_check.record.files import JsonlWriter
from model_check.record.typed import from_json, to_json


@dataclass(frozen=True)
class Inner:
    line: int = 0


@dataclass(frozen=True)
class Outer:
    name: str = ""
    loss: float = 0.0
    how: Literal["fast", "slow"] = "fast"
    ranks: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_rank: dict[int, float] = field(default_factory=dict)
    inner: Inner = Inner()
    maybe: int | None = None
    anything: Any = None


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def test_what_is_written_is_read_again():
    record = Outer("a", 1.5, "slow", (1, 2), (3, "x"), {7: 0.5}, Inner(4), 9, {"b": [1]})
    assert from_json(Outer, json.loads(json.dumps(to_json(record)))) == record


def test_a_missing_optional_field_is_left_out_of_the_file():
    assert "maybe" not in to_json(Outer()) and to_json(Outer(maybe=0))["maybe"] == 0


def test_numbers_that_json_lacks_come_back():
    assert math.isnan(from_json(Outer, {"loss": "nan"}).loss)
    assert from_json(Outer, {"loss": "-inf"}).loss == -math.inf


def test_a_value_of_another_type_becomes_the_default():
    odd = {"name": 3, "loss": "high", "how": "other", "ranks": [1, "x"], "pair": [1], "by_rank": {"x": 1}, "inner": 5}
    assert from_json(Outer, {**odd, "maybe": True, "unknown": 1}) == Outer()


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Outer)]), ANY_JSON))
def test_no_json_object_breaks_the_reader(body: dict[str, Any]):
    read = from_json(Outer, body)
    assert isinstance(read.loss, float) and all(isinstance(rank, int) for rank in read.ranks)


@given(st.dictionaries(st.text(max_size=8), ANY_JSON), st.sampled_from(sorted(KINDS)))
def test_no_line_breaks_the_reader_of_events(body: dict[str, Any], kind: str):
    assert isinstance(read_event({**body, "event": kind}), KINDS[kind])


def test_a_kind_of_a_newer_version_is_kept_as_unknown():
    event = read_event({"event": "from_the_future", "t": 2.5, "pid": 7, "more": 1})
    assert event == UnknownEvent(name="from_the_future", t=2.5, pid=7)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_can_be_written_and_read_with_its_defaults(kind: str, tmp_path):
    event = KINDS[kind]()
    JsonlWriter(tmp_path / "events.jsonl").write({"event": event.kind, "t": 0.0, "pid": 0, **event.body()})
    assert read_event(json.loads((tmp_path / "events.jsonl").read_text())) == event


def test_an_event_is_written_as_earlier_versions_wrote_it():
    event = GroupJoined(name="dp", ranks=(0, 1), torch_name="3")
    assert event.body() == {
        "name": "dp",
        "ranks": [0, 1],
        "torch_name": "3",
    }
