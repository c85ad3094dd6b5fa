"""Runs in processes that are forked from a server which has everything imported.

A process that is started anew would import torch and Megatron-LM for longer than it trains.
"""

import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "torch._dynamo", "megatron_lowbit.megatron.pretrain", "megatron_lowbit.megatron.metrics",
    "megatron.training.training", "megatron.core.tokenizers.text.libraries.huggingface_tokenizer",
)  # fmt: skip
ERROR, STEPS = "error.{}.json", "metrics.jsonl"
GRACE = 3
"""Seconds that the other ranks have for their own message, once one has failed."""


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
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
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


def run(
    context: BaseContext, ranks: int, phases: Sequence[Sequence[str]], folder: Path,
    timeout: float, environment: Mapping[str, str],
) -> Outcome:  # fmt: skip
    """Make runs one after another in the same ranks; the metrics of phase N are in folder/N.

    Args:
        context: of ``start_server``.
        ranks: number of processes.
        phases: the command line of each run, without the program's name.
        folder: gets metrics, errors and each rank's output.
        timeout: seconds for all phases, after which the processes are killed.
        environment: variables of the processes.
    """
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {} if ranks == 1 else {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "compose",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        arguments = (phases, str(folder), rank, ranks, {**common, **own, **environment})
        processes.append(context.Process(target=_rank, args=arguments))
        processes[-1].start()
    codes = _finish(processes, timeout)
    errors = [json.loads(file.read_text()) for file in sorted(folder.glob(ERROR.format("*")))]
    if errors:
        kinds = [error["kind"] for error in errors]
        # Other ranks fail because they lost the first one's connection.
        first = min(errors, key=lambda error: (error["kind"] == "failed", error["time"]))
        return Outcome("refused" if "refused" in kinds else "failed", first["message"])
    if any(code is None for code in codes):
        return Outcome("did not end", f"did not end within {timeout:.0f} s")
    if any(codes):
        return Outcome("failed", f"exit codes {codes}")
    return Outcome("ended")


def read_steps(folder: Path) -> dict[int, tuple[float, float]]:
    """Return (loss, gradient norm) by iteration; NaN where a value was not finite."""
    lines = map(json.loads, (folder / STEPS).read_text().splitlines())
    number = lambda value: float("nan") if value is None else value  # noqa: E731
    return {
        line["iteration"]: (number(line["lm_loss"]), number(line["grad_norm"]))
        for line in lines
        if "lm_loss" in line
    }


def _finish(processes: Sequence[Any], timeout: float) -> list[int | None]:
    """Return exit codes, None for a process that was killed at the end of the time."""
    end, running = time.monotonic() + timeout, {p.sentinel: p for p in processes}
    late = False
    while running:
        ended = connection.wait(running, max(0, end - time.monotonic()))
        if not ended:
            late = True
            break
        # All that have ended leave the dictionary, before any of them counts as failed.
        if any([running.pop(sentinel).exitcode for sentinel in ended]):
            end = min(end, time.monotonic() + GRACE)
    for process in running.values():
        process.kill()
    for process in processes:
        process.join()
    failed = [p.exitcode for p in processes if p not in running.values() and p.exitcode]
    hung = late and not failed
    return [None if hung and p in running.values() else p.exitcode for p in processes]


def _rank(
    phases: Sequence[Sequence[str]], folder: str, rank: int, ranks: int, environment: dict[str, str]
) -> None:
    """Make all runs as one rank; a child process's main function."""
    os.environ.update(environment)
    descriptor = os.open(Path(folder) / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    gc.freeze()
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


def _train(arguments: Sequence[str], folder: Path, logs: bool, began: list[bool]) -> None:
    """Make a run; ``began`` gets an entry at its first forward pass."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import global_vars

    from megatron_lowbit.megatron import pretrain
    from megatron_lowbit.megatron.arguments import cpu
    from megatron_lowbit.megatron.metrics import MetricsWriter

    if "--async-save" not in arguments:
        # Megatron-LM would start the queue's process anew, which imports torch.
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
            tokens = args.global_batch_size * args.seq_length
            writer = MetricsWriter(folder, None, args.log_interval, tokens)
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
    own = [f for f in frames if f"{os.sep}megatron" in f.filename] or list(frames)
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    text = " ".join(str(error).split())[:400]
    # Megatron-LM and Transformer Engine check some combinations in the first forward pass only.
    packages = (f"{os.sep}{name}{os.sep}" for name in ("megatron", "transformer_engine"))
    checked = isinstance(error, ValueError | NotImplementedError) and (
        any(package in frames[-1].filename for package in packages)
    )
    kind = "refused" if checked and (frames[-1].line or "").startswith("raise") else "failed"
    return {"kind": kind, "message": f"{type(error).__name__} ({place}): {text}"}
