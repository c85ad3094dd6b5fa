"""Digests of data: of PREFIX.bin in its sidecar, and of whole data sets in checkpoints."""

import hashlib
import struct
from pathlib import Path

_PARTS, _PART_BYTES = 64, 1 << 20


def data_digest(path: Path) -> str:
    """Return the SHA-256 of a file's length and of 64 evenly spaced MiB of it.

    A file of up to 64 MiB is covered whole; a larger one takes no longer.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(struct.pack("<q", size))
    step = max(_PART_BYTES, size // _PARTS)
    with path.open("rb") as stream:
        for offset in range(0, size, step):
            stream.seek(offset)
            digest.update(stream.read(_PART_BYTES))
    return digest.hexdigest()


def dataset_digest(prefix: str) -> str | None:
    """Return a SHA-256 of PREFIX.bin and PREFIX.idx, or of a file PREFIX; None if one is missing.

    Of each file it covers what :func:`data_digest` does.
    """
    whole = Path(prefix)
    paths = [whole] if whole.is_file() else [Path(f"{prefix}{end}") for end in (".bin", ".idx")]
    if not all(path.is_file() for path in paths):
        return None
    return hashlib.sha256("".join(map(data_digest, paths)).encode()).hexdigest()
