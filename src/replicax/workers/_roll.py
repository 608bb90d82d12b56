"""Roll: what a worker says of itself -> whether it may join, and if not, why."""

from replicax.workers import _reports
from replicax.workers._wire import Message


def name_of(facts: Message) -> str:
    """A worker, by what it said of itself."""
    return _reports.name(int(facts["index"]), facts.get("address"), facts.get("pid"))


def refusal(facts: Message, present: dict[int, Message], size: int, *, is_over: bool) -> str:
    """Why a worker cannot join; nothing if it can.

    Args:
        facts: What it says of itself.
        present: What those said that have joined, by their index.
        size: How many workers there are to be.
        is_over: Whether all had come already.
    """
    who = name_of(facts)
    if facts["size"] != size:
        return (
            f"{who} was started for a cluster of {facts['size']} workers, and worker 0 for one"
            f" of {size}: all workers must be given the same cluster."
        )
    if other := present.get(int(facts["index"])):
        return (
            f"The index {facts['index']} is claimed twice: by {name_of(other)} and by {who}. Give"
            " every worker an index of its own (the task index in TF_CONFIG)."
        )
    if is_over:
        return f"{who} came when all {size} workers had already joined, or one had left again."
    for _, other in sorted(present.items()):
        for what, mine in facts["versions"].items():
            theirs = other["versions"].get(what)
            if mine != theirs:
                return (
                    f"{who} runs {what} {mine}, and {name_of(other)} runs {what} {theirs}. All"
                    " workers must run the same versions."
                )
    return ""
