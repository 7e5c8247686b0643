"""Which of how many ranks a process is, and what a group of them is called: torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.errors import OptionError


@dataclass(frozen=True)
class Placement:
    """One rank of `ranks`. It decides which slices of the weights are read, and nothing of what is compiled."""

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise OptionError(
                f"rank `{self.rank}` of `{self.ranks}` does not exist", hint="ranks count from 0 up to their number"
            )


ALONE = Placement()


def group_name(ranks: int) -> str:
    """Return the name under which a graph's collectives find their process group: the same text on every rank."""
    return f"tensor_parallel_{ranks}"


def ranks_of(group: str) -> int:
    """Return the number of ranks in a group of that name; 0 where the name is no group of ranks that share a model."""
    head, _, ranks = group.rpartition("_")
    return int(ranks) if ranks.isdecimal() and group_name(int(ranks)) == f"{head}_{ranks}" else 0
