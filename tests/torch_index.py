"""A package index in which torch is a package without content."""

import os
import zipfile
from pathlib import Path
from urllib.parse import quote

# Without other indexes and constraints of this machine.
WITHOUT_OTHERS = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}


def index_of_torch(folder: Path, version: str) -> str:
    """Make a package index with one version of torch, as far as pip reads it; return its URL."""
    info = f"torch-{version}.dist-info"
    wheel = folder / "torch" / f"torch-{version}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{quote(wheel.name)}">{wheel.name}</a>')
    return folder.as_uri()
