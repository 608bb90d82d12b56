"""The command line."""

import os
import subprocess
import sys

import pytest

import replicax as rx
from replicax._src.cli.main import main


def test_the_command_says_which_version_it_is(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"replicax {rx.__version__}\n"


@pytest.mark.parametrize("words", [[], ["fly"], ["--versoin"]])
def test_a_command_that_makes_no_sense_is_told_what_there_is(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "launch" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_launcher_without_standard_streams_launches(tmp_path, closed):
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'done')!r}, 'w').write('done')\nprint('said')\n")
    launch = f'exec "{sys.executable}" -m replicax launch --workers 1 "{program}" {closed}'
    done = subprocess.run(["sh", "-c", launch], env=os.environ, timeout=120)

    assert done.returncode == 0
    assert (tmp_path / "done").read_text() == "done"


def test_a_closed_pipe_is_no_traceback():
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m replicax doctor | head -c 1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "o"
    assert result.stderr == ""
