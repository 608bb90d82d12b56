"""Programs that may differ or fail with replicas, and why."""

EXCEPTIONS: dict[str, str] = {
    "keras/guides/orbax_checkpoint.py": (
        "it sets a keras.distribution of its own, which a scope refuses with words"
    ),
}
