"""What the command line says of capture: its flags, and what is captured by default."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecework.cli.flags import CaptureFlags
    from piecework.options import CompileOptions


def check_capture(flags: CaptureFlags, device: str, options: CompileOptions) -> None:
    """Refuse flags of capture that `generate` cannot honour, with the reason; to ask for none is fine everywhere."""
    given: dict[str, Any] = {name: value for name, value in asdict(flags).items() if value is not None}
    if not given:
        return
    from piecework.capture_options import from_familiar
    from piecework.cli.config import parse_numbers
    from piecework.errors import OptionError

    if "cudagraph_capture_sizes" in given:
        sizes = parse_numbers(given["cudagraph_capture_sizes"], "--cudagraph-capture-sizes")
        given["cudagraph_capture_sizes"] = tuple(sizes)
    plan = from_familiar(given).resolve(
        device.partition(":")[0], str(options.mode), options.max_num_batched_tokens, options.capture_rule
    )
    if plan.phases:
        raise OptionError(
            f"`generate` runs every step as it is, so {plan.phases[0].phase} cannot be captured "
            f"`{plan.phases[0].capture}`",
            hint="leave the flag out, or replay graphs from Python: pw.capture(program)",
        )


def capture_lines(device: str, options: CompileOptions) -> list[str]:
    """Return what is captured by default on a device, and which token counts are served by nothing."""
    from piecework.capture_options import CaptureOptions
    from piecework.values.coverage import summarize

    largest = options.max_num_batched_tokens
    plan = CaptureOptions().resolve(device.partition(":")[0], str(options.mode), largest, options.capture_rule)
    return summarize(plan, largest)
