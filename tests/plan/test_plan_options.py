"""Options and advice: what is offered fits, keeps the global batch, and is a configuration that can be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.config import check_world, load_config, resolve_shape
from model_check.errors import UsageError
from model_check.plan.advice import advise, changes_of, fewest_gpus, remedies
from model_check.plan.devices import device_named, parse_device
from model_check.plan.flops import count_flops_per_token
from model_check.plan.memory import GIB
from model_check.plan.options import LARGEST_BATCH, Job
from model_check.plan.workload import workload_of


def job(preset: str, gpu: str, gpus: int = 1, *overrides: str) -> Job:
    config = load_config(preset=preset, overrides=list(overrides))
    return Job(config, resolve_shape(config.model), gpus, parse_device(gpu))


def applied(plan: Job, changes: dict[str, object]) -> Job:
    return replace(plan, config=plan.config.with_values(changes, "advice"))


@settings(max_examples=30, deadline=None)
@given(
    preset=st.sampled_from(["production", "full", "14b", "32b"]),
    gpu=st.sampled_from(["H200", "H100", "A100-40", "24"]),
    gpus=st.sampled_from([1, 2, 8, 64]),
    batch=st.sampled_from([1, 4, 6]),
    strategy=st.sampled_from(["auto", "ddp", "fsdp"]),
)
def test_the_advice_is_a_configuration_that_fits(preset: str, gpu: str, gpus: int, batch: int, strategy: str) -> None:
    asked = job(preset, gpu, gpus, f"training.batch_size={batch}", f"parallel.strategy={strategy}")
    found = advise(asked)
    if found is None:
        assert not asked.as_configured().fits
        return
    changed = applied(asked, dict(found.changes))
    assert check_world(changed.config, gpus) == []
    assert changed.global_batch == asked.global_batch
    # What was promised is what training will do, and whoever asks again is told to keep it.
    assert changed.as_configured().fits
    assert changed.as_configured().memory.needed == pytest.approx(found.option.memory.needed)
    assert changed.as_configured().seconds_per_token == pytest.approx(found.option.seconds_per_token)
    again = advise(changed)
    assert again is not None and dict(again.changes) == {}
    if asked.as_configured().fits:
        assert found.option.seconds_per_token <= asked.as_configured().seconds_per_token * 1.03


@pytest.mark.parametrize(
    ("preset", "gpu", "gpus", "override"),
    [
        ("full", "A100-40", 3, "parallel.strategy=fsdp"),  # states of 8 bits would fit, and shards cannot have them
        ("full", "A100-40", 3, "parallel.strategy=auto"),
        ("32b", "RTX-4090", 8, "training.precision=fp8"),  # a cut matrix cannot be scaled as a whole
        ("32b", "H200", 1024, "training.precision=fp8"),
        ("32b", "H100", 8, "debug.verify_gradients=100"),  # needs a whole model on every rank
    ],
)
def test_nothing_is_offered_that_the_configuration_refuses(preset: str, gpu: str, gpus: int, override: str) -> None:
    asked = job(preset, gpu, gpus, override)
    found = advise(asked)
    for changes in [changes_of(asked, option) for option in asked.options()] + ([dict(found.changes)] if found else []):
        assert check_world(applied(asked, changes).config, gpus) == []


def test_what_fits_as_it_stands_is_left_alone() -> None:
    found = advise(job("production", "H200"))
    assert found is not None and dict(found.changes) == {}


def test_14b_on_one_large_gpu() -> None:
    plan = job("14b", "H200")
    assert plan.as_configured().memory.cannot_fit(plan.device.memory_bytes)
    small_states = advise(plan)
    assert small_states is not None and dict(small_states.changes) == {"training.optimizer_states": "8bit"}
    offloaded = advise(plan, eight_bit=False)
    assert offloaded is not None and offloaded.changes["fsdp.cpu_offload"] is True
    assert offloaded.option.memory.host == pytest.approx(plan.shape.parameters() * 16, rel=0.01)
    assert advise(plan, eight_bit=False, host_bytes=100 * GIB) is None


def test_a_smaller_micro_batch_keeps_a_pipeline_busy() -> None:
    """Both fit, and 48 micro-batches of one wait less for each other than 16 of three do."""
    asked = job("14b", "A100-40", 8, "training.batch_size=6")
    piped = [
        o for o in asked.options() if (o.layout.tensor, o.layout.pipeline, o.load.recomputation) == (4, 2, "selective")
    ]
    assert [(o.load.batch, o.load.micro_batches, o.fits) for o in piped] == [(1, 48, True)] * len(piped) != []


def test_results_are_left_alone_where_they_can_be() -> None:
    found = advise(job("32b", "H100", 8))
    assert found is not None
    assert "training.optimizer_states" not in found.changes and not found.option.load.offloads
    assert found.changes["parallel.activation_checkpointing"] != "none"


def test_only_what_may_change_changes() -> None:
    plan = job("production", "24", 1, "training.batch_size=8")
    free = advise(plan)
    assert free is not None and set(free.changes) > {"training.batch_size"}
    assert advise(plan, may_change=frozenset()) is None


def test_a_micro_batch_too_large_is_halved_and_made_up_for() -> None:
    found = advise(job("production", "H200", 1, "training.batch_size=64"))
    assert found is not None
    assert found.nested["training"] == {"batch_size": 16, "global_batch": 64, "grad_accum_nums": None}
    assert found.as_flags.startswith("--set training.batch_size=16 --set training.global_batch=64")
    assert found.option.load.micro_batches == 4


def test_405b_on_sixteen_thousand_gpus() -> None:
    sizes = ("model.model_path=llama-3.1-405b", "model.num_layers=126")
    plan = job("full", "H100", 16384, *sizes)
    found = advise(plan)
    assert found is not None and found.option.layout.tensor == 8 and found.option.layout.pipeline > 1
    pasted = applied(plan, dict(found.changes)).as_configured()
    assert pasted.fits
    # Gathering for each of 128 micro-batches would take twice as long as the step that was promised.
    assert found.changes["fsdp.reshard"] == "off" and pasted.layout.keep_gathered
    assert pasted.seconds_per_token == pytest.approx(found.option.seconds_per_token)
    # 16 bytes for each of 405 billion parameters fill 82 such GPUs before the first activation.
    assert fewest_gpus(job("full", "H100", 1, *sizes)) in (128, 256)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    plan = job("production", "H200")
    option = plan.as_configured()
    largest = plan.largest_batch(option)
    assert plan.option(option.layout, replace(option.load, batch=largest)).fits
    assert not plan.option(option.layout, replace(option.load, batch=largest + 1)).fits
    nothing = job("14b", "H200")
    assert nothing.largest_batch(nothing.as_configured()) == 0
    tiny = job("debug", "H200", 1, "model.vocab_size=64", "training.context_length=16")
    assert tiny.largest_batch(tiny.as_configured()) == LARGEST_BATCH


@pytest.mark.parametrize(("recomputation", "largest"), [("none", 1), ("selective", 3), ("full", 15)])
def test_the_largest_batch_in_shards_frees_what_was_gathered(recomputation: str, largest: int) -> None:
    """Gathered parameters are kept while there is room for that, and never at a sequence's expense."""
    sharded = ("parallel.strategy=fsdp", f"parallel.activation_checkpointing={recomputation}")
    plan = job("full", "H100", 8, *sharded)
    rows = [o for o in plan.options() if (o.layout.strategy, o.load.recomputation) == ("fsdp", recomputation)]
    one_rank_each = [o for o in rows if not o.layout.splits_model and "fsdp.reshard" not in changes_of(plan, o)]
    assert [plan.largest_batch(o) for o in one_rank_each] == [largest] == [plan.largest_batch(plan.as_configured())]
    assert [
        job("full", "H100", 8, *sharded, f"training.batch_size={b}").as_configured().fits
        for b in (largest, largest + 1)
    ] == [True, False]


