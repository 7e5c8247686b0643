"""Bytes and seconds for people; torch-free."""

from __future__ import annotations


def bytes_text(size_bytes: float) -> str:
    """Write a number of bytes with three or four digits, in powers of a thousand as bandwidths are."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    raise AssertionError(size_bytes)


def time_text(seconds: float) -> str:
    """Write a time with its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
