"""Tokenizers: exact round trips, and a fast path that gives the ids of the plain one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers

from model_check.data import load_tokenizer
from model_check.data.pre_tokens import KNOWN_PATTERNS, splitter
from model_check.data.tokenizer import BUILTIN, BpeTokenizer
from model_check.data.word_cache import WordCache
from model_check.errors import DataError

AWKWARD = st.text(
    alphabet=st.one_of(
        st.sampled_from(
            list("  \n\n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u2009\u200b\u3000'_.,/-()aZé1漢²Ⅷ़́'ſ½😀\U00031350\ud7ff")
        ),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)
ASCII = st.text(alphabet=st.sampled_from(list("  \n\n\t\r\x0b\x0c\x1c\x7f'_./<|aIlLsStTrRvVeE019")), max_size=60)
WITH_ADDED_TOKENS = st.lists(AWKWARD | st.sampled_from(["<|endoftext|>", "<|end", "<|a b|>"]), max_size=5).map("".join)


@given(st.text(max_size=200))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(AWKWARD)
def test_builtin_round_trip(text: str) -> None:
    tokenizer = _plain_and_fast("builtin")[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_builtin_has_the_promised_shape() -> None:
    tokenizer = load_tokenizer("builtin")
    assert tokenizer.vocab_size == 4096
    assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"
    assert tokenizer.name == "builtin"


def _trained(pattern: str, normalizer: tokenizers.normalizers.Normalizer | None = None) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|end", "<|a b|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    blanks = ["\n\n  \n", " \n", "\n   x", "  ", "\t\t", ".\n\n", "...\r\n", "12345 678", "don't I'LL", "a_b(c)"]
    tokenizer.train_from_iterator(blanks * 50, trainer)
    return tokenizer.to_str()


PLAIN_AND_FAST = {
    **{f"pattern {i}": _trained(pattern) for i, pattern in enumerate(sorted(KNOWN_PATTERNS))},
    "with NFC": _trained(max(KNOWN_PATTERNS, key=len), tokenizers.normalizers.NFC()),
    "builtin": BUILTIN.read_text(encoding="utf-8"),
}


@cache
def _plain_and_fast(name: str) -> tuple[BpeTokenizer, WordCache]:
    plain = BpeTokenizer("plain", PLAIN_AND_FAST[name])
    return plain, _word_cache(PLAIN_AND_FAST[name], plain.eos_id)


def _word_cache(serialised: str, eos_id: int) -> WordCache:
    split = splitter(serialised)
    assert split is not None
    return WordCache(serialised, split, eos_id)


@pytest.mark.parametrize("name", list(PLAIN_AND_FAST))
@settings(max_examples=80)
@given(documents=st.lists(WITH_ADDED_TOKENS | ASCII, max_size=4))
def test_the_word_cache_gives_the_ids_of_the_plain_call(name: str, documents: list[str]) -> None:
    plain, fast = _plain_and_fast(name)
    encoded = fast.encode(documents)
    expected = [[*ids, plain.eos_id] for ids in plain.encode_batch(documents)]
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert encoded.ids.tolist() == [id_ for ids in expected for id_ in ids]


@pytest.mark.parametrize("name", list(PLAIN_AND_FAST))
@settings(max_examples=30)
@given(text=WITH_ADDED_TOKENS)
def test_the_parts_of_a_text_are_the_text(name: str, text: str) -> None:
    split = splitter(PLAIN_AND_FAST[name])
    assert split is not None
    assert "".join(split.split(text)) == text


def test_the_word_cache_keeps_what_it_learned(texts: list[str]) -> None:
    plain = load_tokenizer("builtin")
    words = _word_cache(BUILTIN.read_text(encoding="utf-8"), plain.eos_id)
    for part in (texts[:3], texts[2:5], texts):
        ids = words.encode(part).ids
        assert ids.tolist() == [id_ for ids in plain.encode_batch(part) for id_ in [*ids, plain.eos_id]]


def test_characters_that_unicode_never_assigns_may_occur_in_a_text() -> None:
    plain = load_tokenizer("builtin")
    text = "before \U0010fffe\U0010ffff after"
    encoded = _word_cache(BUILTIN.read_text(encoding="utf-8"), plain.eos_id).encode([text])
    assert encoded.ids.tolist() == [*plain.encode(text), plain.eos_id]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"added_tokens": [{"content": "<x>", "normalized": True}, {"content": "<y>", "normalized": False}]},
        {"added_tokens": [{"content": "é", "normalized": True}], "normalizer": {"type": "NFC"}},
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
    ],
)
def test_the_word_cache_is_refused_where_it_could_differ(change: dict[str, object]) -> None:
    parts = json.loads(BUILTIN.read_text(encoding="utf-8"))
    assert splitter(json.dumps(parts)) is not None
    assert splitter(json.dumps({**parts, **change})) is None


def test_a_tokenizer_the_word_cache_refuses_still_encodes_documents(tmp_path: Path) -> None:
    parts = json.loads(BUILTIN.read_text(encoding="utf-8"))
    parts["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    tokenizer = load_tokenizer(str(tmp_path))
    encoded = tokenizer.encode_documents(["The River", "runs"])
    expected = [*tokenizer.encode("The River"), tokenizer.eos_id, *tokenizer.encode("runs"), tokenizer.eos_id]
    assert encoded.ids.tolist() == expected
    assert tokenizer.decode(encoded.ids.tolist()) == "the river<|endoftext|>runs<|endoftext|>"


def test_bytes_encode_documents() -> None:
    encoded = load_tokenizer("bytes").encode_documents(["ab", "é"])
    np.testing.assert_array_equal(encoded.ids, [97, 98, 256, 0xC3, 0xA9, 256])
    np.testing.assert_array_equal(encoded.lengths, [3, 3])


def test_a_folder_names_its_end_of_text_token(tmp_path: Path) -> None:
    parts = json.loads(BUILTIN.read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    named = tmp_path / "tokenizer_config.json"
    named.write_text(json.dumps({"eos_token": {"content": "!"}}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode([tokenizer.eos_id]) == "!"
    named.unlink()
    other = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert other.decode([other.eos_id]) == "<|endoftext|>"
    assert other.fingerprint != tokenizer.fingerprint


def test_a_stored_maximum_length_cuts_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(BUILTIN))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path))
    text = "one two three four five six"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.decode(loaded.encode_documents([text]).ids.tolist()) == text + "<|endoftext|>"


def _without_end_of_text() -> str:
    return BUILTIN.read_text(encoding="utf-8").replace("<|endoftext|>", "<|nothing|>")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not a tokenizer.json"), (_without_end_of_text(), "no end-of-text token")],
    ids=["broken", "no eos"],
)
def test_unusable_files_are_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(str(path))
    assert caught.value.code == "MC907"
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["./nowhere", "missing.json", "/no/such/folder"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        load_tokenizer(name)
    assert caught.value.code == "MC907"


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
