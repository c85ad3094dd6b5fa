"""Processes that run a script and find torch and Megatron-LM imported."""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]


def start_server(context: BaseContext) -> None:
    """Start the server that processes are forked from; it imports modules once for all of them.

    It finds them by PYTHONPATH, for Python 3.11 does not pass on ``sys.path``.
    """
    context.set_forkserver_preload(["tests.imported"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        forkserver.ensure_running()


def start_script(
    context: BaseContext, script: str | Path, *arguments: object, output: Path, **environment: str
) -> BaseProcess:
    """Start a process that runs a script as its main module, in a session of its own.

    Args:
        context: of multiprocessing: how processes are started.
        script: file of the script.
        arguments: command-line arguments.
        output: file for what it prints.
        environment: changes of the environment, before the script is run.
    """
    command = [str(script), *map(str, arguments)]
    process = context.Process(target=_run_script, args=(command, str(output), environment))
    process.start()
    return process


def _run_script(command: list[str], output: str, environment: dict[str, str]) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # as in a process that was started anew
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def rendezvous() -> tuple[TCPStore, dict[str, str]]:
    """Return a store for a launcher's rendezvous, on a port that it takes, and its environment.

    The store must live as long as the processes that the environment names it to.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store, {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def finish(processes: Sequence[BaseProcess], timeout: float) -> list[int]:
    """Return exit codes of processes; once one fails, or after so many seconds, others are killed.

    A rank whose partner is gone would wait for it.
    """
    end, running = time.monotonic() + timeout, {p.sentinel: p for p in processes}
    while running:
        ended = connection.wait(running, end - time.monotonic())
        if not ended or any([running.pop(sentinel).exitcode for sentinel in ended]):
            break
    for process in running.values():
        process.kill()
        process.join()
    return [process.exitcode for process in processes]
