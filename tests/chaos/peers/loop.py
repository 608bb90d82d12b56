"""What all three programs do: steps in common, and at one of them what the fault asks for."""

import os
import sys
import time

STEPS, AT, PAUSE = 100_000, 20, 0.05


def say(word):
    sys.stdout.write(f"{word} {time.time()} {os.getpid()}\n")
    sys.stdout.flush()


def train(step, index):
    fault = os.environ.get("PEER_FAULT", "")
    for k in range(STEPS):
        step()
        if k == AT // 2:
            say("TRAINS")
        if k == AT and index == 1 and fault in ("exception", "exit"):
            say("FAULT")
            if fault == "exit":
                sys.exit(0)
            raise ValueError("a wrong turn")
        time.sleep(PAUSE)
