"""What a few iterations spend their time on: torch's profiler, or a range for Nsight Systems."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from megatron_lowbit.errors import require
from megatron_lowbit.training.distributed import print_rank0

_ROWS = 60


class Profiler:
    """Profiles the iterations that the arguments say, if this is a rank that they name.

    ``first`` is how many iterations are over where the run starts or goes on.

    Raises UserError where Nsight Systems would have no GPU to look at.
    """

    def __init__(self, args: Namespace, rank: int, first: int) -> None:
        self._start, self._end = args.profile_step_start, args.profile_step_end
        self._after_each: Callable[[], None] | None = None
        self._open = ExitStack()
        self._range, warm_up = self._of_nsight, 0
        if args.use_pytorch_profiler:
            # Torch's first iteration also sets up its hooks: it is recorded and thrown away.
            self._range, warm_up = self._of_torch, 1
            self._stem = Path(args.tensorboard_dir) / f"profile_rank_{rank:05d}"
        elif args.profile:
            require(
                torch.cuda.is_available(),
                "--profile without --use-pytorch-profiler marks work on a GPU, and there is none",
            )
        self._begin = self._start - warm_up if args.profile and rank in args.profile_ranks else None
        if args.profile and first > self._start - warm_up:
            print_rank0(f"nothing is profiled: the run goes on after {first} iterations")

    @contextmanager
    def iteration(self, done: int) -> Iterator[None]:
        """Around an iteration, ``done`` of them being over before it."""
        if done == self._begin:
            self._begin = None  # once, also where the run goes back
            self._after_each = self._open.enter_context(self._range())
        yield
        if self._after_each is None:
            return
        self._after_each()
        if done == self._end - 1:
            self._after_each = None
            self._open.close()

    @contextmanager
    def _of_torch(self) -> Iterator[Callable[[], None]]:
        steps = schedule(wait=0, warmup=1, active=self._end - self._start, repeat=1)
        with profile(schedule=steps, on_trace_ready=self._write) as found:
            yield found.step

    @contextmanager
    def _of_nsight(self) -> Iterator[Callable[[], None]]:
        torch.cuda.cudart().cudaProfilerStart()
        with torch.autograd.profiler.emit_nvtx():
            yield torch.cuda.synchronize
        torch.cuda.cudart().cudaProfilerStop()

    def _write(self, found: profile) -> None:
        """A trace for Perfetto or chrome://tracing, and what took most."""
        where = "cuda" if torch.cuda.is_available() else "cpu"
        shown = found.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=_ROWS)
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._stem.with_suffix(".txt").write_text(shown + "\n")
        partial = self._stem.with_suffix(".partial.json.gz")
        found.export_chrome_trace(str(partial))
        os.replace(partial, self._stem.with_suffix(".json.gz"))
