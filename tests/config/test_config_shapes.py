"""The built-in shapes are those of the published models, and explicit sizes override them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from model_check.config import SHAPES, ModelShape, RopeScaling, load_config, resolve_shape
from model_check.config.folder import read_folder_shape
from model_check.config.presets import PRESETS
from model_check.config.sections import ModelSection
from model_check.errors import ConfigError, UsageError

# Parameter counts that the published checkpoints report.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_of_the_published_models(name: str, count: int) -> None:
    assert SHAPES[name].parameters() == count


@pytest.mark.parametrize(
    "path",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B",
        "LLAMA-3.1-8B",
        "llama3.1-8b",
    ],
)
def test_spellings_of_one_model(path: str) -> None:
    assert resolve_shape(ModelSection(model_path=path)) == SHAPES["llama-3.1-8b"]


def test_details_that_a_count_does_not_show() -> None:
    assert SHAPES["llama-2-7b"].rope_theta == 10_000
    assert SHAPES["llama-3-8b"].rope_scaling is None
    assert SHAPES["llama-3.1-8b"].rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert SHAPES["llama-3.2-1b"].rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert SHAPES["llama-3.2-3b"].tie_embeddings and not SHAPES["llama-3.1-8b"].tie_embeddings
    assert (SHAPES["14b"].num_layers, SHAPES["14b"].intermediate_size, SHAPES["14b"].vocab_size) == (48, 13824, 152064)
    assert (SHAPES["32b"].num_layers, SHAPES["32b"].intermediate_size, SHAPES["32b"].vocab_size) == (64, 27648, 152064)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_built_in_shape_can_be_built(shape: ModelShape) -> None:
    assert shape.head_dim * shape.num_heads == shape.hidden_size
    assert shape.num_heads % shape.num_kv_heads == 0


def test_the_weights_that_compute() -> None:
    production = resolve_shape(load_config().model)
    assert production.parameters() == 1_923_125_248
    assert production.parameters_without_embedding() == 1_923_125_248 - 128256 * 4096
    tied = SHAPES["llama-3.2-1b"]
    assert tied.parameters_without_embedding() == tied.parameters()


def test_explicit_sizes_override_the_shape() -> None:
    model = ModelSection(model_path="llama-3.1-8b", num_layers=2, hidden_size=512, num_heads=16, rope_theta=1e4)
    shape = resolve_shape(model, vocab_size=4096)
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.num_kv_heads) == (2, 512, 32, 8)
    assert (shape.vocab_size, shape.rope_theta, shape.intermediate_size) == (128256, 1e4, 14336)


def test_without_a_path_the_sizes_and_the_tokenizer_decide() -> None:
    model = ModelSection(num_layers=2, hidden_size=64, num_heads=4)
    shape = resolve_shape(model, vocab_size=300)
    assert (shape.vocab_size, shape.num_kv_heads, shape.intermediate_size, shape.head_dim) == (300, 4, 256, 16)
    assert resolve_shape(model.model_copy(update={"vocab_size": 512}), vocab_size=300).vocab_size == 512
    with pytest.raises(ConfigError, match=r"set model\.vocab_size"):
        resolve_shape(model)


def test_an_unknown_hub_id_is_left_to_the_hub_but_cannot_be_resolved_here() -> None:
    config = load_config(overrides=["model.model_path=someone/their-llama"])
    with pytest.raises(UsageError, match="someone/their-llama is neither a built-in shape nor a folder"):
        resolve_shape(config.model)
    with pytest.raises(ConfigError, match="MC821"):
        load_config(overrides=["model.model_path=someone/their-llama", "model.num_heads=6", "model.num_kv_heads=4"])


def write_folder(folder: Path, **changes: object) -> Path:
    record = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_theta": 20_000,
    }
    written = {key: value for key, value in (record | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    expected = ModelShape(3, 96, 4, 2, 24, 160, 1000, 20_000.0, RopeScaling(8.0, 1.0, 4.0, 128), 1e-6, True, 512)
    older = write_folder(tmp_path, rope_scaling=scaling)
    assert resolve_shape(ModelSection(model_path=str(older))) == expected
    newer = write_folder(tmp_path, rope_theta=None, rope_parameters={**scaling, "rope_theta": 20_000})
    assert resolve_shape(ModelSection(model_path=str(newer))) == expected
    wide_heads = write_folder(tmp_path, head_dim=32)
    assert resolve_shape(ModelSection(model_path=str(wide_heads), num_layers=1)).head_dim == 32


@pytest.mark.parametrize("preset", [*PRESETS, None])
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_folder_defines_its_shape_under_every_preset(tmp_path: Path, preset: str | None, init: str) -> None:
    folder = write_folder(tmp_path)
    named = [f"model.model_path={folder}", f"model.init={init}", "training.context_length=512"]
    config = load_config(preset=preset, overrides=named)
    assert resolve_shape(config.model) == read_folder_shape(folder)
    assert config.origins["model.num_layers"] == "default", "the preset's layers are those of its own model"
    assert config.model.init_std == (0.006 if preset == "stable" else 0.02), (
        "what is no size stays as the preset has it"
    )


@pytest.mark.parametrize("preset", [*PRESETS, None])
def test_a_model_that_the_user_names_brings_its_whole_shape(tmp_path: Path, preset: str | None) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"model_path": "llama-3.1-70b"}}))
    assert resolve_shape(load_config(file, preset=preset).model) == SHAPES["llama-3.1-70b"]
    named = load_config(preset=preset, overrides=["model.model_path=llama-3.1-70b"])
    assert resolve_shape(named.model) == SHAPES["llama-3.1-70b"]
    asked = load_config(file, preset=preset, overrides=["model.num_layers=2"])
    assert resolve_shape(asked.model) == replace(SHAPES["llama-3.1-70b"], num_layers=2)


def test_a_size_that_somebody_asked_for_holds_against_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"model_path": str(folder), "intermediate_size": 320}}))
    asked = resolve_shape(load_config(file, preset="debug", overrides=["model.num_layers=2"]).model)
    assert asked == replace(read_folder_shape(folder), num_layers=2, intermediate_size=320)
    with pytest.raises(ConfigError) as refused:
        load_config(
            file,
            preset="full",
            overrides=["model.init=pretrained", "model.num_layers=2", "training.context_length=512"],
        )
    assert [(problem.code, problem.key) for problem in refused.value.problems] == [
        ("MC825", "model.num_layers"),
        ("MC825", "model.intermediate_size"),
    ]
    assert "model.num_layers=2 differs from the 3 of the weights" in str(refused.value)


def test_the_folder_of_a_preset_s_own_model_keeps_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    write_folder(folder)
    monkeypatch.chdir(tmp_path)
    assert resolve_shape(load_config(preset="production").model) == replace(read_folder_shape(folder), num_layers=4)


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"model_type": "mistral"}, 'model_type="mistral" where "llama" is needed'),
        ({"attention_bias": True}, "attention_bias=true where false is needed"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"hidden_size": None}, "hidden_size=null where a positive number is needed"),
        ({"hidden_size": 96.5}, "hidden_size=96.5 where a whole number is needed"),
        ({"vocab_size": "many"}, 'vocab_size="many"'),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_type="yarn" where default or llama3 is needed'),
    ],
)
def test_a_folder_that_our_model_does_not_compute(tmp_path: Path, changes: dict[str, object], answer: str) -> None:
    folder = write_folder(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        resolve_shape(ModelSection(model_path=str(folder)))
    assert caught.value.code == "MC827"
    assert answer in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_readable_record(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="MC827"):
        resolve_shape(ModelSection(model_path=str(tmp_path)))


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
    )
    theirs.save_pretrained(tmp_path)
    shape = resolve_shape(ModelSection(model_path=str(tmp_path)))
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (2, 64, 4, 2)
    assert (shape.vocab_size, shape.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (shape.rope_theta, shape.norm_eps, shape.head_dim) == (10_000.0, theirs.rms_norm_eps, 16)


def test_where_an_old_file_is_silent_the_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 83, **sizes}))
    shape, theirs = read_folder_shape(tmp_path), transformers.LlamaConfig(vocab_size=83, **sizes)
    assert shape is not None
    assert (shape.num_kv_heads, shape.head_dim) == (theirs.num_key_value_heads, theirs.head_dim) == (4, 16)
    assert (shape.norm_eps, shape.max_position) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert shape.tie_embeddings is theirs.tie_word_embeddings is False
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"] and shape.rope_scaling is None
