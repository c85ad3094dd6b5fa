"""Runs in processes that have made others before, and are forked from a server.

A new process would import torch and Megatron-LM, and then compile its functions,
for longer than it trains.
"""

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from benchmarks.compose_features import Run
from benchmarks.records import ROOT
from benchmarks.training_steps import read_metrics

Steps = dict[int, tuple[float, float]]
PRELOADED = (
    "torch._dynamo", "megatron_lowbit.megatron.pretrain", "megatron_lowbit.megatron.run.metrics",
    "megatron.training.training", "megatron.core.tokenizers.text.libraries.huggingface_tokenizer",
)  # fmt: skip
ERROR = "error.{}.json"
GRACE = 3
"""Seconds that ranks have for their own message once one has failed, and for their end."""


class Outcome(NamedTuple):
    """Kind of a run's end, "ended", "refused", "failed" or "did not end", and a message."""

    kind: str
    message: str = ""


def start_server(on_gpu: bool) -> BaseContext:
    """Return a context whose processes have imported what they need.

    On a GPU host the server must not have touched CUDA. Where importing does, processes are spawned
    and import for themselves.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # threads divide sums, and with them their last bits
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(["transformer_engine.pytorch"] * on_gpu)])
    forkserver.ensure_running()
    if on_gpu:
        probe = context.Process(target=torch.cuda.init)
        probe.start()
        probe.join()
        if probe.exitcode:
            print("CUDA does not survive the fork here: processes are spawned", flush=True)
            return multiprocessing.get_context("spawn")
    return context


class Crew:
    """Ranks that make runs one after another; they end with the first run that fails.

    Args:
        context: of ``start_server``.
        ranks: number of processes.
        environment: variables of the processes.
        per_host: ranks that share a host's GPUs; further ones are another host's to NCCL, which
            gives each GPU of a host to one rank.
    """

    def __init__(
        self, context: BaseContext, ranks: int, environment: Mapping[str, str], per_host: int
    ) -> None:
        self.runs = 0
        self._store = store = torch.distributed.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        common = {} if ranks == 1 else {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(per_host), "TORCHELASTIC_RUN_ID": "compose",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        self._ranks = []
        for rank in range(ranks):
            host, local = divmod(rank, per_host)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "NCCL_HOSTID": f"host-{host}"}
            ours, theirs = context.Pipe()
            variables = {**common, **(own if ranks > 1 else {}), **environment}
            process = context.Process(target=_rank, args=(theirs, rank, ranks, variables))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def make(self, phases: Sequence[Sequence[str]], folder: Path, timeout: float) -> Outcome:
        """Make runs; the metrics of phase N are in folder/N.

        Args:
            phases: the command line of each run, without the program's name.
            folder: gets metrics, errors and each rank's output.
            timeout: seconds for all phases, after which the processes are killed.
        """
        self.runs += 1
        folder.mkdir(parents=True, exist_ok=True)
        for _, pipe in self._ranks:
            pipe.send((phases, str(folder)))
        codes = self._codes(timeout)
        if any(code != 0 for code in codes):
            for process, _ in self._ranks:  # one that lost another does not look at its pipe
                process.kill()
            self.end()
        errors = [json.loads(file.read_text()) for file in sorted(folder.glob(ERROR.format("*")))]
        if errors:
            outcomes = [error["kind"] for error in errors]
            # Other ranks fail because they lost the first one's connection.
            first = min(errors, key=lambda error: (error["kind"] == "failed", error["time"]))
            return Outcome("refused" if "refused" in outcomes else "failed", first["message"])
        if any(codes):
            return Outcome("failed", f"exit codes {codes}")
        if None in codes:
            return Outcome("did not end", f"did not end within {timeout:.0f} s")
        return Outcome("ended")

    def end(self) -> None:
        """End the processes: by themselves, so that they end what they have started.

        What is left of a process that was killed, such as a worker that saves, would keep a GPU's
        memory.
        """
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(GRACE)
            process.kill()
            process.join()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._ranks.clear()

    @property
    def alive(self) -> bool:
        """True until a run fails."""
        return bool(self._ranks)

    def _codes(self, timeout: float) -> list[int | None]:
        """Wait for all ranks; return 0, a process's exit code, or None for one that did not end."""
        deadline = time.monotonic() + timeout
        codes: list[int | None] = [None] * len(self._ranks)
        while None in codes:
            # A process that has forked others may leave its pipe open when it ends.
            ends = {end: number for number, (process, pipe) in enumerate(self._ranks)
                    for end in (process.sentinel, pipe) if codes[number] is None}  # fmt: skip
            ready = connection.wait(ends, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for number in {ends[end] for end in ready}:
                codes[number] = self._code(number)
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE)
        return codes

    def _code(self, number: int) -> int:
        """Return 0 for a rank that has told its end, else the exit code of its process."""
        process, pipe = self._ranks[number]
        with suppress(EOFError, ConnectionError):  # it ended without a word
            if pipe.poll():
                return pipe.recv()
        process.join()
        return process.exitcode or 1


def kind_of(run: Run) -> tuple[int, bool]:
    """Return a run's demands on its processes: their number, and Megatron-FSDP's environment."""
    return run.ranks, "FSDP" in run.features


