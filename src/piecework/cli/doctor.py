"""`piecework doctor`: what works here, what does not, what nobody has tried, and why."""

from __future__ import annotations

from piecework.cli.flags import (
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    CompileFlags,
    OutputFlags,
    StoreFlags,
)
from piecework.cli.output import print_json

_SIGNS = {"works": "ok", "fails": "NO", "untested": "??", "absent": "--"}


def doctor(*, store_flags: StoreFlags = STORE_DEFAULTS, output: OutputFlags = OUTPUT_DEFAULTS) -> int:
    """Say what works here, what does not, what is untested, and why; exit code 1 if something needed fails."""
    from piecework.cli.checkup import examine
    from piecework.cli.settings import gather
    from piecework.env import Environment

    settings = gather(CompileFlags(), store_flags, Environment.read())
    findings = examine(str(settings.store.store))
    failed = any(finding.state == "fails" for finding in findings)
    if output.json:
        print_json({"findings": [vars(finding) for finding in findings], "works": not failed})
        return int(failed)
    for finding in findings:
        print(f"{_SIGNS[finding.state]}  {finding.what}: {finding.found}")
        if finding.reason:
            print(f"      {finding.reason}")
    return int(failed)
