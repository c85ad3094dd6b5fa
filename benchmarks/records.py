"""Records of measurements: machine, versions, command, and a line of JSON for each row."""

import argparse
import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_lowbit.analysis.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("triton", "transformer-engine", "torchao", "megatron-core")


def description(**more: str | int) -> dict[str, str | int]:
    """Return the machine, the versions of everything that takes part, commit and command."""
    versions = {package.replace("-", "_"): _version(package) for package in _PACKAGES}
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]
    return machine(
        driver=_driver(), **versions, cublaslt=cublaslt(),
        command=shlex.join([*launcher, "-m", "benchmarks", *sys.argv[1:]]), **more,
    )  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return answer.partition("\n")[0] or "unknown"


def cublaslt() -> str:
    """Return the version of the loaded library, such as 12.8.4; LD_PRELOAD may have named it.

    Transformer Engine chooses kernels by the version that it sees: once imported, it is asked.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "none"
    if engine := sys.modules.get("transformer_engine_torch"):
        number = engine.get_cublasLt_version()
    else:
        try:
            library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
        except OSError:
            return "unknown"
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = library.cublasLtGetVersion()
    major, rest = divmod(number, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def write(file: Path, head: Mapping[str, Any], **tables: Iterable[Mapping]) -> None:
    """Write a record: the machine, what ``head`` has, and each table with a line for each row.

    ``head`` may have a ``machine`` with more than ``description()``.
    """
    head = dict(head) if "machine" in head else {"machine": description(), **head}
    parts = [json.dumps(head, indent=1)[:-2]]
    for key, rows in tables.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        parts.append(f' "{key}": [\n{lines}\n ]')
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(",\n".join(parts) + "\n}\n")
    partial.replace(file)


def read(file: Path, key: str = "rows") -> list[dict[str, Any]]:
    """Return the rows of a record, none where it does not exist."""
    return json.loads(file.read_text()).get(key, []) if file.is_file() else []


def current(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return records of the installed Megatron-LM, ordered by file; plans describe no other."""
    found = [json.loads(file.read_text()) for file in sorted(files)]
    return [x for x in found if x["machine"]["megatron_core"] == version("megatron-core")]


def parser(description: str | None, **defaults: Path) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring, with an option for each path."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, path in defaults.items():
        made.add_argument(f"--{name}", type=Path, default=path, help="default: %(default)s")
    return made


def gpu_slug() -> str:
    """Return the GPU's name for files, or ``cpu``."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return name.lower().removeprefix("nvidia ").replace(" ", "-")


def add_output(parser: argparse.ArgumentParser, benchmark: str) -> None:
    """Add the ``--output`` argument: by default a file named after the benchmark and the GPU."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json",
        default=RESULTS / f"{benchmark}-{gpu_slug()}.json", help="default: %(default)s",
    )  # fmt: skip


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; None is an empty cell."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        digits = 0 if value >= 100 or value == 0 else 2 if value >= 0.01 else 4
        return f"{value:.{digits}f}"
    return str(value)


def short(*differences: float) -> str:
    """Return relative differences as pages show them, such as 1e-4 / 0."""
    return " / ".join("0" if x == 0 else f"{x:.0e}".replace("e-0", "e-") for x in differences)


def value_at(row: Mapping, path: str) -> Any:
    """Return the value at a dotted path of keys, the row itself for an empty one; None if absent.

    A time with its spread is a mapping: it is returned as one.
    """
    value: Any = row
    for key in filter(None, path.split(".")):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
