"""Described: a strategy, in words."""

from abc import abstractmethod

from replicax._show import Sheet
from replicax.collectives._cross_device_ops import CrossDeviceOps
from replicax.topology._devices import shown_devices
from replicax.topology._mesh import Topology


class Described:
    """What a strategy says of itself."""

    variable_policy: str

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """Which devices make which replicas; None for the default strategy."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """The topology; for the default strategy, the device where JAX computes."""

    @property
    @abstractmethod
    def cross_device_ops(self) -> CrossDeviceOps:
        """How values of several replicas are combined."""

    def describe(self) -> Sheet:
        """Devices, replicas, workers, mesh and policies, for a person.

        It prints as text; `rich.print` draws it with colours, a notebook as a table.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.describe()
            MirroredStrategy
              replicas       2 in sync
              devices        2 x cpu
              workers        this process
              mesh           replica=2
              variables      mirrored: a copy on each replica, kept equal
              cross-replica  NcclAllReduce
             replica  devices
             0        CPU:0
             1        CPU:1
        """
        topology = self.devices_or_default
        kinds = [device.device_kind for device in topology.devices]
        cores = topology.cores
        of = f", of {cores} logical devices each" if cores > 1 else ""
        facts = (
            ("replicas", f"{topology.num_replicas} in sync{of}"),
            ("devices", ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))),
            ("workers", _workers(topology)),
            ("mesh", ", ".join(f"{name}={size}" for name, size in topology.mesh.shape.items())),
            ("variables", self._variables()),
            ("cross-replica", type(self.cross_device_ops).__name__),
        )
        rows = tuple(
            (str(i), shown_devices(topology.devices_of(i), most=8, kind=topology.kind))
            for i in range(topology.num_replicas)
        )
        return Sheet(self._kind(), facts, ("replica", "devices"), rows)

    def _variables(self) -> str:
        if self.topology is None:
            return "plain: no strategy is in use"
        if self.variable_policy == "sharded":
            return "sharded: those above 16 KiB lie in equal parts on the replicas"
        return "mirrored: a copy on each replica, kept equal"

    def _repr_html_(self) -> str:
        return self.describe().to_html()

    def _kind(self) -> str:
        return type(self).__name__.removeprefix("Experimental")

    def __repr__(self) -> str:
        topology = self.topology
        count, cores = (topology.num_replicas, topology.cores) if topology else (1, 1)
        of = f" of {cores} logical devices" if cores > 1 else ""
        return f"<{self._kind()} of {count} replica{'s' if count > 1 else ''}{of}>"


def _workers(topology: Topology) -> str:
    processes = sorted({device.process_index for device in topology.devices})
    if len(processes) == 1:
        return "this process"
    own = ", ".join(map(str, topology.own))
    return f"{len(processes)}; this is worker {_own_process(topology)}, with replicas {own}"


def _own_process(topology: Topology) -> int:
    return int(topology.leads[0].process_index) if topology.leads else -1
