"""The machine, versions and commit that measured figures belong to."""

import platform
import shutil
import subprocess
from datetime import date
from pathlib import Path

import torch


def machine(**more: str | int) -> dict[str, str | int]:
    """Describe hardware, versions, date and commit; ``more`` goes before the last two."""
    names = (
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "cpu": next(names, platform.processor()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **more,
        "date": date.today().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str:
    """Return the checkout's commit; nothing for an installed package, or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()
