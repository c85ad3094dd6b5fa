"""Writer of SAVE/metrics.jsonl, by TensorBoard's interface, to which Megatron-LM writes scalars."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.folders import METRICS, replacing
from megatron_lowbit.json_files import Entries, parse_json

_NAMES = {
    "lm loss": "lm_loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "lm loss validation": "validation_loss",
    "throughput": "model_tflops_per_second",
}
"""Names in the file by Megatron-LM's; in other names, underscores replace blanks."""


class MetricsWriter:
    """Writer of one JSON object for each iteration; all calls are forwarded to TensorBoard.

    Lines are written every ``log_interval`` iterations, so that not every iteration waits for the
    GPU, and before a checkpoint is saved. ``board`` is TensorBoard's SummaryWriter or None,
    ``seq_length`` the number of a sample's tokens.
    """

    def __init__(self, directory: Path, board: Any, log_interval: int, seq_length: int) -> None:
        self.path = directory / METRICS
        self._board, self._interval, self._seq_length = board, log_interval, seq_length
        self._rows: dict[int, dict[str, Any]] = {}
        # Size of the file without the line of an iteration that may get more values.
        self._final: int | None = None
        self.started = False  # True once training has begun
        # Iteration, tokens of the run, and time: of the last write, and of the last iteration.
        self._since: tuple[int, int, float] | None = None
        self._trained: tuple[int, int, float] | None = None

    def add_scalar(self, name: str, value: Any, step: int, **settings: Any) -> None:
        """Add a number or one-element tensor of an iteration."""
        if self._board is not None:
            self._board.add_scalar(name, value, step, **settings)
        if name == "lm loss vs samples":
            self._count(step * self._seq_length)
        if name.endswith(" vs samples"):
            return
        if self._rows and step not in self._rows and max(self._rows) % self._interval == 0:
            self._write()
        # Keep the first value: the test loss comes last, under the name of the validation loss.
        self._rows.setdefault(step, {}).setdefault(_NAMES.get(name, name.replace(" ", "_")), value)

    def _count(self, tokens: int) -> None:
        """Add the run's tokens, whatever its batch sizes, to the iteration of the last loss."""
        iteration = max(self._rows)
        self._rows[iteration]["consumed_tokens"] = tokens
        self._trained = iteration, tokens, time.perf_counter()
        # In the first iteration kernels are compiled: measure from its end on.
        self._since = self._since or self._trained

    def add_text(
        self, tag: str, text: str, global_step: int | None = None, **settings: Any
    ) -> None:
        """Forward a text; the first call marks the beginning of training and its iteration."""
        if not self.started:
            # Remove incomplete lines, and those after the iteration from which the run resumes.
            _drop_lines_after(self.path, global_step or 0)
            self.started = True
        if self._board is not None:
            self._board.add_text(tag, text, global_step, **settings)

    def flush(self) -> None:
        """Write all iterations so far. Later values of the last iteration extend its line."""
        if self._rows:
            self._write(keep_last=True)
        if self._board is not None:
            self._board.flush()

    def _write(self, keep_last: bool = False) -> None:
        self._measure_speed()
        lines = []
        for step, row in sorted(self._rows.items()):
            numbers = self._rows[step] = {name: float(value) for name, value in row.items()}
            # JSON has neither NaN nor infinity.
            finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
            lines.append(json.dumps({"iteration": step, **finite}).encode() + b"\n")
        self._rows = {step: numbers} if keep_last else {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A checkpoint on disk relies on its line. A longer line overwrites it in one write, so that
        # the file is never without it.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(self.path, flags, 0o666), "r+b") as file:
            end = file.seek(0, os.SEEK_END) if self._final is None else file.seek(self._final)
            file.write(b"".join(lines))
        self._final = end + sum(map(len, lines[:-1])) if keep_last else None

    def close(self) -> None:
        """Write the remaining iterations."""
        if self._rows:
            self._write()
        if self._board is not None:
            self._board.close()

    def _measure_speed(self) -> None:
        """Add the mean tokens per second since the last write to the last training iteration.

        The run's first iteration does not count.
        """
        if self._trained is None or self._trained == self._since:
            return
        (last, tokens, now), since = self._trained, self._since
        # The final evaluation and checkpoint come after the last iteration and do not count.
        if since is not None and last > since[0] and last in self._rows:
            self._rows[last]["tokens_per_second"] = (tokens - since[1]) / (now - since[2])
        self._since = self._trained

    def __getattr__(self, name: str) -> Any:
        """Return the method of TensorBoard's writer; without one, a function that does nothing."""
        return getattr(self._board, name) if self._board is not None else lambda *_, **__: None


def _drop_lines_after(path: Path, iteration: int) -> None:
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    remaining = [line for line in lines if _iteration_of(line) <= iteration]
    if len(remaining) == len(lines):
        return
    with replacing(path) as file:
        file.write(b"".join(remaining))


def check_metrics(directory: Path) -> None:
    """Raise UserError if DIR/metrics.jsonl is a file of another program.

    A run would drop its lines, as if their iterations were trained again.
    """
    path = directory / METRICS
    if not path.is_file():
        return
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    require(
        not line.endswith(b"\n") or math.isfinite(_iteration_of(line)),
        f"{path}: line 1 has no iteration, so the file is of another program; move it",
    )


def _iteration_of(line: bytes) -> float:
    """Return the iteration of a line; infinity for an invalid or incomplete line."""
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return Entries(parse_json(line, METRICS), METRICS).integer("iteration", minimum=0)
    except UserError:
        return math.inf
