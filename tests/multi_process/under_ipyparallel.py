"""Run two engines of an ipyparallel cluster on this machine, of which each makes a strategy."""

from tests.multi_process.under_ray import add_up


def main():
    import ipyparallel  # noqa: PLC0415 - not installed elsewhere

    with ipyparallel.Cluster(n=2) as client:
        client[:].apply_sync(add_up)


if __name__ == "__main__":
    main()
