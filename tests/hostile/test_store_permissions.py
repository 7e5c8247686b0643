"""Permissions of a store's files and folders, changed at random: refused where others can write, served otherwise."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from hostile.damage import find_victims, open_store, read_everything, write_all
from piecework.errors import UntrustedArtifact


@pytest.mark.parametrize("count", [pytest.param(50, id="tenth"), pytest.param(500, id="full", marks=pytest.mark.soak)])
def test_permissions_that_let_others_write_are_refused_and_all_others_serve(
    tmp_path: Path, count: int
) -> None:
    root = tmp_path / "a" / "store"
    write_all(open_store(root))
    places = [*find_victims(root)]
    places += sorted({folder for path in places for folder in path.parents if folder.is_relative_to(root)})
    refused: Counter[str] = Counter()
    for number in range(count):
        chance = random.Random(f"permissions {number}")
        changed = {place: place.stat().st_mode for place in chance.sample(places, chance.choice([1, 1, 3]))}
        own = 0o700 if os.geteuid() else chance.choice([0o700, 0o600, 0o400, 0])
        for place in changed:
            place.chmod(own | chance.randrange(0o100) | chance.choice([0, 0, 0o4000, 0o2000]))
        open_to_others = [place for place in changed if place.stat().st_mode & 0o022]
        if open_to_others:
            with pytest.raises(UntrustedArtifact) as error:
                read_everything(open_store(root))
            assert any(str(place) in error.value.message for place in open_to_others)
            refused["refused"] += 1
        else:
            assert read_everything(open_store(root)) == (26, 0)
            refused["served"] += 1
        for place, mode in changed.items():
            place.chmod(mode)
        assert read_everything(open_store(root)) == (26, 0)
    assert refused["refused"] and refused["served"]
