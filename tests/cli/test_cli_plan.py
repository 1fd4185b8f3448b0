"""`model-check plan`, and what `train` makes of it before it launches anything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_check.cli.fitting import Fitted, fit_to_gpus
from model_check.cli.main import main
from model_check.cli.plan import machine_of, shape_of, smallest_device
from model_check.config import load_config
from model_check.config.eight_bit import torchao_is_installed
from model_check.errors import UsageError
from model_check.launch import Gpu

GIB = 2**30


def plan(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_a_file_of_weights_leaves_the_vocabulary_to_the_tokenizer(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    weights.touch()
    config = load_config(preset="debug", overrides=["model.init=pretrained", f"model.model_path={weights}"])
    assert shape_of(config).vocab_size == 4096


def test_a_plan_for_a_program(capsys: Any) -> None:
    code, out, _ = plan(capsys, "--preset", "full", "--gpu", "H100", "--world-size", "8", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["world_size"], found["parameters"], found["global_batch"]) == (8, 8_030_261_248, 8)
    configured = found["as_configured"]
    assert configured["fits"] and configured["shards"] == 8
    memory = configured["memory"]
    assert memory["peak_gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    assert memory["peak_gib"] == max(memory["moments_gib"].values())
    assert memory["peak_gib"] + memory["outside_gib"] < memory["needed_gib"] < found["gpu"]["memory_gib"]
    assert memory["reserved_gib"] > memory["peak_gib"]
    assert {row["strategy"] for row in found["options"]} == {"ddp", "fsdp"}
    assert {row["activation_checkpointing"] for row in found["options"]} == {"none", "selective", "full"}
    whole = next(row for row in found["options"] if row["strategy"] == "ddp" and row["tensor"] == 1)
    assert not whole["fits"] and whole["largest_batch"] == 0
    assert 0.3 < configured["speed"]["mfu"] < 0.8


def test_advice_can_be_pasted_into_a_file(capsys: Any, tmp_path: Path) -> None:
    asked = ("--preset", "32b", "--gpu", "H100", "--world-size", "8", "--json")
    code, out, _ = plan(capsys, *asked)
    assert code == 1, "as it stands it does not fit"
    file = tmp_path / "advice.json"
    file.write_text(json.dumps(json.loads(out)["advice"]["config"]))
    code, out, _ = plan(capsys, *asked, "--config", str(file))
    assert code == 0 and json.loads(out)["as_configured"]["fits"]


def test_advice_that_the_command_line_would_overrule_says_so(capsys: Any) -> None:
    asked = ("--preset", "production", "--gpu", "A100-40", "--set", "parallel.strategy=fsdp")
    code, out, _ = plan(capsys, *asked)
    assert code == 1
    assert out.splitlines()[-1] == "a file does not overrule the command line: leave out --set parallel.strategy"
    code, out, _ = plan(capsys, "--preset", "full", "--gpu", "H200", "--world-size", "64", "--batch-size", "16")
    assert code == 1
    assert out.splitlines()[-1] == "a file does not overrule the command line: leave out --batch-size"


@pytest.mark.parametrize("columns", ["80", "120"])
def test_for_people_it_fits_the_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = plan(capsys, "--preset", "14b", "--gpu", "H200")
    assert code == 1
    assert max(len(line) for line in out.splitlines()) <= int(columns)
    for word in ("14.77 B parameters", "optimizer", "◄ peak", "does not", "largest", '"optimizer_states": "8bit"'):
        assert word in out, out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "full", "--gpu", "XYZ"), ("--gpu XYZ", "H200")),
        (("--preset", "full", "--gpu", "H100", "--world-size", "6", "--set", "parallel.tensor=4"), ("6", "=4")),
        (("--preset", "nosuch", "--gpu", "H100"), ("nosuch",)),
        (("--preset", "", "--gpu", "H100"), ("MC805", "the presets are debug")),
        # What `train` would refuse is not said to fit.
        (
            ("--preset", "full", "--gpu", "H100", "--world-size", "8", "--set", "training.global_batch=5"),
            ("MC833", "global_batch=5", "batch_size*dp=8"),
        ),
    ],
)
def test_mistakes_are_one_sentence(capsys: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    code, out, err = plan(capsys, *arguments)
    assert code == 2 and out == "" and "Traceback" not in err
    assert all(word in err for word in words), err


def test_the_largest_job_is_planned_without_torch() -> None:
    program = (
        "import sys\n"
        "from model_check.cli.main import main\n"
        "try:\n"
        "    main(['plan', '--preset', 'full', '--set', 'model.model_path=llama-3.1-405b', '--set',\n"
        "          'model.num_layers=126', '--gpu', 'H100', '--world-size', '16384', '--json'])\n"
        "finally:\n"
        "    sys.stderr.write(str('torch' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "False")
    advice = json.loads(done.stdout)["advice"]
    assert advice["fits"] and advice["tensor"] == 8 and advice["memory"]["needed_gib"] < 79.1


def gpus(gib: float, count: int = 1, name: str = "NVIDIA H200") -> list[Gpu]:
    return [Gpu(i, f"GPU-{i}", name, round(gib * GIB), 0, 0) for i in range(count)]


def fit(preset: str, found: list[Gpu], *overrides: str, force: bool = False) -> tuple[Fitted, list[str]]:
    said: list[str] = []
    config = load_config(preset=preset, overrides=list(overrides))
    ranks = max(1, len(found))
    return fit_to_gpus(config, found, world_size=ranks, ranks_per_host=ranks, force=force, say=said.append), said


def test_a_run_that_fits_starts_in_silence_and_leaves_its_plan() -> None:
    fitted, said = fit("production", gpus(140))
    assert said == [] and fitted.plan is not None
    assert fitted.plan["fits"] and fitted.plan["gpu"] == "H200"
    assert fitted.plan["memory"]["peak_gib"] == pytest.approx(33.4, rel=0.02)
    assert fitted.plan["remedies"][0]["flags"] == "--set parallel.activation_checkpointing=selective"


def test_memory_that_others_hold_is_a_warning() -> None:
    crowded = [replace(gpu, memory_used=110 * GIB) for gpu in gpus(140, 2)]
    fitted, said = fit("production", [gpus(140)[0], crowded[1]])
    assert fitted.plan is not None and len(said) == 1
    assert said[0].startswith("plan: GPU 1 has 30.0 GiB free, and a rank needs ")
    assert "others hold 110.0" in said[0]


def test_a_run_that_cannot_fit_stops_with_the_nearest_that_does() -> None:
    with pytest.raises(UsageError) as refused:
        fit("32b", gpus(80, 8, "NVIDIA H100 80GB HBM3"), "parallel.strategy=ddp")
    assert refused.value.code == "MC503" and refused.value.exit_code == 2
    assert "a rank needs 502.9 GiB of the GPU's 79.6" in refused.value.message
    assert "--set parallel.strategy=fsdp" in refused.value.remedy and "--force" in refused.value.remedy


@pytest.mark.skipif(torchao_is_installed(), reason="torchao is here: auto takes 8-bit states by itself")
def test_states_of_8_bits_are_named_where_only_their_package_is_missing() -> None:
    hint = "with torchao (pip install torchao) --set training.optimizer_states=8bit is enough"
    try:
        _, said = fit("14b", gpus(140))
    except UsageError as refused:  # a host that is too small to offload to
        assert refused.code == "MC503"
        said = [refused.remedy]
    assert len(said) == 1 and hint in said[0]


def test_a_retry_that_leaves_no_way_is_to_be_dropped() -> None:
    with pytest.raises(UsageError) as refused:
        fit("full", gpus(80, 8, "NVIDIA H100 80GB HBM3"), "parallel.strategy=ddp", "training.oom_retry=true")
    assert refused.value.code == "MC503"
    assert "add --set training.oom_retry=false --set parallel.strategy=fsdp (" in refused.value.remedy


def test_what_no_number_of_gpus_can_hold_may_be_too_long() -> None:
    with pytest.raises(UsageError) as refused:
        fit("full", gpus(80, 8, "NVIDIA H100 80GB HBM3"), "training.context_length=1000000")
    assert refused.value.code == "MC503" and "a shorter training.context_length" in refused.value.remedy


def test_force_starts_it_all_the_same() -> None:
    fitted, said = fit("32b", gpus(80), "parallel.strategy=ddp", force=True)
    assert fitted.config.parallel.strategy == "ddp" and len(said) == 1 and "--force" in said[0]


def test_auto_changes_what_nobody_has_set_and_says_so() -> None:
    fitted, said = fit("32b", gpus(80, 8, "NVIDIA H100 80GB HBM3"))
    assert fitted.config.parallel.activation_checkpointing == "full"
    assert fitted.config.origins["parallel.activation_checkpointing"] == "plan"
    assert len(said) == 1 and "auto takes" in said[0] and "activation_checkpointing=full" in said[0]
    assert fitted.plan is not None and fitted.plan["fits"]


def test_auto_leaves_alone_what_was_set() -> None:
    with pytest.raises(UsageError, match="cannot fit"):
        fit(
            "32b",
            gpus(80, 8, "NVIDIA H100 80GB HBM3"),
            "parallel.activation_checkpointing=none",
            "training.optimizer_states=fp32",
            "parallel.tensor=1",
            "parallel.pipeline=1",
            "fsdp.cpu_offload=false",
        )


def test_without_a_gpu_or_its_size_there_is_nothing_to_plan() -> None:
    assert fit("14b", []) == (Fitted(load_config(preset="14b")), [])
    assert smallest_device(gpus(0)) is None
    mixed = [*gpus(140), *gpus(80, name="NVIDIA H100 80GB HBM3")]
    device = smallest_device(mixed)
    assert device is not None and device.name == "H100 80GB HBM3"


def test_the_gpus_of_this_machine_are_planned_for_as_train_sees_them() -> None:
    mixed = [*gpus(140), *gpus(80, 2, "NVIDIA H100 80GB HBM3")]
    assert machine_of(mixed, None) == (smallest_device(mixed), 3)
    assert machine_of(mixed, 8) == (smallest_device(mixed), 8)
    fitted, _ = fit("debug", mixed)
    assert fitted.plan is not None and fitted.plan["gpu_gib"] == machine_of(mixed, None)[0].memory_bytes / GIB


def test_a_gpu_whose_driver_does_not_say_its_memory_has_to_be_told() -> None:
    with pytest.raises(UsageError, match="does not say how much memory") as refused:
        machine_of(gpus(0), None)
    assert "--gpu 80" in refused.value.remedy
    with pytest.raises(UsageError, match="shows no GPU"):
        machine_of([], 8)


def test_a_model_that_only_the_hub_knows_is_not_planned_yet() -> None:
    fitted, said = fit("debug", gpus(140), "model.model_path=someone/some-model")
    assert (fitted.plan, said) == (None, [])
