"""The machine, versions and commit that measured figures belong to."""

import platform
import subprocess
from datetime import date
from pathlib import Path

import torch


def machine(**more: str | int) -> dict[str, str | int]:
    """Hardware, versions, date and commit; ``more`` goes before the last two."""
    names = (
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "cpu": next(names, platform.processor()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **more,
        "date": date.today().isoformat(),
        "commit": commit,
    }
