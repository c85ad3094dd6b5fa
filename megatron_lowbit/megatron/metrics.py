"""A writer for Megatron-LM's training log that keeps SAVE/metrics.jsonl.

Megatron-LM writes every scalar to an object with SummaryWriter's interface. This one is such an
object, and passes everything on to TensorBoard's where there is one.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries, parse_json

METRICS_FILE = "metrics.jsonl"

_NAMES = {
    "lm loss": "lm_loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "lm loss validation": "validation_loss",
    "throughput": "model_tflops_per_second",
}
"""Megatron-LM's names, and those in the file; other names stay but for their blanks."""
_REPEATED = " vs samples"


class MetricsWriter:
    """Writes one JSON object an iteration; beside it, whatever ``board`` does.

    Lines are written every ``log_interval`` iterations, so that no iteration waits for the GPU, and
    before a checkpoint is saved.

    Args:
        directory: gets metrics.jsonl.
        board: a SummaryWriter, or None.
        log_interval: iterations between writes.
        tokens: tokens of an iteration.
    """

    def __init__(self, directory: Path, board: Any, log_interval: int, tokens: int) -> None:
        self.path = directory / METRICS_FILE
        self._board, self._interval, self._tokens = board, log_interval, tokens
        self._rows: dict[int, dict[str, Any]] = {}
        # Bytes of the file before the line of an iteration that may still get more.
        self._final: int | None = None
        self._since: tuple[int, float] | None = None
        self._trained: tuple[int, float] | None = None

    @property
    def started(self) -> bool:
        """True once training has begun."""
        return self._since is not None

    def start(self, iteration: int) -> None:
        """Drop lines after the iteration that the run goes on from; a line cut short goes too."""
        _drop_lines_after(self.path, iteration)
        self._since = iteration, time.perf_counter()

    def add_scalar(self, name: str, value: Any, step: int, **settings: Any) -> None:
        """Take one number or one-element tensor of an iteration."""
        if self._board is not None:
            self._board.add_scalar(name, value, step, **settings)
        if name.endswith(_REPEATED):
            return
        if self._rows and step not in self._rows and max(self._rows) % self._interval == 0:
            self._write()
        if _NAMES.get(name) == "lm_loss":
            self._trained = step, time.perf_counter()
        # The first value stays: the loss of the test set comes last, under the validation's name.
        self._rows.setdefault(step, {}).setdefault(_NAMES.get(name, name.replace(" ", "_")), value)

    def add_text(
        self, tag: str, text: str, global_step: int | None = None, **settings: Any
    ) -> None:
        """Pass on; the first call comes when training begins, and names its iteration."""
        if self._since is None:
            self.start(global_step or 0)
        if self._board is not None:
            self._board.add_text(tag, text, global_step, **settings)

    def flush(self) -> None:
        """Write all iterations so far. What still comes for the last one is added to its line."""
        if self._rows:
            self._write(keep_last=True)
        if self._board is not None:
            self._board.flush()

    def _write(self, keep_last: bool = False) -> None:
        self._measure_speed()
        lines = []
        for step, row in sorted(self._rows.items()):
            if "lm_loss" in row:
                row["consumed_tokens"] = step * self._tokens
            numbers = self._rows[step] = {name: float(value) for name, value in row.items()}
            # JSON has no NaN and no infinity.
            finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
            lines.append(json.dumps({"iteration": step, **finite}).encode() + b"\n")
        self._rows = {step: numbers} if keep_last else {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # At no moment is there less than a checkpoint on disk relies on: the line of an iteration
        # that got more is overwritten, by a longer one and in one piece.
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            end = file.seek(0, os.SEEK_END) if self._final is None else file.seek(self._final)
            file.write(b"".join(lines))
        self._final = end + sum(map(len, lines[:-1])) if keep_last else None

    def close(self) -> None:
        """Write what is left."""
        if self._rows:
            self._write()
        if self._board is not None:
            self._board.close()

    def _measure_speed(self) -> None:
        """Add the mean tokens a second since the last write to its last training iteration."""
        if self._trained is None or self._trained == self._since:
            return
        (last, now), since = self._trained, self._since
        # The run's last evaluation and checkpoint come after its last iteration: they do not count.
        if since is not None and last > since[0] and last in self._rows:
            tokens = (last - since[0]) * self._tokens
            self._rows[last]["tokens_per_second"] = tokens / (now - since[1])
        self._since = self._trained

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to TensorBoard's writer; without one it does nothing."""
        return getattr(self._board, name) if self._board is not None else _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _drop_lines_after(path: Path, iteration: int) -> None:
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
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return Entries(parse_json(line, METRICS_FILE), METRICS_FILE).integer("iteration", least=0)
    except UserError:
        return math.inf
