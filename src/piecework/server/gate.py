"""Who is let in: the server takes so many requests at once, and says no, with a time to come back, to the next."""

from __future__ import annotations

from collections.abc import Callable

from piecework.server.faults import Refusal
from piecework.server.readiness import DRAINING, FAILED, Readiness

_LONGEST_WAIT_S = 60


class Gate:
    """Counts the answers under way, and refuses those above the limit or outside of the time of serving.

    It is used from the event loop alone. `mean_s` is how long a request took of late: what a refused one is told to
    wait for.
    """

    def __init__(self, limit: int, readiness: Readiness, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._readiness = readiness
        self._clock = clock
        self.num_inside = 0
        self.mean_s = 1.0

    def check_ready(self) -> None:
        """Raise Refusal where no model serves now."""
        readiness = self._readiness
        if readiness.is_ready:
            return
        told = readiness.as_dict()["detail"]
        hints = {
            DRAINING: "the server is going down: another one, or this one after its restart, will answer",
            FAILED: "the server's log has the reason",
        }
        raise Refusal(
            503,
            f"the model is not served now: {told}",
            hint=hints.get(readiness.phase, "`/readyz` says how far the start is"),
            code=readiness.phase,
            retry_after_s=readiness.retry_after_s,
        )

    def admit(self, num_answers: int) -> Place:
        """Let in a request for so many answers until it leaves its place, or raise Refusal."""
        self.check_ready()
        if num_answers > self._limit:
            raise Refusal(
                400,
                f"`{num_answers}` answers were asked for at once, and this server computes {self._limit}",
                hint="send fewer prompts, or a smaller `n`",
                code="too_many_answers",
            )
        if self.num_inside + num_answers > self._limit:
            raise Refusal(
                429,
                f"{self.num_inside} answers are under way, and this server takes {self._limit}",
                hint="wait as long as `Retry-After` says; the server's `--max-requests` is the limit",
                code="queue_full",
                retry_after_s=max(1, min(_LONGEST_WAIT_S, round(self.mean_s))),
            )
        self.num_inside += num_answers
        return Place(self, num_answers, self._clock())

    def leave(self, place: Place) -> None:
        """Give a place to the next."""
        self.num_inside -= place.num_answers
        self.mean_s += 0.1 * (self._clock() - place.began - self.mean_s)


class Place:
    """What an admitted request holds until its answer is out, or nobody waits for it any more."""

    def __init__(self, gate: Gate, num_answers: int, began: float) -> None:
        self._gate = gate
        self.num_answers = num_answers
        self.began = began
        self._is_held = True

    def leave(self) -> None:
        """Leave; once is enough."""
        if self._is_held:
            self._is_held = False
            self._gate.leave(self)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()
