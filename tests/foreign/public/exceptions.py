"""Programs that may differ or fail with replicas, and why."""

EXCEPTIONS: dict[str, str] = {}
