"""JSON with comments reads as the same value, whatever is written between its tokens; YAML scalars are 1.2's."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.config.sources import parse_json, parse_yaml, strip_json_comments

tricky_text = st.text(alphabet=st.sampled_from('ab"\\/*,]}[{: \né\u2028#'), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(tricky_text, inner, max_size=4),
    max_leaves=12,
)
gaps = st.sampled_from(
    ["", " ", "\n", "// x\n", '// "quoted" /* \n', "/**/", '/* , } ] " */', "/* a\n// b */", "//\r\n"]
)


def written_with_comments(value: Any, draw: Any) -> str:
    """JSON text of the value with a drawn gap at every place where white space may stand."""

    def gap() -> str:
        return draw(gaps)

    def trailing_comma() -> str:
        return gap() + draw(st.sampled_from(["", ","])) + gap()

    if isinstance(value, dict) and value:
        items = [
            gap() + json.dumps(key, ensure_ascii=draw(st.booleans())) + gap() + ":" + written_with_comments(inner, draw)
            for key, inner in value.items()
        ]
        return gap() + "{" + ",".join(items) + trailing_comma() + "}" + gap()
    if isinstance(value, list) and value:
        return (
            gap()
            + "["
            + ",".join(written_with_comments(inner, draw) for inner in value)
            + trailing_comma()
            + "]"
            + gap()
        )
    return gap() + json.dumps(value, ensure_ascii=draw(st.booleans())) + gap()


@given(value=json_values, data=st.data())
def test_comments_and_trailing_commas_change_nothing(value: Any, data: st.DataObject) -> None:
    assert parse_json(written_with_comments(value, data.draw)) == value


@given(value=json_values)
def test_plain_json_is_left_alone(value: Any) -> None:
    text = json.dumps(value, indent=1)
    assert strip_json_comments(text) == text


@given(text=st.text(alphabet='{}[]",:/*\\\n 1a', max_size=40))
def test_stripping_keeps_every_position(text: str) -> None:
    stripped = strip_json_comments(text)
    assert len(stripped) == len(text)
    assert [i for i, c in enumerate(stripped) if c == "\n"] == [i for i, c in enumerate(text) if c == "\n"]


@given(text=st.text(max_size=60))
def test_any_text_parses_or_is_a_value_error(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize("text", ["[,]", "{,}", "[1,,]", ",", "[1 /* open", '{"a":,}', "[1] // x\n2", "/ 1"])
def test_what_is_not_json_stays_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+ column \d+"):
        parse_json(text)


def test_an_error_names_the_place_in_the_original_text() -> None:
    with pytest.raises(ValueError, match="line 3 column 3"):
        parse_json('{ /* one\n two */ "a": 1 // three\n  "b": 2}')


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E3", 5000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", -3),
        ("0", 0),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("'5'", "5"),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("wikitext-2-raw-v1", "wikitext-2-raw-v1"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        (".inf", math.inf),
    ],
)
def test_scalars_of_set_and_yaml(text: str, value: Any) -> None:
    parsed = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_yaml_merge_keys_still_work() -> None:
    parsed = parse_yaml("base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\n")
    assert parsed["mine"] == {"x": 1, "y": 3}
