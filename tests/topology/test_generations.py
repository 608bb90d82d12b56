import pytest

from replicax._src.topology.tpu_generations import GENERATIONS, SliceShape


@pytest.mark.parametrize(
    ("name", "devices", "mesh"),
    [
        ("v2:2x2", 8, (2, 2, 1, 2)),
        ("v3:4x4", 32, (4, 4, 1, 2)),
        ("v4:2x2x1", 4, (2, 2, 1, 1)),
        ("v4:8x8x8", 512, (8, 8, 8, 1)),
        ("v5e:1x1", 1, (1, 1, 1, 1)),
        ("v5e:16x16", 256, (16, 16, 1, 1)),
        ("v5p:2x2x2", 8, (2, 2, 2, 1)),
        ("v6e:2x4", 8, (2, 4, 1, 1)),
        ("tpu7x:2x2x1", 8, (2, 2, 1, 2)),
    ],
)
def test_a_name_says_how_many_devices(name, devices, mesh):
    shape = SliceShape.parse(name)

    assert (shape.num_devices, shape.mesh_shape, shape.name) == (devices, mesh, name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v9:2x2", "is not the name of a TPU slice"),
        ("v4", "is not the name"),
        ("v4:", "is not the name"),
        ("v4:2x", "is not the name"),
        ("v4:2*2*2", "is not the name"),
        ("", "is not the name"),
        (None, "is not the name"),
        ("v4:2x2", "v4 has 3 axes of chips, not 2"),
        ("v5e:2x2x2", "v5e has 2 axes of chips, not 3"),
        ("v5e:32x32", "the largest is v5e:16x16"),
        ("v5e:3x3", "a machine holds 2x2 chips"),
        ("v5e:0x2", "is not the name"),
    ],
)
def test_a_slice_that_does_not_exist_lists_those_that_do(name, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        SliceShape.parse(name)
    for generation in GENERATIONS:
        assert generation in str(caught.value)


def test_the_figures_of_a_device_are_its_share_of_the_chip():
    v3, v4 = GENERATIONS["v3"], GENERATIONS["v4"]

    assert v3.hbm == 15.48 * 2**30
    assert v3.flops == pytest.approx(61.5e12)
    assert v3.hbm_bytes == pytest.approx(450e9)
    assert v3.ici_bytes == pytest.approx(164e9)
    assert (v4.hbm, v4.flops) == (30.75 * 2**30, 275e12)  # both cores are one device
