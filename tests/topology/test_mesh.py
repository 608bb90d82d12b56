import math

import hypothesis
import hypothesis.strategies as st
import pytest

from replicax._src.topology.mesh import PlannedTopology, partition_spec


def of_cores(cores):
    return PlannedTopology.of(cores, cores)


def ways(spec, topology):
    """Into how many parts each axis is cut."""
    sizes = topology.logical_axes
    return [math.prod(sizes[axis] for axis in _axes(entry)) for entry in spec]


def _axes(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@hypothesis.given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_any_numbers_become_axes_of_that_many_parts(parts):
    topology = of_cores(math.prod(parts))

    spec = partition_spec(topology, parts, parts, what="it")

    cut = ways(spec, topology)
    assert cut + [1] * (len(parts) - len(cut)) == parts
    axes = [axis for entry in spec for axis in _axes(entry)]
    assert len(axes) == len(set(axes))


def test_fewer_parts_than_devices_are_for_variables_only():
    topology = of_cores(12)

    assert ways(partition_spec(topology, [6], [6], what="it", may_repeat=True), topology) == [6]
    with pytest.raises(ValueError, match="equal to the 12"):
        partition_spec(topology, [6], [6], what="it")
    with pytest.raises(ValueError, match="a divisor of the 12"):
        partition_spec(topology, [5], [5], what="it", may_repeat=True)
