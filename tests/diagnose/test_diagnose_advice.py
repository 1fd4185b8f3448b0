"""Advice fits the reader: a script has none of our settings, and our trainer has no script to change."""

from __future__ import annotations

import re

import pytest

from model_check.config import Config
from model_check.config.schema import leaf_fields
from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.findings import for_its_reader, make_finding
from tests.diagnose.staging import Stage

KEYS = [key for key in leaf_fields(Config) if "." in key]
BARE = ("grad_accum_nums", "context_length", "oom_retry", "init_std", "verify_gradients", "on_nan")
OF_OURS = re.compile("|".join([*(rf"\b{re.escape(key)}\b" for key in KEYS), *(rf"\b{key}\b" for key in BARE), "--set"]))


def test_the_schema_was_read() -> None:
    assert len(KEYS) > 40 and "training.learning_rate" in KEYS and "checkpoint.dir" in KEYS


@pytest.mark.parametrize("code", CATALOGUE)
def test_no_advice_for_a_script_names_a_setting_of_our_trainer(code: str) -> None:
    finding = for_its_reader(make_finding(code, "", ranks=[0], evidence=[]), ours=False)
    assert finding.fix and [line for line in finding.fix if OF_OURS.search(line)] == []


@pytest.mark.parametrize("code", CATALOGUE)
def test_no_advice_for_our_trainer_is_about_a_loop_that_its_user_has_not_written(code: str) -> None:
    finding = for_its_reader(make_finding(code, "", ranks=[0], evidence=[]), ours=True)
    said = " ".join(finding.fix)
    assert finding.fix and "DistributedSampler" not in said and "clip_grad_norm_" not in said, said


def test_a_rule_s_own_advice_stays_ahead_of_the_catalogue_s() -> None:
    entry = CATALOGUE["MC405"]
    finding = make_finding("MC405", "", ranks=[0], evidence=[], fix=["its own", *entry.fix])
    assert for_its_reader(finding, ours=True).fix == ["its own", *entry.ours]
    assert for_its_reader(finding, ours=False).fix == ["its own", *entry.fix]


def test_a_run_with_a_configuration_of_ours_is_ours(stage: Stage) -> None:
    stage.ranks(2)
    for rank, value in enumerate((1, 2)):
        stage.actors[rank].event("param_hash", step=0, group=[0, 1], hashes={"w": value})
    assert stage.first().fix == list(CATALOGUE["MC410"].fix)
    stage.run_dir.config.write_text("{}")
    assert stage.first().fix == list(CATALOGUE["MC410"].ours)
