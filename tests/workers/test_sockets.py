"""What libraries print by themselves does not reach the user; all else does."""

import importlib.util
import os
import re

import pytest

from replicax._src.base.output import filter_output
from tests.fresh_process import run_fresh
from tests.multi_process.gang import Gang

GREETING = re.compile(rb"\[Gloo\] Rank")


@pytest.mark.parametrize("stream", [1, 2])
def test_lines_that_are_noise_are_left_out_and_all_others_come_in_order(capfd, stream):
    os.write(stream, b"before\n")
    with filter_output(stream, GREETING):
        os.write(stream, b"mine\n[Gloo] Rank 0 is connected to 1 peer ranks.\n")
        os.write(stream, b"without an end")
    os.write(stream, b"\nafter\n")

    assert capfd.readouterr()[stream - 1] == "before\nmine\nwithout an end\nafter\n"


def test_what_was_said_before_an_error_is_not_lost(capfd):
    def fail():
        with filter_output(2, GREETING):
            os.write(2, b"a reason\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert capfd.readouterr().err == "a reason\n"


@pytest.mark.parametrize("closed", ["os.close(1)", "sys.stdout = None"])
def test_a_program_without_an_output_is_not_in_the_way(closed):
    ended = run_fresh(f"""
        import os, re, sys
        from replicax._src.base.output import filter_output
        {closed}
        with filter_output(1, re.compile(b"noise")):
            print("inside", end="", file=sys.stderr, flush=True)
        os._exit(0)
    """)

    assert (ended.returncode, ended.stderr) == (0, "inside")


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_an_installed_tpu_compiler_is_silent_on_a_machine_without_a_tpu():
    ended = run_fresh(
        """
        import replicax as rx
        print(rx.distribute.MirroredStrategy().num_replicas_in_sync)
        """,
        JAX_PLATFORMS="",
    )

    assert (ended.stdout, ended.stderr) == ("1\n", "")


@pytest.mark.multi_process
def test_workers_that_connect_print_nothing_of_their_own(tmp_path):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, program="quiet")
        said = [worker.text for worker in gang.wait()]

    assert said == ["2.0\n", "2.0\n"]
