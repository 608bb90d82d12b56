"""The loop of a worker: it reads lines ``name steps``, and answers with what they took.

That is the seconds by the clock, and those of the processors.

With the argument ``first`` it does one step of the MLP, says so, and ends. With ``eager`` it does
one that is not compiled, on two devices of its own where the library has them, and answers for it.
"""

import os
import sys
import time


def serve(makers, wait):
    """Answer until nobody asks any more.

    Args:
        makers: For each name what makes its step.
        wait: What waits for the last step's result.
    """
    answers = _answers()
    if sys.argv[1:] == ["first"]:
        wait(makers["MLP"]()())
        print("first", file=answers)
        return
    steps = {}
    print("ready", file=answers)
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        if name not in steps:
            steps[name] = makers[name]()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(int(count)):
            result = steps[name]()
        wait(result)
        print(time.perf_counter() - began, time.process_time() - used, file=answers)


def eager(step):
    """Answer for one call of ``step``, which waits for its result."""
    answers = _answers()
    began, used = time.perf_counter(), time.process_time()
    step()
    print(time.perf_counter() - began, time.process_time() - used, file=answers)


def is_eager():
    """Whether it was started for that."""
    return sys.argv[1:] == ["eager"]


def _answers():
    """Standard output; what the library prints goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers
