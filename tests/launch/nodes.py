"""Two nodes on this machine: each has a network, a host name and processes of its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# ip binds the files of this folder over those of /etc.
_ETC = Path("/etc/netns")


def missing() -> str | None:
    """Return why there can be no nodes here; None where there can."""
    absent = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install iproute2 util-linux hostname)"
    # Containers refuse root, too.
    trial = ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(trial, capture_output=True, text=True).stderr.strip() or None


@dataclass(frozen=True)
class Node:
    """One of :func:`two_nodes`, by its network namespace and its name in the others' network."""

    namespace: str
    name: str
    address: str

    def connected(self, command: list[str]) -> list[str]:
        """Return a command that runs another one in this node's network."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def alone(self, command: list[str]) -> list[str]:
        """Return a command that runs another one as the first process of the node.

        All processes of a node end with the first one, which is the only child of the command's
        process and ends with it.
        """
        first = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name.partition(".")[0], *command]
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *first]
        return self.connected(own)

    def plug(self, state: str) -> None:
        """Set the state of the node's cable, ``up`` or ``down``."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", "eth0", state], check=True)


@contextmanager
def two_nodes(*names: str) -> Iterator[list[Node]]:
    """Make two nodes, joined by a cable, which reach each other by their names."""
    nodes = [
        Node(f"lowbit-{os.getpid()}-{number}", name, f"192.0.2.{number}")
        for number, name in enumerate(names, 1)
    ]
    hosts = [f"{node.address} {node.name} {node.name.partition('.')[0]}\n" for node in nodes]
    first, second = (node.namespace for node in nodes)
    try:
        for node in nodes:
            subprocess.run(["ip", "netns", "add", node.namespace], check=True)
            (_ETC / node.namespace).mkdir(parents=True)
            (_ETC / node.namespace / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        cable = f"link add eth0 netns {first} type veth peer name eth0 netns {second}"
        subprocess.run(["ip", *cable.split()], check=True)
        for node in nodes:
            address = f"-n {node.namespace} address add {node.address}/24 dev eth0"
            subprocess.run(["ip", *address.split()], check=True)
            subprocess.run(["ip", "-n", node.namespace, "link", "set", "lo", "up"], check=True)
            node.plug("up")
        yield nodes
    finally:
        for node in nodes:
            shutil.rmtree(_ETC / node.namespace, ignore_errors=True)
            subprocess.run(["ip", "netns", "delete", node.namespace])
