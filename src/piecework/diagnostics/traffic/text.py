"""Traffic for people: each operator with its bytes, each site three ways, the step beside weights, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from piecework.diagnostics.amounts import bytes_text, time_text
from piecework.diagnostics.traffic.model import LABEL, SiteTraffic, Traffic

if TYPE_CHECKING:
    from piecework.diagnostics.traffic.measured import Measured

_LONGEST_NAME = 70


def traffic_lines(
    traffic: Traffic, *, title: str, beside: Traffic | None = None, bandwidth: float = 0.0, with_operators: bool = True
) -> list[str]:
    """Lay out what was counted; weights, keys and values are those of `beside` where it is given."""
    sizes = ", ".join(f"{name} {value}" for name, value in traffic.sizes.items())
    lines = [f"{title}: {sizes}", LABEL, ""]
    for one in traffic.sites:
        lines += [*_site_lines(one, with_operators), ""]
    lines += _step_lines(traffic, beside, bandwidth)
    if traffic.unknown:
        lines.append(f"{traffic.unknown} operators have sizes that depend on data; they are counted as nothing")
    return lines


def _site_lines(one: SiteTraffic, with_operators: bool) -> Iterator[str]:
    yield f"{one.name}, {one.sites} site{'s' * (one.sites != 1)}"
    if with_operators:
        within = any(each.within.rpartition("::")[2] not in ("", one.name) for each in one.operators)
        rows = [
            [
                each.operator,
                f"{each.dtype}{list(each.shape)}",
                f"{each.read_bytes:,}",
                f"{each.written_bytes:,}",
                f"{each.size_bytes:,}",
                str(each.group),
                *([each.within] if within else []),
            ]
            for each in one.operators
        ]
        head = ["operator", "result", "reads", "writes", "bytes", "kernel", *(["part of"] if within else [])]
        yield from _table(head, rows)
    count = len(one.operators)
    yield f"  {count} operator{'s' * (count != 1)} that materialise: {one.columns.eager_bytes:,} bytes"
    yield f"  eager with fused operators: {one.columns.operator_bytes:,} bytes"
    yield f"  fused into {len(one.groups)} kernel{'s' * (len(one.groups) != 1)}: {one.columns.fused_bytes:,} bytes"
    yield f"  ratio {one.columns.ratio:.1f}, difference {one.columns.difference_bytes:,} bytes a site"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        cells = [
            cell.rjust(width) if 2 <= column <= 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _step_lines(traffic: Traffic, beside: Traffic | None, bandwidth: float) -> Iterator[str]:
    step, base = traffic.step, beside or traffic
    yield "in a step"
    rows = [
        ("operator by operator", step.eager_bytes),
        ("eager with fused operators", step.operator_bytes),
        ("fused", step.fused_bytes),
        ("operator by operator less fused", step.difference_bytes),
        ("weights read", base.weight_bytes),
        ("keys and values read", base.kv_read_bytes),
        ("keys and values written", base.kv_written_bytes),
    ]
    for name, size_bytes in rows:
        if size_bytes:
            spent = f"  {time_text(size_bytes / bandwidth):>10}" if bandwidth else ""
            yield f"  {name:<32}{size_bytes:>20,} bytes  {bytes_text(size_bytes):>10}{spent}"
    yield f"  ratio {step.ratio:.1f}"
    if beside is not None and beside.weight_bytes:
        share = step.difference_bytes / beside.weight_bytes
        yield f"  the difference is {share:.1%} of the weights that the model reads"
    if bandwidth:
        floor = time_text(base.floor_bytes / bandwidth)
        yield f"  at {bytes_text(bandwidth)}/s; weights, keys and values alone take {floor}"


def measured_lines(measured: Measured) -> list[str]:
    """Lay out what a profiler saw of one call."""
    rows = [[kernel.name, f"{kernel.launches:g}", time_text(kernel.seconds)] for kernel in measured.kernels]
    width = max((len(row[0][:_LONGEST_NAME]) for row in rows), default=0)
    lines = [f"  {name[:_LONGEST_NAME]:<{width}}  {launches:>4}  {spent:>10}" for name, launches, spent in rows]
    total = f"{measured.launches:g} launches, {time_text(measured.seconds)} on the device"
    return ["", "measured: kernels of one call, run eagerly, launches, time on the device", *lines, f"  {total}"]
