"""The bytes of a step three ways: operator by operator, with fused operators, and fused as pieces.

It is a model that explains, not a measurement: logical bytes, each result in memory, no cache, no padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from piecework.diagnostics.traffic.fuse import Group, bytes_of_memory, join_calls, join_launches
from piecework.diagnostics.traffic.launches import ReferenceOf, RegionLaunches, Walk, walk
from piecework.seam.meter import Launch
from piecework.values.record import Record

LABEL = "logical bytes of the traced graph: an explanatory model, not measured traffic"


@dataclass(frozen=True)
class OperatorTraffic:
    """One operator whose result lies in memory; `group` is the kernel that a compiler would put it into."""

    operator: str
    dtype: str
    shape: tuple[int, ...]
    read_bytes: int
    written_bytes: int
    group: int
    within: str = ""
    is_known: bool = True

    @property
    def size_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Columns:
    """Bytes three ways: every operator by itself, operators with kernels of their own, and as few kernels as can be."""

    eager_bytes: int = 0
    operator_bytes: int = 0
    fused_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times more eager moves than the fused form."""
        return self.eager_bytes / self.fused_bytes if self.fused_bytes else 1.0

    @property
    def difference_bytes(self) -> int:
        return self.eager_bytes - self.fused_bytes

    def times(self, count: int) -> Columns:
        return Columns(self.eager_bytes * count, self.operator_bytes * count, self.fused_bytes * count)

    def __add__(self, other: Columns) -> Columns:
        return Columns(
            self.eager_bytes + other.eager_bytes,
            self.operator_bytes + other.operator_bytes,
            self.fused_bytes + other.fused_bytes,
        )


@dataclass(frozen=True)
class SiteTraffic:
    """Regions that launch the same: the sites of one piece, or opaque calls; what one of them moves."""

    name: str
    sites: int
    operators: tuple[OperatorTraffic, ...]
    groups: tuple[int, ...]
    columns: Columns
    weight_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What a step moves: per operator and site, in all, and of it weights; keys and values are counted apart."""

    sizes: Mapping[str, int]
    sites: tuple[SiteTraffic, ...]
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0

    @property
    def step(self) -> Columns:
        """The whole step, keys and values of the cache apart."""
        return sum((one.columns.times(one.sites) for one in self.sites), Columns())

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that any step reads; the rows that it gathers of a table are no part of them."""
        return sum(one.weight_bytes * one.sites for one in self.sites)

    @property
    def floor_bytes(self) -> int:
        """What no fusion saves: weights, and keys and values."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def unknown(self) -> int:
        """The number of operators in a step whose sizes depend on data; they count no bytes."""
        return sum(one.sites * sum(not each.is_known for each in one.operators) for one in self.sites)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        step = self.step
        return {
            "label": LABEL,
            "sizes": dict(self.sizes),
            "sites": [_as_dict(one) for one in self.sites],
            "step": {**asdict(step), "ratio": step.ratio, "difference_bytes": step.difference_bytes},
            "weight_bytes": self.weight_bytes,
            "kv_read_bytes": self.kv_read_bytes,
            "kv_written_bytes": self.kv_written_bytes,
            "unknown": self.unknown,
        }


def _as_dict(one: SiteTraffic) -> dict[str, Any]:
    return {
        **asdict(one),
        "operators": [{**asdict(each), "size_bytes": each.size_bytes} for each in one.operators],
        "columns": {**asdict(one.columns), "ratio": one.columns.ratio},
    }


def count_traffic(
    record: Record,
    pieces: Sequence[str],
    sizes: Mapping[str, int],
    reference_of: ReferenceOf = lambda name: None,
    *,
    as_one: str = "",
) -> tuple[SiteTraffic, ...]:
    """Count the bytes of each region of a record at given sizes; regions that launch the same are counted together.

    `as_one` names the operator that a whole region is, where the graph does not say so.
    """
    walked = walk(record, pieces, sizes, reference_of)
    found: dict[tuple[Any, ...], SiteTraffic] = {}
    later: list[frozenset[int]] = []
    read = walked.results
    for region in reversed(walked.regions):
        later.append(read)
        read = read | {extent.memory for launch in region.launches for extent in launch.reads}
    for region, leaving in zip(walked.regions, reversed(later), strict=True):
        one = _count(region, leaving, walked, as_one)
        alike = (one.name, one.operators, one.columns)
        known = found.get(alike)
        found[alike] = SiteTraffic(**{**vars(one), "sites": known.sites + 1}) if known else one
    return tuple(one for one in found.values() if one.operators)


def _count(region: RegionLaunches, leaving: frozenset[int], walked: Walk, as_one: str) -> SiteTraffic:
    launches = [replace(each, within=as_one, call=1) if as_one else each for each in region.launches]
    groups = join_launches(launches, leaving)
    number = {member: index for index, group in enumerate(groups) for member in group.members}
    columns = Columns(
        sum(launch.size_bytes for launch in launches),
        _total(join_calls(launches, leaving)),
        _total(groups),
    )
    operators = tuple(_row(launch, number[index]) for index, launch in enumerate(launches))
    name = f"piece {region.piece}" if region.piece >= 0 else " + ".join(each.operator for each in operators)
    sizes = tuple(group.size_bytes for group in groups)
    return SiteTraffic(name, 1, operators, sizes, columns, bytes_of_memory(groups, walked.weights))


def _row(launch: Launch, group: int) -> OperatorTraffic:
    return OperatorTraffic(
        launch.operator, launch.dtype, launch.shape, launch.read_bytes, launch.written_bytes, group,
        launch.within, launch.is_known,
    )  # fmt: skip


def _total(groups: Sequence[Group]) -> int:
    return sum(group.size_bytes for group in groups)