def test_remedies_save_what_they_say() -> None:
    plan = job("production", "H200", 1, "training.batch_size=4", "training.fused_loss=off")
    option = plan.as_configured()
    found = remedies(plan, option)
    assert [remedy.flags.split()[1].split("=")[0] for remedy in found][:2] == [
        "training.fused_loss",
        "training.batch_size",
    ]
    for remedy in found:
        changes = [word for word in remedy.flags.split() if word != "--set"]
        config = load_config(
            preset="production", overrides=["training.batch_size=4", "training.fused_loss=off", *changes]
        )
        smaller = replace(plan, config=config).as_configured()
        assert option.memory.allocated - smaller.memory.allocated == pytest.approx(remedy.saves)
        assert remedy.saves > 0


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("141", 141),
        ("80GB", 80),
        ("80 GB", 80),
        ("80GiB", 80),
        ("23.5 GiB", 23.5),
        ("h100", 79.1),
        ("4090", 23.5),
        ("3090", 23.6),
        ("A6000", 47.4),
    ],
)
def test_a_gpu_is_a_name_or_a_size(text: str, gib: float) -> None:
    assert parse_device(text).memory_bytes == round(gib * GIB)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        # As nvidia-smi prints them.
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("A100-SXM-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        # As clouds, schedulers and people write them.
        ("A100-80GB", "A100"),
        ("A100-40GB", "A100-40"),
        ("a100 80 GiB", "A100"),
        ("A100 (40GB)", "A100-40"),
        ("80GB A100", "A100"),
        ("A100-PCIe-80GB", "A100-PCIe"),
        ("A100 40GB PCIe", "A100-PCIe-40"),
        ("H100 NVL 94GB", "H100-NVL"),
        ("GB300-288GB", "GB300"),
        ("NVIDIA-A100-SXM4-80GB", "A100"),
        ("H100-80GB", "H100"),
        ("H100 SXM5", "H100"),
        ("NVIDIA H100 PCIe 80GB", "H100-PCIe"),
        ("H200-141GB", "H200"),
        ("V100-32GB", "V100"),
        ("V100-16GB", "V100-16"),
        ("GH200 96GB", "GH200"),
        ("GeForce 4090", "RTX-4090"),
        ("RTX 4090 24GB", "RTX-4090"),
        ("NVIDIA 4090", "RTX-4090"),
        ("nvidia tesla t4", "T4"),
    ],
)
def test_a_gpu_is_known_by_every_name_in_use(text: str, short: str) -> None:
    assert parse_device(text) == parse_device(short)


