"""Run two tasks of a Dask cluster on this machine, of which each makes a strategy."""

from tests.multi_process.under_ray import add_up


def main():
    from distributed import Client, LocalCluster  # noqa: PLC0415 - not installed elsewhere

    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        client.gather([client.submit(add_up, pure=False) for _ in range(2)])


if __name__ == "__main__":
    main()
