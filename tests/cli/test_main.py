"""The command line."""

import pytest

import replicax as rx
from replicax.cli._main import main


def test_the_command_says_which_version_it_is(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"replicax {rx.__version__}\n"


@pytest.mark.parametrize("words", [[], ["fly"], ["--versoin"]])
def test_a_command_that_makes_no_sense_is_told_what_there_is(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "launch" in capsys.readouterr().err
