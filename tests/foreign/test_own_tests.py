"""The runner of other libraries' own tests finds those that fail beside replicax alone."""

import textwrap

import pytest

from tests.foreign.own_tests import Suite

pytestmark = pytest.mark.foreign

TESTS = """
    import sys
    import unittest
    import pytest

    class Test(unittest.TestCase):
        def test_passes(self):
            pass

        def test_always_fails(self):
            self.fail("always")

        def test_fails_beside_replicax(self):
            self.assertNotIn("replicax", sys.modules)

        def test_is_excepted(self):
            self.assertNotIn("replicax", sys.modules)

    @pytest.mark.parametrize("name", ["a.b", "c[d]", "replicax"])
    def test_names(name):
        assert name not in sys.modules
"""


def test_runner_reports_what_fails_beside_replicax_alone(tmp_path):
    file = tmp_path / "some_test.py"
    file.write_text(textwrap.dedent(TESTS))
    suite = Suite(
        groups=lambda: ["some"],
        files=lambda _: [file],
        ways=("imported",),
        exceptions={"imported": {"test_is_excepted": "a reason"}},
        env=dict,
    )

    compared = suite.compare("some")

    assert {name: result.partition(":")[0] for name, result in compared.without.items()} == {
        "some_test.Test.test_always_fails": "failed",
        "some_test.Test.test_fails_beside_replicax": "passed",
        "some_test.Test.test_is_excepted": "passed",
        "some_test..test_names[replicax]": "passed",
    }
    assert compared.row == "| some | 3, 3 | 1 |"
    assert compared.unexplained.keys() == {
        "some_test.Test.test_fails_beside_replicax (imported)",
        "some_test..test_names[replicax] (imported)",
    }
