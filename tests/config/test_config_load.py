"""Layers, origins, presets, and the frozen object that comes out."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

from model_check.config import PRESETS, Config, from_jsonable, load_config, preset_path, resolve_shape, to_jsonable
from model_check.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_parses_and_resolves(name: str) -> None:
    config = load_config(preset=name)
    written = json.loads(preset_path(name).read_text())
    assert config.training.max_steps == written["training"]["max_steps"]
    assert config.origins["training.max_steps"] == f"preset {name}"
    assert resolve_shape(config.model, 4096).parameters() > 0


def test_the_folder_holds_exactly_the_presets() -> None:
    assert sorted(path.stem for path in preset_path("debug").parent.glob("*.json")) == sorted(PRESETS)


@pytest.mark.parametrize(
    ("name", "layers", "steps", "context", "rate"),
    [("debug", 2, 10, 512, 1e-7), ("production", 4, 100, 8192, 1e-5), ("full", 32, 10_000, 8192, 3e-4)],
)
def test_presets_have_the_promised_values(name: str, layers: int, steps: int, context: int, rate: float) -> None:
    config = load_config(preset=name)
    training = config.training
    assert config.model.num_layers == layers
    assert (training.max_steps, training.context_length, training.learning_rate) == (steps, context, rate)


def test_production_is_the_default_preset() -> None:
    assert load_config() == load_config(preset="production")


def test_stable_is_calmer_than_production() -> None:
    stable, production = load_config(preset="stable"), load_config()
    assert stable.training.learning_rate < production.training.learning_rate
    assert stable.model.init_std < production.model.init_std
    assert stable.training.max_grad_norm == 0.5
    assert stable.training.compute_precision == "fp32"
    assert stable.training.scheduler.warmup_steps == 20


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.yaml"
    first.write_text('{"training": {"max_steps": 1, "batch_size": 3, "num_workers": 4, "log_interval": 9}} // end')
    second.write_text("training:\n  max_steps: 2\n  batch_size: 5\n  learning_rate: 1e-4\nmodel:\n")
    config = load_config(
        first,
        second,
        preset="debug",
        values={"training.max_steps": (3, "flag --max-steps"), "training.num_workers": (6, "flag --num-workers")},
        overrides=["training.max_steps=4", "training.compile=on", "training.betas=[0.8, 0.9]"],
    )
    training = config.training
    assert (training.max_steps, training.batch_size, training.num_workers, training.log_interval) == (4, 5, 6, 9)
    assert (training.learning_rate, training.compile, training.betas) == (1e-4, "on", (0.8, 0.9))
    origins = config.origins
    assert origins["training.max_steps"] == "--set"
    assert origins["training.batch_size"] == str(second)
    assert origins["training.num_workers"] == "flag --num-workers"
    assert origins["training.log_interval"] == str(first)
    assert origins["training.context_length"] == "preset debug"
    assert origins["training.eps"] == "default"


def test_a_file_may_use_dotted_keys(tmp_path: Path) -> None:
    file = tmp_path / "dotted.json"
    file.write_text('{"training.scheduler.type": "cosine", "training.scheduler": {"warmup_steps": 3}}')
    scheduler = load_config(file, preset="debug").training.scheduler
    assert (scheduler.type, scheduler.warmup_steps) == ("cosine", 3)


def test_a_base_replaces_the_preset_and_keeps_its_origins() -> None:
    base = load_config(preset="debug", overrides=["system.seed=7"])
    config = load_config(base=base, overrides=["training.max_steps=3"])
    assert (config.system.seed, config.training.max_steps, config.model.hidden_size) == (7, 3, 64)
    assert config.origins["model.hidden_size"] == "preset debug"


def test_the_config_is_frozen() -> None:
    config = load_config(preset="debug")
    with pytest.raises(pydantic.ValidationError):
        config.training.max_steps = 5  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        config.training = config.training  # type: ignore[misc]


def test_with_values_checks_again_and_records_the_origin() -> None:
    config = load_config(preset="debug")
    changed = config.with_values({"training.max_steps": 5}, origin="flag --max-steps")
    assert (config.training.max_steps, changed.training.max_steps) == (10, 5)
    assert changed.origins["training.max_steps"] == "flag --max-steps"
    assert changed.origins["training.batch_size"] == "preset debug"
    with pytest.raises(ConfigError, match=r"\[MC811\] training.batch_size=0 \(from flag --batch-size\)"):
        config.with_values({"training.batch_size": 0}, origin="flag --batch-size")
    with pytest.raises(ConfigError, match=r"it is a section; name a key in it"):
        config.with_values({"training.scheduler": {"type": "wsd"}}, origin="flag")


def test_origins_survive_copies_pickles_and_the_run_directory() -> None:
    config = load_config(preset="debug", overrides=["system.seed=7"])
    written = json.loads(json.dumps(to_jsonable(config)))
    assert written["values"]["system"]["seed"] == 7
    assert written["values"]["training"]["betas"] == [0.9, 0.95]
    assert written["origins"]["system.seed"] == "--set"
    for copy in (config.model_copy(), pickle.loads(pickle.dumps(config)), from_jsonable(written)):
        assert copy.training == config.training
        assert copy.origins == config.origins


def test_a_damaged_record_is_refused() -> None:
    for record in (None, {}, {"values": {}}, {"values": 3, "origins": {}}):
        with pytest.raises(ConfigError, match="is not a recorded configuration"):
            from_jsonable(record)


def test_a_config_made_in_python_says_so() -> None:
    config = Config.model_validate({"training": {"max_steps": 3}})
    assert config.origins["training.max_steps"] == "python"
    assert config.origins["training.batch_size"] == "default"


def test_use_amp_false_means_fp32_and_booleans_are_switches() -> None:
    training = load_config(preset="debug", overrides=["training.use_amp=false", "training.compile=true"]).training
    assert (training.compute_precision, training.compile) == ("fp32", "on")
    assert load_config().training.compute_precision == "bf16"


@pytest.mark.parametrize(
    "text",
    [
        '{"system": {"device": "cuda", "device_id": 0}, "training": {"batch_size": 4, "grad_accum_nums": 8}}',
        '{"training": {"batch_size": 8, // one GPU\n "grad_accum_nums": 4, // less\n "num_workers": 8 // more\n}}',
        '{"model": {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "num_layers": 8, '
        '"attention_backend": "flash_attn"}, '
        '"training": {"learning_rate": 5e-6, "context_length": 4096}, "system": {"device": "cuda", "seed": 42}}',
        "training:\n  batch_size: 16\n  learning_rate: 1e-4\nfsdp:\n  use_mixed_precision: true\n",
        "training:\n  max_steps: 10000\n  scheduler:\n    type: linear_warmup\n    warmup_steps: 1000\n",
        "model:\n  hidden_size: 1024\n  num_heads: 16\n  num_layers: 6\n",
    ],
)
def test_the_files_of_the_earlier_guides_work_as_they_stand(tmp_path: Path, text: str) -> None:
    file = tmp_path / ("guide.json" if text.startswith("{") else "guide.yaml")
    file.write_text(text)
    config = load_config(file)
    assert str(file) in config.origins.values()
    resolve_shape(config.model, 4096)


def test_the_room_imports_no_torch() -> None:
    script = (
        "import sys; from model_check.config import load_config, resolve_shape\n"
        "resolve_shape(load_config().model)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
