"""The loop of a worker: it reads lines ``name steps``, and answers with the seconds they took."""

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