@pytest.mark.parametrize(
    ("name", "gib", "terabytes", "link_gb", "bf16", "has_fp8"),
    [
        ("NVIDIA A100-PCIE-40GB", 39.4, 1.56, 32, 312, False),
        ("NVIDIA A100 80GB PCIe", 79.2, 1.94, 32, 312, False),
        ("NVIDIA H100 PCIe", 79.1, 2.0, 64, 756, True),
        ("NVIDIA H100 NVL", 93.0, 3.9, 64, 835.5, True),
        ("NVIDIA L40", 44.4, 0.86, 32, 181, True),
        ("NVIDIA B300 SXM6 AC", 267.7, 8.0, 900, 2250, True),
        ("NVIDIA GB300", 276.5, 8.0, 900, 2500, True),
    ],
)
def test_what_is_known_of_a_gpu(
    name: str, gib: float, terabytes: float, link_gb: float, bf16: float, has_fp8: bool
) -> None:
    device = device_named(name)
    assert device.memory_bytes == round(gib * GIB)
    assert (device.memory_rate, device.link_rate) == (terabytes * 1e12, link_gb * 1e9)
    assert device.peak("bf16") == bf16 * 1e12
    assert device.peak("fp8") == (bf16 * 1e12 if has_fp8 else None), "fp8 counts against bf16"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "XYZ",
            "",
            " ",
            "0",
            "0GB",
            "-4",
            "-80GB",
            "nan",
            "inf",
            "80TB",
            "1e3",
            "9" * 5000,
            "GB",
            "SXM",
            "NVIDIA",
            "RTX",
        ),
        # Siblings with other memory, other clocks or a part of the chip are not the GPU of the table.
        *(
            "H100 Ti",
            "A100-64GB",
            "A100-42",
            "A100 PCIe 64GB",
            "H100-94GB",
            "H200 NVL",
            "H20-3e",
            "H20 141GB",
            "L40S 80GB",
            "L40G",
        ),
        *("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "A100 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "A100-40C"),
        *("NVIDIA H100 NVL MIG 1g.12gb", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 80GB HBM2e", "8xH100", "H100 H100"),
    ],
)
def test_what_is_neither_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(UsageError, match="neither a GPU") as refused:
        parse_device(text)
    assert "H200" in refused.value.remedy


