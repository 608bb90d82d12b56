"""Two network namespaces with a slow connection, for kernels without ``tc netem``."""

import contextlib
import fcntl
import os
import queue
import struct
import subprocess
import threading
import time

_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def slow_link(names, addresses, seconds):
    """Connect new namespaces; every packet takes ``seconds``.

    A tun device in each namespace hands its packets to this process, which delivers them to the
    other device later.
    """
    devices = []
    try:
        for name, address, other in zip(names, addresses, addresses[::-1], strict=True):
            run("ip", "netns", "add", name)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            devices.append(device)
            link = f"t{name}"
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", link.encode(), _TUN | _NO_HEADER))
            run("ip", "link", "set", link, "netns", name)
            run("ip", "-n", name, "addr", "add", address, "peer", other, "dev", link)
            for up in (link, "lo"):
                run("ip", "-n", name, "link", "set", up, "up")
        with contextlib.ExitStack() as stack:
            for source, target in (devices, devices[::-1]):
                stack.enter_context(_delivering(source, target, seconds))
            yield
    finally:
        for device in devices:
            os.close(device)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def _delivering(source, target, seconds):
    packets, is_over = queue.Queue(), threading.Event()

    def take():
        while not is_over.is_set():
            try:
                packets.put((time.monotonic() + seconds, os.read(source, 65536)))
            except BlockingIOError:
                time.sleep(0.0005)
        packets.put((0.0, b""))

    def deliver():
        while (packet := packets.get())[1]:
            time.sleep(max(0.0, packet[0] - time.monotonic()))
            with contextlib.suppress(OSError):
                os.write(target, packet[1])

    threads = [threading.Thread(target=work, daemon=True) for work in (take, deliver)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
