"""A Slurm cluster of two nodes on this machine, its daemons and files in one folder."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import nodes
from nodes import Node

DAEMONS = ("munged", "slurmctld", "slurmd")
# Debian keeps them out of users' PATH.
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({nodes[0].address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
# Every 60 and 30 seconds by default.
SchedulerParameters=sched_interval=2,bf_interval=2
# As many CPUs as tests ask for, whatever the machine has.
SlurmdParameters=config_overrides
NodeName={nodes[0].name} NodeAddr={nodes[0].address} CPUs=1
NodeName={nodes[1].name} NodeAddr={nodes[1].address} CPUs=1
# A node that does not answer is down after 300 seconds by default, and stays down.
SlurmdTimeout=10
ReturnToService=2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why there can be no cluster here; None where there can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install munge slurmctld slurmd)"
    return nodes.missing()


class Cluster:
    """Within it the daemons run, the controller and the commands in the first node's network.

    ``folder`` should be new; its path, short: it holds a socket.
    """

    def __init__(self, folder: Path, *two: Node) -> None:
        self.folder, self.nodes = folder, two
        self._daemons: dict[str, subprocess.Popen] = {}
        self._environment = os.environ | {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        folder = self.folder
        (folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=folder, host=host, nodes=self.nodes, user=getpass.getuser()
            )
        )
        # Needs no control groups, but must name one: "disabled" came with Slurm 23.02.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            munge = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            options = [f"--{option}={folder}/munge.{end}" for option, end in munge.items()]
            # --force: it would want every folder above its own to be writable by root alone.
            munged = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
            self._start("munged", munged)
            self._wait_for((folder / "munge.socket").exists, "munged")
            self._start("slurmctld", self.nodes[0].connected(["slurmctld", "-D"]))
            for node in self.nodes:
                self.boot(node)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, *command: str, **environment: str) -> str:
        """Return the output of one of Slurm's commands; "" where it fails."""
        result = subprocess.run(
            self.nodes[0].connected([*command]), env=self._environment | environment,
            capture_output=True, text=True,
        )  # fmt: skip
        return result.stdout.strip() if result.returncode == 0 else ""

    def boot(self, node: Node) -> None:
        """Start a node, and wait until it takes jobs."""
        node.plug("up")
        self._start(node.name, node.alone(["slurmd", "-D"]))
        state = ("sinfo", "--noheader", "--nodes", node.name, "--format", "%t")
        self._wait_for(lambda: self.run(*state) == "idle", node.name)

    def cut_off(self, node: Node) -> None:
        """End all processes of a node, as without power: nothing tells the other node."""
        node.plug("down")
        daemon = self._daemons.pop(node.name)
        daemon.kill()
        daemon.wait()

    def job(self, number: str) -> dict[str, str]:
        """Return the known facts of a job: JobState, Restarts, Reason, ..."""
        fields = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(field.partition("=")[::2] for field in fields)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.log", "a") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log
            )

    def _wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up ({dead}):\n{self.logs()}")
            time.sleep(0.1)

    def _stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()  # and with a node's, its jobs
            daemon.wait()
