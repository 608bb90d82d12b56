import json

import pytest

from replicax._src.preflight.preflight import unknown_links
from replicax._src.preflight.targets import Limits, Target
from replicax._src.topology.tpu_generations import GENERATIONS


@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    [
        ("v5e:4x4", 16, "v5e:4x4"),
        ("v4:2x2x2", 8, "v4:2x2x2"),
        ("v4-8", 4, "v4:2x2x1"),
        ("v4-32", 16, "v4:2x2x4"),
        ("v5p-128", 64, "v5p:4x4x4"),
        ("v5p-256", 128, "v5p:4x4x8"),
        ("v5e-8", 8, "v5e:2x4"),
        ("v5litepod-256", 256, "v5e:16x16"),
        ("v6e-1", 1, "v6e:1x1"),
        ("v3-8", 8, "v3:2x2"),
        ("2x v5e:4x4", 32, "v5e:4x4"),
        ("2xv6e-16", 32, "v6e:4x4"),
    ],
)
def test_slices_have_names_of_several_kinds(name, devices, topology):
    target = Target.parse(name)

    assert (target.name, target.num_devices, target.platform) == (name, devices, "tpu")
    assert target.request["topology_name"] == topology


@pytest.mark.parametrize(
    ("name", "devices", "topology"),
    [("h100:2x8", 16, "1x2x8"), ("h100:8", 8, "1x1x8"), ("l4:128x8", 1024, "1x128x8")],
)
def test_gpus_are_machines_and_gpus_of_each(name, devices, topology):
    target = Target.parse(name)

    assert (target.num_devices, target.platform) == (devices, "cuda")
    assert target.request["topology"] == topology


@pytest.mark.parametrize("name", ["v9:2x2", "16x16", "h999:8", "", "v5e:3x3", "v5p-6", "h100:0x8"])
def test_what_there_is_not_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match=r"v5e:16x16.*h100:2x8") as caught:
        Target.parse(name)
    assert "b200" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("V5E:4x4", "v5e:4x4"),
        ("H100:2x8", "h100:2x8"),
        ("h100", "h100:8"),
        ("h100:2x8x2", "h100:8"),
        ("v5:4x4", "v5e:4x4"),
        ("v5e:16x", "v5e:4x4"),
        ("tpu7:4x4x4", "tpu7x:4x4x4"),
    ],
)
def test_what_is_nearly_a_name_is_told_which(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        Target.parse(name)


def test_a_user_described_gpu(tmp_path):
    path = tmp_path / "mine.json"
    facts = {
        "memory": 10e9,
        "flops": 1e12,
        "hbm_bytes": 2e11,
        "link_bytes": 3e10,
        "network_bytes": 1e9,
        "target_config": 'platform_name: "CUDA"',
    }
    path.write_text(json.dumps(facts))

    target = Target.parse(f"{path}:4x2")

    assert (target.kind, target.num_devices, target.hbm) == ("mine", 8, 7_500_000_000)
    assert target.limits == Limits(1e12, 2e11, 3e10, 2e9, 2)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"mine\.json does not describe a GPU \(KeyError"):
        Target.parse(f"{path}:4x2")


def test_a_gpu_has_as_much_memory_as_jax_takes_of_it(monkeypatch):
    reported = 84_942_979_072  # by an H100 whose datasheet says 80 GB
    assert Target.parse("h100:8").hbm == pytest.approx(0.75 * reported, abs=1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert Target.parse("h100:8").hbm == pytest.approx(0.9 * reported, abs=1)


def test_the_peaks_of_gpus_are_what_their_makers_publish():
    """Operations of bfloat16 without sparsity, NVLink in both directions, network of a machine."""
    published = {
        "a100": (312e12, 2.039e12, 600e9, 8 * 200e9),
        "h100": (1979e12 / 2, 3.35e12, 900e9, 8 * 400e9),
        "h200": (1979e12 / 2, 4.8e12, 900e9, 8 * 400e9),
        "b200": (72e15 / 8 / 4, 64e12 / 8, 14.4e12 / 8, 8 * 400e9),
        "l4": (242e12 / 2, 300e9, 64e9, 100e9),
    }
    for name, figures in published.items():
        limits = Target.parse(f"{name}:2x8").limits
        ours = limits.flops, limits.hbm_bytes, 2 * limits.link_bytes, 8 * limits.far_bytes
        assert ours == pytest.approx(figures, rel=0.05), name


def test_links_between_machines_are_shared_by_the_groups_that_use_them():
    limits = Target.parse("h100:2x8").limits

    inside = limits.seconds(450e9, 8, 1)
    everyone = limits.seconds(400e9, 16, 2)
    # Eight groups, each of one GPU of every machine, have one network card each.
    across = limits.seconds(50e9, 2, 2)

    assert inside == everyone == across == 1


def test_cores_that_share_their_memory_are_one_device():
    assert {g.name: g.devices_per_chip for g in GENERATIONS.values()} == {
        "v2": 2, "v3": 2, "v4": 1, "v5e": 1, "v5p": 1, "v6e": 1, "tpu7x": 2
    }  # fmt: skip
    assert Target.parse("v4:2x2x1").request["chip_config_name"] == "megacore"


def test_what_slices_send_each_other_is_what_google_publishes():
    """Gb/s of a chip; those of v4 by its machines of four, which have 25 GB/s."""
    published = {"v4": 50, "v5e": 6400 / 256, "v5p": 50, "v6e": 100, "tpu7x": 100}
    for name, rate in published.items():
        shape = "x".join("2" * len(GENERATIONS[name].host))
        slices = Target.parse(f"2x {name}:{shape}").limits
        chips = 2 ** len(GENERATIONS[name].host)
        assert slices.far_bytes == pytest.approx(rate * 1e9 / 8 * chips), name
        assert Target.parse(f"{name}:{shape}").limits.far_bytes == 0


def test_links_of_tpus_are_within_a_fifth_of_what_others_publish_of_them():
    """All-reduces of a pod, by its chips, and links by their number, of jax-ml/scaling-book."""
    published = {"v3": 340e12 / 1024, "v4": 1.1e15 / 4096, "v5e": 51.2e12 / 256}
    links = {"v4": 6 * 45e9, "v5e": 4 * 45e9, "v5p": 6 * 90e9, "v6e": 4 * 90e9}
    for name, rate in (*published.items(), *links.items()):
        assert GENERATIONS[name].chip_ici_bytes == pytest.approx(rate, rel=0.2), name


def test_slices_whose_network_is_not_known_are_named():
    (note,) = unknown_links(Target.parse("2x v3:4x4"))

    assert "the bandwidth of v3 between slices is not known" in note
    assert not list(unknown_links(Target.parse("2x v4:2x2x2")))
    assert not list(unknown_links(Target.parse("v3:4x4")))
