"""The digest by which PREFIX.json knows its PREFIX.bin."""

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
