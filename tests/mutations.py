"""Files that an attacker or a disk has changed at random."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def mutated(content: bytes, random: np.random.Generator, header: int) -> bytes:
    """Content that is cut short, has a piece left out or inserted, or has some bytes changed, often in the first
    `header`."""
    spoilt, how = bytearray(content), random.integers(6)
    place, other = (int(each) for each in random.integers(0, len(spoilt), 2))
    if how == 0:
        return bytes(spoilt[:place])
    if how == 1:
        del spoilt[place : place + int(random.integers(1, 20))]
    elif how == 2:
        spoilt[place:place] = spoilt[other : other + 20]
    else:
        for each in random.integers(0, len(spoilt) if how < 5 else min(len(spoilt), header), random.integers(1, 4)):
            spoilt[each] = random.integers(256)
    return bytes(spoilt)


@dataclass(frozen=True)
class Damage:
    """The damage to a copy of a folder."""

    victim: Path
    other: Path
    is_moved: bool
    """Whether the victim was deleted or exchanged with the other file, rather than changed inside."""


def damaged(whole: Path, folder: Path, victim: str, names: Sequence[str], random: np.random.Generator) -> Damage:
    """Make `folder` a copy of `whole` of which one file is deleted, swapped with another of `names`, or mutated."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    spoilt, other = folder / victim, folder / names[random.integers(len(names))]
    before, how = spoilt.read_bytes(), random.integers(20)
    if how == 0:
        spoilt.unlink()
    elif how == 1:
        spoilt.write_bytes(other.read_bytes())
        other.write_bytes(before)
    else:
        spoilt.write_bytes(mutated(before, random, header=130))
    return Damage(spoilt, other, is_moved=bool(how < 2))
