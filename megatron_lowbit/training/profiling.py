"""What a few iterations spend their time on: torch's profiler, or a range for Nsight Systems."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from megatron_lowbit.errors import require

_ROWS = 60


class Profiler:
    """Profiles the iterations that the arguments say, if this is a rank that they name."""

    def __init__(self, args: Namespace, rank: int) -> None:
        """Raises UserError where Nsight Systems would have no GPU to look at."""
        require(
            not args.profile or args.use_pytorch_profiler or torch.cuda.is_available(),
            "--profile without --use-pytorch-profiler marks work on a GPU, and there is none",
        )
        self._enabled = args.profile and rank in args.profile_ranks
        self._start, self._end = args.profile_step_start, args.profile_step_end
        self._torchs = args.use_pytorch_profiler
        self._stem = f"profile_rank_{rank:05d}"
        self._folder = Path(args.tensorboard_dir or ".")
        self._open = ExitStack()

    @contextmanager
    def iteration(self, done: int) -> Iterator[None]:
        """Around an iteration, ``done`` of them being over before it."""
        if not self._enabled:
            yield
        elif self._torchs:
            yield from self._by_torch(done)
        else:
            yield from self._by_nsight(done)

    def _by_torch(self, done: int) -> Iterator[None]:
        # Torch's first recorded iteration also sets up its hooks: one is recorded and thrown away.
        if done == self._start - 1:
            steps = schedule(wait=0, warmup=1, active=self._end - self._start, repeat=1)
            self._profile = self._open.enter_context(
                profile(schedule=steps, on_trace_ready=self._write)
            )
        yield
        if self._start - 1 <= done < self._end:
            self._profile.step()
        if done == self._end - 1:
            self._open.close()

    def _by_nsight(self, done: int) -> Iterator[None]:
        if done == self._start:
            torch.cuda.cudart().cudaProfilerStart()
            self._open.callback(torch.cuda.cudart().cudaProfilerStop)
            self._open.enter_context(torch.autograd.profiler.emit_nvtx())
        yield
        if done == self._end - 1:
            torch.cuda.synchronize()
            self._open.close()

    def _write(self, found: profile) -> None:
        """A trace for Perfetto or chrome://tracing, and what took most."""
        where = "cuda" if torch.cuda.is_available() else "cpu"
        shown = found.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=_ROWS)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{self._stem}.txt").write_text(shown + "\n")
        partial = self._folder / f"{self._stem}.partial.json.gz"
        found.export_chrome_trace(str(partial))
        os.replace(partial, self._folder / f"{self._stem}.json.gz")
