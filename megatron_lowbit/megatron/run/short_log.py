"""``--short-log``: the lines of a run on the terminal; the lines of Megatron-LM go to a file."""

import io
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from megatron.core import mpu

from megatron_lowbit.arguments.upstream import redirect_upstream
from megatron_lowbit.data.dataset import read_index
from megatron_lowbit.errors import UserError, say
from megatron_lowbit.megatron.datasets import data_prefixes
from megatron_lowbit.megatron.run.checkpoint_guard import LOG_FILE
from megatron_lowbit.megatron.run.dry_run import count_parameters
from megatron_lowbit.megatron.run.errors import gather_from_ranks, say_on_rank_0

_BEGIN = "training ..."
_STEP = re.compile(
    r"iteration +(?P<step>\d+)/ *(?P<last>\d+) \| consumed samples: +(?P<samples>\d+) \|"
    r"(?:.* lm loss: (?P<loss>\S+) \|)?.* skipped iterations: +(?P<skipped>\d+) \|"
)
_LOSS = re.compile(
    r"(?P<part>validation\S*) loss at iteration (?P<step>\d+)(?: on (?P<set>\w+) set)? \|"
    r" lm loss value: (?P<loss>\S+)"
)
_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) to (.+?) \[ t ")
_EXIT = re.compile(r"\[(exiting program .+)\] datetime")


@contextmanager
def short_log(args: Namespace, model_config: Any) -> Iterator[None]:
    """Append Megatron-LM's lines to ``SAVE/megatron.log``, and show short ones on the terminal.

    Without ``--short-log`` this changes nothing. All ranks append to the same file.
    """
    printed = vars(args).pop("upstream_lines")  # checkpoints have the other arguments
    if not args.short_log:
        yield
        return

    def describe_model(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        say_on_rank_0(model_line(args, chunks))
        return chunks

    model_config.pre_wrap_hooks.insert(0, describe_model)
    log = _Log(args)
    log(printed)
    try:
        with redirect_upstream(log):
            yield
    except BaseException as error:
        log.close(error)
        raise
    log.close()


class _Log:
    """Writer of the file, which shows the progress that it reads in Megatron-LM's lines.

    Lines stay in memory until training begins: a refused run writes no file.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._file: TextIO = io.StringIO()
        # Iteration and consumed samples of the last line, and its time.
        self._shown: tuple[int, int, float] | None = None

    def __call__(self, text: str) -> None:
        self._file.write(text)
        if text == _BEGIN:
            warnings = self._open()
            say(*start_lines(self._args, warnings))
        elif found := _STEP.search(text):
            self._open()
            say(self._progress(found, time.perf_counter()))
        elif found := _LOSS.search(text):
            part = found["set"] or found["part"]
            say(f"iteration {found['step']}, {part} loss {float(found['loss']):.4f}")
        elif found := _SAVED.search(text):
            say(f"checkpoint of iteration {found[1]} in {found[2]}")
        elif found := _EXIT.search(text):
            say(found[1])

    def _open(self) -> int:
        """Move the lines from memory into the file; return the number of warnings in them."""
        if not isinstance(self._file, io.StringIO):
            return 0
        lines, path = self._file.getvalue(), Path(self._args.save) / LOG_FILE
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o666), "w", buffering=1, encoding="utf-8")
        self._file.write(lines)
        return lines.count("WARNING:")

    def close(self, error: BaseException | None = None) -> None:
        """Close the file; print lines that explain the end of a run that has not begun."""
        if error is None:
            self._open()
        elif isinstance(self._file, io.StringIO):
            refused = isinstance(error, UserError) and not isinstance(error.__cause__, SystemExit)
            if isinstance(error, Exception) and not refused:
                say(*self._file.getvalue().splitlines(), file=sys.stderr)
        self._file.close()

    def _progress(self, found: re.Match[str], now: float) -> str:
        """Return a line with the speed since the last one; the first line has no speed."""
        step, last, skipped = (int(found[name]) for name in ("step", "last", "skipped"))
        line = f"iteration {step}/{last}"
        if found["loss"]:
            line += f", loss {float(found['loss']):.4f}"
        if skipped:
            line += f", {skipped} skipped"
        samples = int(found["samples"])
        if self._shown is not None:
            step_before, samples_before, before = self._shown
            seconds = now - before
            tokens = (samples - samples_before) * self._args.seq_length
            left = timedelta(seconds=round(seconds * (last - step) / (step - step_before)))
            line += f", {tokens / seconds:,.0f} tokens/s, {left} left"
        self._shown = step, samples, now
        return line


def model_line(args: Namespace, chunks: list[torch.nn.Module]) -> str:
    """Return a line about the whole model; all ranks must call it."""
    mine = mpu.get_pipeline_model_parallel_rank(), count_parameters(args, chunks).stage
    parameters = sum(dict(gather_from_ranks(mine)).values())
    kind = "GPT" if args.hybrid_layer_pattern is None else "hybrid"
    dtype = str(args.params_dtype).removeprefix("torch.")
    return (
        f"model: {kind}, {args.num_layers} layers of hidden size {args.hidden_size}, "
        f"{parameters:,} parameters, {dtype}"
    )


def start_lines(args: Namespace, warnings: int) -> Iterator[str]:
    """Yield lines about data, plan and files; ``warnings``: number of warnings in the log."""
    prefixes = list(dict.fromkeys(data_prefixes(args)))
    data = ", ".join(prefixes) or "mock data"
    if prefixes and not args.sft:
        tokens = sum(int(read_index(prefix).lengths.sum(dtype="int64")) for prefix in prefixes)
        data += f", {tokens:,} tokens"
    yield f"data: {data}; tokenizer {args.tokenizer_model or args.tokenizer_type}"
    plan = f"iterations {args.iteration + 1} to {args.train_iters}"
    if args.step_batch_size_schedule is None:
        plan += f", {args.global_batch_size} x {args.seq_length} tokens in each"
    if args.eval_iters and args.eval_interval <= args.train_iters:
        plan += f"; validation every {args.eval_interval} iterations"
    yield f"plan: {plan}"
    yield (
        f"files: {args.save} gets a checkpoint every {args.save_interval} iterations, "
        "metrics.jsonl, and at the end loss.png"
    )
    yield f"Megatron-LM: {warnings} warnings and all other lines are in {args.save}/{LOG_FILE}"
