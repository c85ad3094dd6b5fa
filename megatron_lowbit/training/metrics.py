"""One logger for the console, SAVE/metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_lowbit.training.run_log import RUN_LOG

METRICS_FILE = "metrics.jsonl"

_CONSOLE_FORMATS = {
    "lm_loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "learning_rate": "lr {:.3e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "model_tflops_per_second": "{:.3g} TFLOP/s",
    "memory_gib": "{:.2f} GiB",
}


class MetricLogger:
    """Log numbers by iteration; a context manager, so that the files and the live line end.

    ``save_dir`` gets metrics.jsonl, one object a logged iteration; on a resume at
    ``start_iteration`` the lines of later iterations are dropped first. ``wandb_run`` is what
    wandb.init returned, or None. With ``enabled`` False (all ranks but one) all goes to the rank's
    log file alone, if it has one.
    """

    def __init__(
        self,
        save_dir: Path | None,
        tensorboard_dir: Path | None,
        total_iterations: int,
        start_iteration: int,
        enabled: bool,
        wandb_run: Any = None,
    ) -> None:
        self._enabled = enabled
        self._total = total_iterations
        self._start = start_iteration
        self._start_time = time.monotonic()
        self._file = self._writer = self._live = None
        self._wandb_run = wandb_run
        if not enabled:
            return
        if save_dir is not None:
            self._path = Path(save_dir) / METRICS_FILE
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_lines_after(self._path, start_iteration)
            self._file = self._path.open("a", encoding="utf-8")
        if tensorboard_dir is not None:
            # Imported here: slow, and needed only if asked for.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard_dir), purge_step=start_iteration + 1)
        if sys.stdout.isatty():
            # Drawn on each log only: no refresh thread beside the training loop.
            self._live = Live(console=Console(), auto_refresh=False)
            self._live.start()

    def log(self, iteration: int, **values: float) -> None:
        """Log one iteration (1-based). Values are numbers or one-element tensors.

        The console shows those of ``_CONSOLE_FORMATS``.
        """
        numbers = {name: _number(value) for name, value in values.items()}
        line = self._console_line(iteration, numbers)
        RUN_LOG.info(line)
        if not self._enabled:
            return
        self._write(iteration, numbers)
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def log_validation(self, iteration: int, validation_loss: float, seconds: float) -> None:
        """Log the validation loss at an iteration, and how long evaluation took."""
        loss = _number(validation_loss)
        if self._enabled:
            self._write(iteration, {"validation_loss": loss, "evaluation_seconds": seconds})
        self.message(f"iteration {iteration}/{self._total} | validation loss {loss:.4f}")

    def log_save(self, iteration: int, seconds: float) -> None:
        """Log how long training waited for a checkpoint; not on the console."""
        if self._enabled:
            self._write(iteration, {"save_seconds": seconds})

    def log_beside(self, iteration: int, values: dict[str, float]) -> None:
        """Log numbers that are too many for the console."""
        if self._enabled:
            self._write(iteration, values)

    def rewind(self, iteration: int) -> None:
        """Forget what metrics.jsonl holds of later iterations: the run is back at this one."""
        if self._file is not None:
            self._file.close()
            _drop_lines_after(self._path, iteration)
            self._file = self._path.open("a", encoding="utf-8")

    def message(self, text: str) -> None:
        """Print a line, above the live one if there is one."""
        RUN_LOG.info(text)
        if not self._enabled:
            return
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(Text(text), soft_wrap=True)

    def close(self, failed: bool = False) -> None:
        """End the live line and close what was written to; more than once does no harm."""
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=int(failed))
        self._file = self._writer = self._live = self._wandb_run = None
        self._enabled = False

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def _write(self, iteration: int, numbers: dict[str, int | float]) -> None:
        if self._file is not None:
            # JSON has no NaN and no infinity.
            finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
            self._file.write(json.dumps({"iteration": iteration, **finite}) + "\n")
            self._file.flush()
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, iteration)
        if self._wandb_run is not None:
            self._wandb_run.log(numbers, step=iteration)

    def _console_line(self, iteration: int, numbers: dict[str, int | float]) -> str:
        parts = [f"iteration {iteration}/{self._total}"]
        parts += [
            text.format(numbers[name]) for name, text in _CONSOLE_FORMATS.items() if name in numbers
        ]
        done = iteration - self._start
        if done > 0:
            seconds = (time.monotonic() - self._start_time) / done * (self._total - iteration)
            parts.append(f"{_clock(seconds)} left")
        return " | ".join(parts)


def _number(value: object) -> int | float:
    return value if isinstance(value, int) else float(value)


def _clock(seconds: float) -> str:
    minutes, second = divmod(max(0, round(seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"


def _drop_lines_after(path: Path, iteration: int) -> None:
    """Keep the lines up to ``iteration``; a line that a crash cut short goes too."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _iteration_of(line) <= iteration]
    if len(kept) == len(lines):
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _iteration_of(line: bytes) -> float:
    try:
        return json.loads(line)["iteration"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
