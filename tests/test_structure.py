import replicax


def test_the_package_imports():
    assert replicax.__doc__
