"""Low-level helpers for checkpoint folders: file names, checksums, locks, safe unpickling."""
