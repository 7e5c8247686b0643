"""How the front serves: addresses, names, keys, and what it takes on before it says no."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.errors import OptionError

WEIGHTS, COMPILED, CAPTURED = "weights", "compiled", "captured"
START = "start"
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, whom it answers, and its limits.

    `max_requests` counts what runs or waits in the engine; one more is answered 429. `open_port` says when the port is
    bound: at the `start`, so that probes see the progress, or once the `weights` are in.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    open_port: str = START
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_requests: int = 1024
    max_choices: int = 64
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    health_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _LARGEST_PORT:
            raise OptionError(f"port `{self.port}` is no port", hint="give one from 1 to 65535, or 0 for a free one")
        if self.open_port not in (START, WEIGHTS):
            raise OptionError(
                f"`--open-port {self.open_port}` is unknown", hint=f"give `{START}` or `{WEIGHTS}`"
            )
        for name in ("max_body_bytes", "max_requests", "max_choices"):
            if getattr(self, name) < 1:
                raise OptionError(f"`{name}={getattr(self, name)}` serves nobody", hint="give a number from 1 up")
        for name in ("body_timeout_s", "write_timeout_s", "health_timeout_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"`{name}={getattr(self, name)}` is no time", hint="give seconds above 0")
        if not self.drain_timeout_s >= 0:
            raise OptionError(
                f"`drain_timeout_s={self.drain_timeout_s}` is no time", hint="give seconds; 0 ends requests at once"
            )
        if any(not key or not key.isascii() for key in self.api_keys):
            raise OptionError("an API key is empty or not ASCII", hint="leave the flag out to ask for none")
