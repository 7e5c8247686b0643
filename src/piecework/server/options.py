"""How the front serves: addresses, names, keys, and what it takes on before it says no."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.choices import by_name, many, seconds, text, texts, whole
from piecework.errors import OptionError

WEIGHTS, COMPILED, CAPTURED = "weights", "compiled", "captured"
START = "start"
_LARGEST_PORT = 65535


@by_name
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
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= _LARGEST_PORT:
            raise OptionError(f"port `{self.port}` is no port", hint="give one from 1 to 65535, or 0 for a free one")
        if self.open_port not in (START, WEIGHTS):
            raise OptionError(
                f"`--open-port {self.open_port}` is unknown", hint=f"give `{START}` or `{WEIGHTS}`"
            )
        for name in ("max_body_bytes", "max_requests", "max_choices"):
            whole(name, getattr(self, name), 1)
        for name in ("body_timeout_s", "write_timeout_s", "health_timeout_s"):
            seconds(name, getattr(self, name), "give seconds above 0", above=0)
        seconds("drain_timeout_s", self.drain_timeout_s, "give seconds; 0 ends requests at once")
        if not text("host", self.host, "an address"):
            raise OptionError("`host` is empty", hint="give an address: `127.0.0.1`, or `0.0.0.0` for all")
        object.__setattr__(self, "served_model_names", texts("served_model_names", self.served_model_names, "my-model"))
        keys = many(self.api_keys)
        if keys is None or not all(isinstance(key, str) and key and key.isascii() for key in keys):
            raise OptionError("an API key is empty or not ASCII", hint="leave the flag out to ask for none")
        object.__setattr__(self, "api_keys", keys)
