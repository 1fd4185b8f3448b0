"""Files of a Hugging Face folder: every tensor in one of them, none too large, and an index that says which."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.config.shard_index import INDEX_FILE, SINGLE_FILE, cut_into_files, files_in_index, index_of


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_every_tensor_is_in_one_file(sizes: list[int], most: int) -> None:
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    cut = cut_into_files(named, most)
    files = cut.filename_to_tensors
    assert sorted(name for names in files.values() for name in names) == sorted(named)
    assert all(len(names) == 1 or sum(named[name] for name in names) <= most for names in files.values())
    index = index_of(cut)
    if index is None:
        assert list(files) == [SINGLE_FILE]
    else:
        assert files_in_index(json.dumps(index)) == sorted(files)
        assert index["metadata"]["total_size"] == sum(sizes)
        assert index["weight_map"].keys() == named.keys()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": {"a": ["x"]}}', "not an index"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": "/etc/x"}}', "outside its folder"),
        ('{"weight_map": {"a": 3}}', "outside its folder"),
    ],
)
def test_what_is_no_index_is_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        files_in_index(text)
    assert INDEX_FILE.startswith(SINGLE_FILE)
