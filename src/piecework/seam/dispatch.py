"""Watch the operators that run: every call to the dispatcher goes through a function of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

Around = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Watching(TorchDispatchMode):
    """Hand each operator call to `around(name, operator, args, kwargs)`, which makes the call or does not.

    While `around` runs, what it calls is seen by the modes outside this one alone.
    """

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(str(func.name()), func, args, kwargs or {})
