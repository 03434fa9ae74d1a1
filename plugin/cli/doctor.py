"""``weight-sync doctor``: whether the host installed here has what its adapter hooks into.

Owns the command. Owns no host: doctors are found by name, since the core imports no adapter.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from weight_sync.cli.failure import FAILED
from weight_sync.cli.options import Common

__all__ = ["doctor"]


def doctor(
    common: Common,
    host: Annotated[str, typer.Argument(metavar="HOST", help="verl, slime, vllm, ...: the host installed here.")],
) -> None:
    """Checks the installed host's version and every hook point that the adapter relies on, a line each.

    Run it in the environment of the host. Exit code 1 when something is off.

        weight-sync doctor verl
        weight-sync doctor vllm --json
    """
    from weight_sync.checkup import ABSENT, Check
    from weight_sync.registry import find

    checks: list[Check] = []
    for check in find("doctors", host)():
        checks.append(check)
        if check.found == ABSENT:
            break
    rows: list[dict[str, Any]] = [vars(check) for check in checks]

    def show() -> None:
        for check in checks:
            common.out.text(_line(check))

    common.out.result({"host": host, "checks": rows}, show)
    off = sum(not check.ok for check in checks)
    if off:
        common.out.note(f"{off} of {len(checks)} are off")
        raise typer.Exit(FAILED)


def _line(check: Any) -> str:
    text = f"{'ok ' if check.ok else 'OFF'}  {check.what}"
    if check.found:
        text += f": {check.found}"
    return text + (f"; {check.do}" if check.do and not check.ok else "")
