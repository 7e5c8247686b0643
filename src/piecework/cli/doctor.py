"""`piecework doctor`: what works here, what does not, what nobody has tried, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecework.cli.flags import (
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    CompileFlags,
    OutputFlags,
    StoreFlags,
)
from piecework.cli.output import print_json

if TYPE_CHECKING:
    from piecework.diagnostics.findings import Finding


def doctor(*, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS) -> int:
    """Say what works here, what does not, what is untested, and why; exit code 1 if something needed fails."""
    from piecework.cli.checkup import examine
    from piecework.cli.settings import gather
    from piecework.env import Environment

    settings = gather(CompileFlags(), store_flags, Environment.read())
    return tell(examine(str(settings.store.store)), output)


def tell(findings: list[Finding], output: OutputFlags) -> int:
    """Print findings; return 1 where one of them fails."""
    from piecework.diagnostics.findings import FAILS, finding_lines

    failed = any(finding.state == FAILS for finding in findings)
    if output.json:
        print_json({"findings": [vars(finding) for finding in findings], "works": not failed})
    else:
        print("\n".join(finding_lines(findings)))
    return int(failed)
