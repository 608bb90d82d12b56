"""A cluster resolver: support for another cluster manager.

    python examples/extend/cluster_resolver.py

A package that declares the function below as an entry point is found by every
MultiWorkerMirroredStrategy() of the environment, without an argument. In its pyproject.toml:

    [project.entry-points."replicax.cluster_resolvers"]
    acme = "acme_replicax:resolver"
"""

import os

import replicax as rx


class AcmeResolver(rx.distribute.cluster_resolver.ClusterResolver):
    """The cluster that the (imaginary) manager Acme describes in two environment variables."""

    def __init__(self) -> None:
        self.task_type, self.task_id = "worker", int(os.environ["ACME_INDEX"])

    def cluster_spec(self) -> rx.train.ClusterSpec:
        """Return the addresses of all workers."""
        return rx.train.ClusterSpec({"worker": os.environ["ACME_HOSTS"].split(",")})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return no address: programs of replicax need no master."""
        return ""


def resolver() -> AcmeResolver | None:
    """Return the resolver if Acme started this process."""
    return AcmeResolver() if "ACME_HOSTS" in os.environ else None


if __name__ == "__main__":
    os.environ |= {"ACME_HOSTS": "localhost:6401", "ACME_INDEX": "0"}  # as Acme would
    strategy = rx.distribute.MultiWorkerMirroredStrategy(resolver())
    print(strategy.cluster_resolver.cluster_spec())
    assert strategy.cluster_resolver.task_id == 0
