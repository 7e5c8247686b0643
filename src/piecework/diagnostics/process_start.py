"""When this process began, as the system counts it."""

from __future__ import annotations

import os
import time


def seconds_since_start() -> float:
    """Return how long this process has been running, to a hundredth of a second; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def process_start_ns() -> int:
    """Return when this process began, on the clock of events."""
    return time.perf_counter_ns() - int(seconds_since_start() * 1e9)
