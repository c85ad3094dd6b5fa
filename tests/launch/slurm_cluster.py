"""A Slurm cluster of one node on this machine, its daemons and files in one folder."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
# Debian keeps them out of users' PATH.
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
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
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why there can be no cluster here; None where there can."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: apt-get install munge slurmctld slurmd)"
    if os.geteuid() != 0:
        return "slurmd runs jobs as root only"
    return None


class Cluster:
    """Within it the daemons run. ``folder`` should be new; its path, short: it holds a socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen] = []
        self._environment = os.environ | {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        with socket.socket() as first, socket.socket() as second:
            ports = []
            for one in (first, second):
                one.bind(("127.0.0.1", 0))
                ports.append(one.getsockname()[1])
        host = socket.gethostname().partition(".")[0]
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, host=host, ports=ports, user=getpass.getuser())
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
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *options)
            self._wait_for(lambda: (folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", host)
            self._wait_for(lambda: self.run("sinfo", "-h", "-o", "%t") == "idle", "the node")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, *command: str, **environment: str) -> str:
        """Return what one of Slurm's commands prints; "" where it fails."""
        result = subprocess.run(
            command, env=self._environment | environment, capture_output=True, text=True
        )
        return result.stdout.strip() if result.returncode == 0 else ""

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

    def _start(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.log", "w") as log:
            command = [shutil.which(name, path=_PATH), *arguments]
            self._daemons.append(
                # Not for Ctrl-C to end: jobs are cancelled first.
                subprocess.Popen(
                    command, env=self._environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def _wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up ({dead}):\n{self.logs()}")
            time.sleep(0.1)

    def _stop(self) -> None:
        # Jobs first: their processes are children of none of the daemons.
        self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
        self.run("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + 20
        while self.run("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