_PIECES = ("NVIDIA", "Tesla", "A100", "H100", "4090", "RTX", "SXM4", "PCIe", "HBM3", "80", "40", "24", "80GB", "40 GiB")


@given(
    st.text()
    | st.lists(st.sampled_from([*_PIECES, " ", "-", "_", "("]) | st.text(max_size=2), max_size=7).map("".join)
    | st.decimals(allow_nan=False, allow_infinity=False).map("{:f}".format)
)
def test_any_text_is_a_gpu_with_memory_or_is_refused_with_the_names(text: str) -> None:
    try:
        device = parse_device(text)
    except UsageError as refused:
        assert "H200" in (refused.remedy or "")
        return
    assert device.memory_bytes > 0
    if device.memory_rate is not None:
        assert parse_device(device.name) == device, "the name that the plan prints is understood again"


@given(st.floats(min_value=0.01, max_value=4000), st.sampled_from(["", "GB", " GB", "gb", "GiB", " GiB"]))
def test_a_size_is_in_gib_with_either_unit(gib: float, unit: str) -> None:
    written = f"{gib:.2f}"
    assert parse_device(written + unit).memory_bytes == round(float(written) * GIB)


@pytest.mark.parametrize("gpus", [8, 16])
def test_hsdp_that_is_best_already_is_kept_on_one_host_too(gpus: int) -> None:
    plan = job("full", "H100", gpus, "parallel.strategy=hsdp")
    layout = plan.as_configured().layout
    assert (layout.strategy, layout.replicate, layout.shard) == ("hsdp", gpus // 8, 8)
    found = advise(plan)
    assert found is not None and (found.changes, found.option.layout.strategy) == ({}, "hsdp")


def test_a_gpu_without_fp8_has_no_speed_in_fp8() -> None:
    assert job("production", "A100", 1, "training.precision=fp8").as_configured().speed is None
    plan = job("production", "H100", 1, "training.precision=fp8")
    fast = plan.as_configured().speed
    assert fast is not None and 0.5 < fast.mfu < 0.9
    flops = count_flops_per_token(plan.shape, plan.config.training.context_length)
    assert fast.mfu == pytest.approx(fast.tokens_per_s * flops / 989e12), "against the peak of bf16, as in the metrics"


def test_a_gpu_that_is_not_in_the_table_has_memory_and_no_speed() -> None:
    unknown = device_named("Quadro X", 16 * GIB)
    assert (unknown.memory_bytes, unknown.memory_rate) == (16 * GIB, None)
    plan = replace(job("production", "H200"), device=unknown)
    assert plan.as_configured().speed is None
    found = advise(plan)
    assert found is None or found.option.fits


@pytest.mark.parametrize(("compile_", "expected"), [("auto", True), ("on", True), ("off", False)])
def test_tensor_parallelism_is_planned_as_the_engine_compiles_it(compile_: str, expected: bool) -> None:
    overrides = ["parallel.tensor=2", f"training.compile={compile_}"]
    config = load_config(preset="full", overrides=overrides)
    assert workload_of(config, 8).compiled is expected
    job = Job(config, resolve_shape(config.model), 8, parse_device("H100"))
    assert {option.load.compiled for option in job.options()} == {expected}
