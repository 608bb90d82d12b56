"""``replicax doctor``: check this machine, and optionally the cluster, before training."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from replicax._src.base import cores
from replicax._src.cluster.detection import resolve_cluster
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.files.paths import local_file
from replicax._src.strategy.multi_worker import MultiWorkerMirroredStrategy

_LIBRARIES = ("jax", "jaxlib", "numpy", "keras", "flax", "orbax-checkpoint", "libtpu")
_LITTLE_SPACE = 1 << 30
_JOIN_VARIABLE = "REPLICAX_JOIN_TIMEOUT"
_PATIENCE = 60


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: The subject.
        ok: Whether it passed.
        said: The result.
        advice: How to fix it; empty if there is nothing to do.
    """

    name: str
    ok: bool
    said: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="also join the other workers and reduce a value; run it on all workers at once",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--checkpoints",
        type=local_file,
        metavar="DIR",
        help="also test whether checkpoints can be written there: free space and atomic renames",
    )


def run(options: argparse.Namespace) -> int:
    """Run all checks, print a line for each, and return 0 if all passed."""
    findings = []
    for finding in _findings(options):
        findings.append(finding)
        if not options.json:
            sys.stdout.write(_line(finding))
            sys.stdout.flush()
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0 if all(finding.ok for finding in findings) else 1


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield _check("versions", _versions)
    yield _check("keras", _keras)
    yield (cluster := _check("cluster", _cluster))
    if options.cluster and cluster.ok:
        # Before anything else touches a device: JAX must be initialized as a part of the cluster.
        yield _check("workers", _workers)
    yield (devices := _check("devices", _devices))
    if devices.ok:
        yield _check("cores", _cores)
    if options.checkpoints:
        yield _check("checkpoints", lambda: _checkpoints(options.checkpoints))


def _check(name: str, look: Callable[[], tuple[bool, str, str]]) -> Finding:
    try:
        return Finding(name, *look())
    except Exception as error:  # report any failure as a finding, and run the other checks
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _line(finding: Finding) -> str:
    word = "ok " if finding.ok else "NOT"
    if sys.stdout.isatty():
        word = f"\033[{32 if finding.ok else 31}m{word}\033[0m"
    rows = [*finding.said.splitlines(), *(f"-> {row}" for row in finding.advice.splitlines())]
    return f"{word} {finding.name:<12}" + f"\n{'':16}".join(rows) + "\n"


def _versions() -> tuple[bool, str, str]:
    found = {name: _version(name) for name in _LIBRARIES}
    known = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    said = f"replicax {sys.modules['replicax'].__version__}, Python {platform.python_version()}, "
    same = found["jax"] == found["jaxlib"]
    advice = "" if same else f"jax and jaxlib belong together: `pip install jax=={found['jax']}`."
    return same, said + known, advice


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _keras() -> tuple[bool, str, str]:
    if importlib.util.find_spec("keras") is None:
        return True, "not installed", ""
    named = os.environ.get("KERAS_BACKEND")
    if named is not None:
        advice = "" if named == "jax" else "Set KERAS_BACKEND=jax in the environment."
        return named == "jax", f"KERAS_BACKEND names {named!r}", advice
    file = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    named = json.loads(file.read_text()).get("backend", "jax") if file.is_file() else "jax"
    if named == "jax":
        return True, "runs on JAX", ""
    advice = "A program that imports keras itself, not `rx.keras`, needs KERAS_BACKEND=jax."
    return True, f"`rx.keras` runs on JAX, though {file} names {named!r}", advice


def _cluster() -> tuple[bool, str, str]:
    facts = resolve_cluster()
    if facts.num_workers == 1:
        return True, f"one process ({facts.source})", ""
    unknown = [address for address in facts.addresses if address and not _resolves(address)]
    said = f"worker {facts.index} of {facts.num_workers}, by {facts.source}: {_addresses(facts)}"
    if unknown:
        names = ", ".join(unknown)
        return False, f"{said}\nno such host: {names}", "Correct the address, or the DNS."
    return True, said, ""


def _addresses(facts: ClusterFacts) -> str:
    return ", ".join(address or "not known yet" for address in facts.addresses)


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None)
    except OSError:
        return False
    return True


def _workers() -> tuple[bool, str, str]:
    """Join the other workers: detects duplicate indices, other programs and absent workers."""
    os.environ.setdefault(_JOIN_VARIABLE, str(_PATIENCE))
    began = time.monotonic()
    strategy = MultiWorkerMirroredStrategy()
    met = time.monotonic() - began
    times, sums = [], set()
    for _ in range(3):
        began = time.monotonic()
        total = strategy.reduce("SUM", strategy.run(lambda: jnp.ones(1 << 18)), axis=None)
        sums.add(float(total[0]))
        times.append(time.monotonic() - began)
    right = sums == {strategy.num_replicas_in_sync}
    said = (
        f"{strategy.num_replicas_in_sync} replicas met in {met:.1f} s; 1 MiB was added up in"
        f" {1000 * times[0]:.0f} ms, then {1000 * min(times):.0f} ms"
    )
    return right, said, "" if right else "The sum is wrong: report this, with your hardware."


def _devices() -> tuple[bool, str, str]:
    kinds = [device.device_kind for device in jax.local_devices()]
    counts = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    said = f"{jax.default_backend()}: {counts}"
    if jax.default_backend() != "cpu" or len(kinds) > 1:
        return True, said, ""
    return True, said, "To try several replicas without hardware: REPLICAX_CPU_DEVICES=4."


def _cores() -> tuple[bool, str, str]:
    count = cores.usable()
    devices = jax.local_device_count("cpu")
    said = f"{count} for {devices} CPU device{'s' if devices > 1 else ''}"
    if devices <= count:
        return True, said, ""
    return True, said, "Virtual devices share the cores: right numbers, but no speed to measure."


def _checkpoints(folder: Path) -> tuple[bool, str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".replicax-doctor-", dir=folder) as name:
        draft, final = Path(name) / "draft", Path(name) / "final"
        for text in ("old", "new"):  # the second rename replaces an existing file
            with draft.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, final)
        renames = final.read_text() == "new" and not draft.exists()
    free = shutil.disk_usage(folder).free
    said = f"{folder}: written, renamed over an older file; {free / 1e9:.1f} GB free"
    if not renames:
        return False, f"{folder}: a file was not renamed in one step", "Use another file system."
    if _version("orbax-checkpoint") is None:
        return False, f"{said}; Orbax is missing", "`pip install 'replicax[checkpoint]'`."
    little = free < _LITTLE_SPACE
    return not little, said, "Make room, or keep fewer with max_to_keep." if little else ""
