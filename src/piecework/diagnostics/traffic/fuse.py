"""Which launches of a region a compiler would join, and what each such group reads and writes.

The rule is the model's own, not a compiler's: elementwise operators, reductions and gathers that follow one another
are one group; products, attention and whatever torch does not call elementwise stand alone. A group reads what it is
given once and writes what leaves it once; what lives inside it alone is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piecework.seam.meter import Extent, Launch, distinct_bytes


@dataclass(frozen=True)
class Group:
    """Launches, by their places in the region, that become one kernel; with what enters and what leaves it."""

    members: tuple[int, ...]
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]

    @property
    def size_bytes(self) -> int:
        return distinct_bytes(self.reads) + sum(extent.size_bytes for extent in self.writes)


def join_launches(launches: Sequence[Launch], leaving: frozenset[int]) -> tuple[Group, ...]:
    """Group the launches of one region; `leaving` is the memory that is read after it."""
    sources = _sources(launches)
    numbers = _number(launches, sources)
    members: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        members.setdefault(number, []).append(index)
    return tuple(_group(tuple(own), launches, leaving) for own in members.values())


def _sources(launches: Sequence[Launch]) -> list[set[int]]:
    """Return for each launch those that wrote what it reads or writes over."""
    writer: dict[int, int] = {}
    sources: list[set[int]] = []
    for index, launch in enumerate(launches):
        touched = (*launch.reads, *launch.writes)
        sources.append({writer[extent.memory] for extent in touched if extent.memory in writer})
        writer.update({extent.memory: index for extent in launch.writes})
    return sources


def _number(launches: Sequence[Launch], sources: Sequence[set[int]]) -> list[int]:
    """Give launches of one group one number: neighbours with as many products before them.

    The count keeps groups in an order: without it one could need another's result and give it its own.
    """
    depth: list[int] = []
    for index in range(len(launches)):
        depth.append(max((depth[s] + (not launches[s].fuses) for s in sources[index]), default=0))
    number = list(range(len(launches)))

    def root(index: int) -> int:
        while number[index] != index:
            index = number[index]
        return index

    first: dict[tuple[int, int], int] = {}
    for index, launch in enumerate(launches):
        if not launch.fuses:
            continue
        near = [s for s in sources[index] if launches[s].fuses and depth[s] == depth[index]]
        # Two readers of one input are neighbours too: a compiler reads it once for both.
        shared = [first.setdefault((depth[index], extent.memory), index) for extent in launch.reads]
        for other in (*near, *shared):
            low, high = sorted((root(other), root(index)))
            number[high] = low
    return [root(index) for index in range(len(launches))]


def _group(members: tuple[int, ...], launches: Sequence[Launch], leaving: frozenset[int]) -> Group:
    inside = set(members)
    made: dict[int, Extent] = {}
    reads: dict[Extent, None] = {}
    for index in members:
        launch = launches[index]
        reads.update({extent: None for extent in launch.reads if extent.memory not in made})
        for extent in launch.writes:
            known = made.get(extent.memory)
            made[extent.memory] = extent if known is None or extent.size_bytes > known.size_bytes else known
    outside = {e.memory for index, launch in enumerate(launches) if index not in inside for e in launch.reads}
    writes = {memory: extent for memory, extent in made.items() if memory in outside | leaving}
    return Group(members, tuple(reads), tuple(writes.values()))


def join_calls(launches: Sequence[Launch], leaving: frozenset[int]) -> tuple[Group, ...]:
    """Group what one operator with a kernel of its own replaces; every other launch stands alone."""
    members: dict[tuple[int, int], list[int]] = {}
    for index, launch in enumerate(launches):
        members.setdefault((launch.call, 0 if launch.call else index), []).append(index)
    return tuple(_group(tuple(own), launches, leaving) for own in members.values())


def bytes_of_memory(groups: Sequence[Group], memory: frozenset[int]) -> int:
    """Add up what groups read of some memory, whatever the step; rows of a table that are gathered are left out."""
    return sum(distinct_bytes(e for e in group.reads if e.memory in memory and not e.is_rows) for group in groups)
