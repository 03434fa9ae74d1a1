"""What a doctor finds out about an installed host: one line per hook point that an adapter relies on.

Owns the shape of a finding and the look at one hook point. Owns no host: doctors register under ``weight_sync.doctors``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["ABSENT", "Check", "Doctor", "hook"]

ABSENT = "it is not installed"
"""``found`` of a host that is not there: no other hook point is worth a look then."""


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        what: the thing looked at.
        ok: whether it is as the adapter needs it.
        found: what was found, in words.
        do: what helps; "" where nothing has to be done.
    """

    what: str
    ok: bool
    found: str = ""
    do: str = ""


Doctor = Callable[[], Iterator[Check]]
"""What is registered: looks at the host installed here, without changing it. Never raises over what it finds."""


def hook(module: str, path: str = "", parameters: tuple[str, ...] = (), do: str = "use a supported version") -> Check:
    """Whether ``module`` imports, has ``path`` (names joined by dots), and it takes ``parameters`` by name."""
    what = f"{module}.{path}" if path else module
    try:
        found: object = importlib.import_module(module)
    except Exception as error:  # whatever a host raises when it is imported where it cannot run
        needs = error.name if isinstance(error, ModuleNotFoundError) else None
        if needs and needs.partition(".")[0] != module.partition(".")[0]:
            do = f"install {needs.partition('.')[0]}, which the host needs; without a GPU, run the doctor as the example runs it"
        return Check(what, False, f"cannot be imported: {type(error).__name__}: {error}", do)
    for name in path.split(".") if path else ():
        if not hasattr(found, name):
            return Check(what, False, f"there is no {name}", do)
        found = getattr(found, name)
    if parameters and callable(found):
        taken = inspect.signature(found).parameters
        lacking = [name for name in parameters if name not in taken]
        if lacking:
            return Check(what, False, f"it does not take {', '.join(lacking)}", do)
    return Check(what, True)
