"""What is logged every ``--log-interval`` iterations."""

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_lowbit.analysis.spike_score import spike_score
from megatron_lowbit.training.flops import sample_flops
from megatron_lowbit.training.metrics import MetricLogger
from megatron_lowbit.training.timers import PhaseTimer, memory_gib


class LogWindow:
    """Means over ``--log-interval`` iterations, and their speed without evaluation and saving.

    ``timer`` is for the phases of an iteration. The spike score is that of the iterations that this
    process has made. ``folds`` is the quantization engine's.
    """

    def __init__(
        self,
        args: Namespace,
        logger: MetricLogger,
        padded_vocab_size: int,
        folds: Callable[[], tuple[int, int]],
    ) -> None:
        self.timer, self._folds = PhaseTimer(), folds
        self._args, self._logger = args, logger
        self._sample_flops = sample_flops(args, padded_vocab_size) / dist.get_world_size()
        self._all_losses: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Begin anew: what was added since the last log does not count."""
        self._losses: list[float] = []
        self._since = time.perf_counter()

    def pause(self, work: Callable[[], Any]) -> Any:
        """Run work whose time does not count."""
        start = time.perf_counter()
        result = work()
        self._since += time.perf_counter() - start
        return result

    def add(
        self,
        iteration: int,
        consumed_samples: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
    ) -> None:
        """Take one iteration's results; log where the interval is full, or the run at its end."""
        self._losses.append(loss)
        self._all_losses.append(loss)
        if iteration % self._args.log_interval and iteration < self._args.train_iters:
            return
        iterations = len(self._losses)
        self._logger.log(
            iteration,
            lm_loss=sum(self._losses) / iterations,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            consumed_tokens=consumed_samples * self._args.seq_length,
            spike_score=spike_score(self._all_losses),
            memory_gib=memory_gib(),
            **self._speed(iterations),
            **self._folding(),
        )
        self.restart()

    def _folding(self) -> dict[str, float]:
        """The share of folded MXFP4 values that E4M3 could not hold, where any were folded."""
        inexact, values = self._folds()
        return {"folded_inexactly": inexact / values} if values else {}

    def _speed(self, iterations: int) -> dict[str, float]:
        """Tokens a second in total, model TFLOP a second by process, mean seconds of phases."""
        phases = self.timer.take()
        samples = iterations * self._args.global_batch_size
        samples_per_second = samples / (time.perf_counter() - self._since)
        return {
            "tokens_per_second": samples_per_second * self._args.seq_length,
            "model_tflops_per_second": samples_per_second * self._sample_flops / 1e12,
            **{f"{name}_seconds": mean for name, mean in phases.items()},
        }
