"""The loop of a worker: it reads lines ``name steps``, and answers with the seconds they took.

With the argument ``first`` it does one step of the MLP, says so, and ends.
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
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
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
        began = time.perf_counter()
        for _ in range(int(count)):
            result = steps[name]()
        wait(result)
        print(time.perf_counter() - began, file=answers)
