"""The doctor on a real GPU: what the driver says is read, and the device is measured."""

from __future__ import annotations

import re

import pytest

from model_check.cli.doctor import settings_for
from model_check.config import load_config
from model_check.doctor import examine

pytestmark = pytest.mark.gpu


def test_every_gpu_is_examined_and_measured() -> None:
    settings = settings_for(load_config(preset="debug"))
    checks = {check.name: check for check in examine("gpu", settings)}
    assert settings.gpus
    for gpu in settings.gpus:
        assert {f"GPU {gpu.index} {what}" for what in ("errors", "clocks", "is free", "speed")} <= set(checks)
        rates = re.match(r"(\d+) TFLOP/s.*memory (\d\.\d+) TB/s", checks[f"GPU {gpu.index} speed"].detail)
        assert rates and float(rates[1]) > 1 and float(rates[2]) > 0.05, checks[f"GPU {gpu.index} speed"]


def test_nccl_ranks_add_up_on_every_gpu() -> None:
    checks = {check.name: check for check in examine("ranks", settings_for(load_config(preset="debug")))}
    assert checks["NCCL ranks"].status == "ok" and "all-reduce right" in checks["NCCL ranks"].detail
