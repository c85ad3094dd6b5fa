"""Folders on disk: file names, checksums, replacement, locks, safe unpickling, resumable output."""
