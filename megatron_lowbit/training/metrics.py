"""One logger for the console, TensorBoard and SAVE/metrics.jsonl."""

import json
import math
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

METRICS_FILE = "metrics.jsonl"

_CONSOLE_FORMATS = {
    "lm_loss": "loss {:.4f}",
    "grad_norm": "grad norm {:.3f}",
    "learning_rate": "lr {:.3e}",
    "tokens_per_second": "{:,.0f} tokens/s",
}


class MetricLogger:
    """Log numbers by iteration; a context manager, so that the files and the live line end.

    ``save_dir`` gets metrics.jsonl, one object a logged iteration; on a resume at
    ``start_iteration`` the lines of later iterations are dropped first. With ``enabled`` False
    (all ranks but one) every method does nothing.
    """

    def __init__(
        self,
        save_dir: Path | None,
        tensorboard_dir: Path | None,
        total_iterations: int,
        start_iteration: int,
        enabled: bool,
    ) -> None:
        self._enabled = enabled
        self._total = total_iterations
        self._start = start_iteration
        self._start_time = time.monotonic()
        self._file = self._writer = self._live = None
        if not enabled:
            return
        if save_dir is not None:
            path = Path(save_dir) / METRICS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_lines_after(path, start_iteration)
            self._file = path.open("a", encoding="utf-8")
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

        The console shows lm_loss, grad_norm, learning_rate and tokens_per_second.
        """
        if not self._enabled:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        self._write(iteration, numbers)
        line = self._console_line(iteration, numbers)
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def log_validation(self, iteration: int, validation_loss: float) -> None:
        """Log the validation loss at an iteration."""
        if not self._enabled:
            return
        loss = _number(validation_loss)
        self._write(iteration, {"validation_loss": loss})
        self.message(f"iteration {iteration}/{self._total} | validation loss {loss:.4f}")

    def message(self, text: str) -> None:
        """Print a line, above the live one if there is one."""
        if not self._enabled:
            return
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """End the live line and close the files; more than once does no harm."""
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = self._live = None
        self._enabled = False

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, iteration: int, numbers: dict[str, int | float]) -> None:
        if self._file is not None:
            # JSON has no NaN and no infinity.
            finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
            self._file.write(json.dumps({"iteration": iteration, **finite}) + "\n")
            self._file.flush()
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, iteration)

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
