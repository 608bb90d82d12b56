"""The command line."""

import os
import subprocess
import sys

import pytest

import replicax as rx
from replicax._src.cli.main import VERBS, main


def test_the_command_says_which_version_it_is(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"replicax {rx.__version__}\n"


@pytest.mark.parametrize("words", [["fly"], ["--versoin"]])
def test_a_command_that_makes_no_sense_is_told_what_there_is(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "launch" in said or "COMMAND" in said


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_launcher_without_standard_streams_launches(tmp_path, closed):
    program = tmp_path / "program.py"
    program.write_text(f"open({str(tmp_path / 'done')!r}, 'w').write('done')\nprint('said')\n")
    launch = f'exec "{sys.executable}" -m replicax launch --workers 1 "{program}" {closed}'
    done = subprocess.run(["sh", "-c", launch], env=os.environ, timeout=120)

    assert done.returncode == 0
    assert (tmp_path / "done").read_text() == "done"


def test_a_closed_pipe_prints_no_traceback():
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m replicax doctor | head -c 1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "o"
    assert result.stderr == ""


def test_the_command_alone_prints_its_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "replicax launch --workers 2 train.py" in said
    assert all(len(line) <= 80 for line in said.splitlines())


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_command_has_examples_in_80_columns(capsys, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert "examples:\n" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_bash_completes_commands_and_options(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = (
        capsys.readouterr().out
        + """
COMP_WORDS=(replicax lau) COMP_CWORD=1; _replicax; echo "${COMPREPLY[@]}"
COMP_WORDS=(replicax launch --max) COMP_CWORD=2; _replicax; echo "${COMPREPLY[@]}"
"""
    )
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert said.stdout.split("\n")[:2] == ["launch", "--max-restarts"], said.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts(capsys, shell):
    assert main(["completion", shell]) == 0
    assert "preflight" in capsys.readouterr().out


def test_a_program_that_is_not_there_is_told_before_workers_start(capsys):
    assert main(["launch", "--workers", "2", "nofile.py"]) == 2
    assert "There is no program 'nofile.py'" in capsys.readouterr().err
