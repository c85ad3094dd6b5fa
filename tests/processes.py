"""Processes that run a script and find torch and Megatron-LM imported."""

import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[1]


def start_server() -> None:
    """Start the server that processes are forked from: a fork of this one and of its imports.

    ``multiprocessing`` would start a new process, which imports everything again.
    """
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_server)
        forkserver.ensure_running()


def _fork_server(_path: str, _arguments: list[str], descriptors: list[int]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        # Copies would keep open what others wait for the end of: a pipe of the server itself, those
        # of pytest's workers. pytest's handlers of logs still write to theirs.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *descriptors}:
            os.dup2(null, descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        gc.freeze()
        forkserver.main(*descriptors, [])
    finally:
        os._exit(0)


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