class Crews:
    """Crews that wait for a run of their kind, on this many GPUs."""

    def __init__(self, context: BaseContext, gpus: int) -> None:
        self._context, self._gpus, self._lock, self._numbers = context, gpus, Lock(), count()
        self._idle: list[tuple[tuple[int, bool], Crew]] = []

    @contextmanager
    def crew(self, run: Run, new: bool = False) -> Iterator[Crew]:
        """Yield a crew for a run; one that has made no run if ``new``.

        A crew that is started takes the place of an idle one, if there is any.
        """
        needs = kind_of(run)
        with self._lock:
            fitting = [pair for pair in self._idle if pair[0] == needs and not new]
            taken = (fitting or self._idle)[:1]
            self._idle = [pair for pair in self._idle if pair not in taken]
        if fitting:
            crew = fitting[0][1]
        else:
            for _, other in taken:
                other.end()
            per_host = min(run.ranks, self._gpus) or run.ranks
            crew = Crew(self._context, run.ranks, self._environment(needs), per_host)
        try:
            yield crew
        except BaseException:
            crew.end()
            raise
        if crew.alive:
            with self._lock:
                self._idle.append((needs, crew))

    def end(self) -> None:
        """End all crews."""
        for _, crew in self._idle:
            crew.end()
        self._idle.clear()

    def _environment(self, needs: tuple[int, bool]) -> dict[str, str]:
        ranks, under_fsdp = needs
        environment = {}
        if self._gpus and not under_fsdp:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if self._gpus and ranks == 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(next(self._numbers) % self._gpus)
        return environment


def read_steps(folder: Path) -> Steps:
    """Return (loss, gradient norm) by iteration; NaN where a value was not finite."""
    number = lambda value: float("nan") if value is None else value  # noqa: E731
    return {
        line["iteration"]: (number(line["lm_loss"]), number(line["grad_norm"]))
        for line in read_metrics(folder)
    }


def _rank(
    tasks: connection.Connection, rank: int, ranks: int, environment: Mapping[str, str]
) -> None:
    """Make runs as one rank, each in a folder of its own; a child process's main function."""
    from torch._dynamo import config

    os.setsid()
    os.environ.update(environment)
    # A new shape gets the same code as in a process that has met no other.
    config.automatic_dynamic_shapes = False
    config.recompile_limit = 1000
    gc.freeze()
    while True:
        try:
            phases, folder = tasks.recv()
        except EOFError:
            return
        descriptor = os.open(Path(folder) / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
        began: list[bool] = []
        try:
            for number, phase in enumerate(phases):
                began.clear()
                _train(phase, Path(folder) / str(number), rank == ranks - 1, began)
        except BaseException as error:
            traceback.print_exc()
            entry = {**_describe(error, bool(began)), "time": time.time()}
            (Path(folder) / ERROR.format(rank)).write_text(json.dumps(entry))
            sys.stdout.flush()
            os._exit(1)
        tasks.send(0)


def _train(arguments: Sequence[str], folder: Path, logs: bool, began: list[bool]) -> None:
    """Make a run; ``began`` gets an entry at its first forward pass."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import global_vars

    from megatron_lowbit.arguments import cpu
    from megatron_lowbit.megatron import pretrain
    from megatron_lowbit.megatron.run.metrics import MetricsWriter

    if "--async-save" not in arguments:
        # Megatron-LM would start another process for the queue, which imports torch.
        filesystem_async.get_write_results_queue("fork")
    # Where quantized parameters are compared with BF16 ones, a CPU keeps --bf16, too.
    cpu._UNSUPPORTED = tuple(row for row in cpu._UNSUPPORTED if row.flag != "--bf16")
    pretrain._draw_loss = lambda args, metrics: None
    original = pretrain.run

    def watch(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        chunks[0].register_forward_pre_hook(lambda *_: began.append(True))
        return chunks

    def recorded(args: Any) -> None:
        if logs and args.save is None:
            writer = MetricsWriter(folder, None, args.log_interval, args.seq_length)
            global_vars._GLOBAL_TENSORBOARD_WRITER = writer
            original(args, [watch])
            writer.close()
        else:
            original(args, [watch])

    pretrain.run = recorded
    try:
        pretrain.main(arguments)
    finally:
        pretrain.run = original


def _describe(error: BaseException, began: bool) -> dict[str, str]:
    """Return the kind and the message of an error, with the place in Megatron-LM where it arose."""
    from megatron_lowbit.errors import UserError

    if isinstance(error, UserError):
        return {"kind": "failed" if began else "refused", "message": str(error)[:600]}
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f"{os.sep}megatron" in f.filename] or list(frames)
    where = f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"
    text = " ".join(str(error).split())[:400]
    # Megatron-LM and Transformer Engine check some combinations in the first forward pass only.
    packages = (f"{os.sep}{name}{os.sep}" for name in ("megatron", "transformer_engine"))
    checked = isinstance(error, ValueError | NotImplementedError) and (
        any(package in frames[-1].filename for package in packages)
    )
    outcome = "refused" if checked and (frames[-1].line or "").startswith("raise") else "failed"
    return {"kind": outcome, "message": f"{type(error).__name__} ({where}): {text}"}
