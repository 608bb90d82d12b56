"""Two machines on one: network namespaces with a cable between them."""

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A place where processes run; `enter` is what a command begins with to run there."""

    address: str
    enter: tuple[str, ...] = ()
    link: str = ""

    def cut(self):
        """Pull the cable out."""
        _ip("link", "set", self.link, "down", enter=self.enter)


LOOPBACK = Host("127.0.0.1")


def can_make_hosts():
    if not shutil.which("ip") or os.getuid() != 0:
        return False
    name = f"rx-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode == 0:
        _ip("netns", "delete", name)
    return made.returncode == 0


@contextlib.contextmanager
def two_hosts():
    names = [f"rx{i}-{os.getpid()}" for i in range(2)]
    links = [f"v{name}" for name in names]
    hosts = [
        Host(f"10.213.7.{i + 1}", ("ip", "netns", "exec", names[i]), links[i]) for i in range(2)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, host in zip(names, hosts, strict=True):
            _ip("link", "set", host.link, "netns", name)
            _ip("addr", "add", f"{host.address}/24", "dev", host.link, enter=host.enter)
            _ip("link", "set", host.link, "up", enter=host.enter)
            _ip("link", "set", "lo", "up", enter=host.enter)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*arguments, enter=()):
    subprocess.run([*enter, "ip", *arguments], check=True, capture_output=True)
