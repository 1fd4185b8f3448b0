"""Every verb explains itself, with an example that can be typed."""

from __future__ import annotations

import pytest

from model_check.cli.main import VERBS, main


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "Example" in said and f"model-check {verb}" in said.split("Example", 1)[1]
