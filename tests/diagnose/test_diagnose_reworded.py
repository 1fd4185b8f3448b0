"""No rule reads a sentence: with every text of the catalogue replaced, staged runs get the same verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import test_diagnose_branches as branches
import test_diagnose_crash as crash
import test_diagnose_hang as hang
import test_diagnose_joining as joining
import test_diagnose_leaving as leaving
import test_diagnose_lost as lost
import test_diagnose_numerics as numerics
import test_diagnose_silent as silent
import test_diagnose_slow as slow
import test_diagnose_start as start
from staging import Stage

from model_check.diagnose.catalogue import CATALOGUE, Entry
from model_check.record import Verdict

PLAYS: dict[str, tuple[Callable[[Stage], None], ...]] = {
    "MC1": (
        crash.test_the_holder_of_the_port_is_named,
        hang.test_a_rank_that_never_joined,
        joining.test_ranks_that_were_told_of_worlds_of_different_sizes,
        start.test_other_versions_on_one_rank,
        start.test_an_import_storm,
    ),
    "MC2": (
        branches.test_a_call_under_a_condition_on_the_rank_is_the_wrong_one,
        crash.test_uneven_data_of_a_rank_that_returned,
        crash.test_an_abort_over_a_message_of_another_size_is_a_wrong_size,
        hang.test_stuck_in_the_loader_of_the_rank_itself,
        lost.test_the_rank_that_a_timed_out_one_waited_for_is_named_not_the_one_that_gave_up,
    ),
    "MC3": (
        branches.test_a_rank_that_left_with_one_call_less_behind_a_quiet_handler,
        crash.test_the_original_exception_is_the_cause_and_the_lost_connections_are_victims,
        crash.test_killed_by_an_unknown_sender,
        crash.test_an_early_exit_with_code_0_while_a_peer_waits,
        crash.test_an_exit_code_without_an_exception,
        crash.test_a_swallowed_exception_before_the_peers_lost_it,
        leaving.test_a_keyboard_interrupt_is_named_at_its_own_line,
        lost.test_a_kill_by_the_kernel_is_told_with_its_words_the_memory_and_the_last_recorded_line,
    ),
    "MC4": (
        numerics.test_an_exit_of_all_ranks_follows_from_the_number_of_one,
        numerics.test_what_came_of_a_warning_is_added_to_it,
        silent.test_the_rank_that_differs_from_the_majority_is_named_with_the_parameter_and_the_step,
        silent.test_labels_are_suspected_where_rate_and_gradients_are_well,
        silent.test_ranks_that_are_given_the_same_batches_are_told_so,
    ),
    "MC5": (lambda stage: fails_of(stage, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),),
    "MC6": (
        crash.test_our_own_sentence_about_a_users_files_names_no_line_of_ours,
        lambda stage: fails_of(stage, "OSError", "[Errno 28] No space left on device"),
    ),
    "MC7": (
        slow.test_a_straggler_is_named_by_its_own_time_not_by_the_wall,
        slow.test_a_loader_that_takes_most_of_the_step,
        slow.test_memory_that_climbs_with_every_step,
    ),
    "MC9": (silent.test_a_failure_on_a_token_without_a_row_is_about_the_token,),
}
EVERY_PLAY = [(family, play) for family, plays in PLAYS.items() for play in plays]


def fails_of(stage: Stage, kind: str, message: str) -> None:
    _, guilty = stage.ranks(2)
    stage.train(6)
    guilty.fails(kind, message, 36)
    guilty.exits(1)


def reworded(entry: Entry) -> Entry:
    """Every sentence is another one; what a program may read stays."""
    texts = {
        name: f"{name} in other words" if isinstance(said, str) else tuple(f"{n}. of {name}" for n in range(len(said)))
        for name, said in vars(entry).items()
        if name not in ("causes", "facts")
    }
    other = {part: dict.fromkeys(getattr(entry, part), "other words") for part in ("causes", "facts")}
    return replace(entry, **texts, **other)


def without_sentences(verdict: Verdict) -> str:
    """As JSON: a fact may be NaN, which no number equals."""
    body = asdict(verdict)
    for finding in body["findings"]:
        for sentences in ("title", "evidence", "fix"):
            del finding[sentences]
    return json.dumps(body, indent=1)


@pytest.mark.parametrize(("family", "play"), EVERY_PLAY, ids=lambda what: getattr(what, "__name__", what))
def test_the_same_verdict_in_other_words(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, family: str, play: Callable[[Stage], None]
) -> None:
    play(stage)
    looks = [{"live": live, "after": after} for live in (True, False) for after in (0.1, 7.0)]
    plain = [stage.verdict(**look) for look in looks]
    assert any(finding.code.startswith(family) for verdict in plain for finding in verdict.findings)
    for code, entry in CATALOGUE.items():
        monkeypatch.setitem(CATALOGUE, code, reworded(entry))
    other = [stage.verdict(**look) for look in looks]
    assert list(map(without_sentences, other)) == list(map(without_sentences, plain))
    assert all(verdict.notes == [] for verdict in other), "no rule fails"


def test_the_words_are_others() -> None:
    for entry in CATALOGUE.values():
        other = reworded(entry)
        assert all(vars(other)[name] != said for name, said in vars(entry).items() if said)
