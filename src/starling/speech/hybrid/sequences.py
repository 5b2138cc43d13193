"""Which sub-sequences form which mini-batch of an epoch: a pure function, so that every process agrees."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from starling.chance import derive_seed
from starling.errors import DataError
from starling.speech.hybrid.config import SequencesConfig

Pieces = NDArray[np.int64]
"""Sub-sequences `[n, 3]`: utterance, first frame, the frame after the last."""
_EPOCHS_KEPT = 3


class SequencePlanner:
    """Cuts utterances of `lengths` `[U]` frames into sub-sequences, and deals these at random to mini-batches.

    Each frame is in exactly one sub-sequence of an epoch. If an utterance's length is not a multiple of a
    sub-sequence's, its first sub-sequence, its last, or both are shorter; by how much is drawn for each epoch. A
    mini-batch has at most `batch * accumulate` sub-sequences, and those of an epoch differ by at most one. The order of
    an epoch is kept in memory, 8 bytes for each sub-sequence. Raises DataError for a set without frames.
    """

    def __init__(self, lengths: NDArray[np.int64], config: SequencesConfig, accumulate: int, seed: int) -> None:
        self.lengths = lengths
        self.config = config
        self._accumulate = accumulate
        self._seed = seed
        counts = -(-lengths // config.frames)
        self._ends = np.cumsum(counts)
        if not len(lengths) or not self._ends[-1]:
            raise DataError("there are no frames to train on; check the training set")
        self.num_sequences = int(self._ends[-1])
        """In an epoch."""
        self.num_batches = -(-self.num_sequences // (config.batch * accumulate))
        """In an epoch."""
        self._spare = counts * config.frames - lengths
        self._epochs: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = OrderedDict()

    def batch(self, epoch: int, index: int) -> list[Pieces]:
        """The micro-batches of a mini-batch."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"mini-batch {index} of epoch {epoch}, which has {self.num_batches}")
        order, offsets = self._epoch(epoch)
        first, end = (each * self.num_sequences // self.num_batches for each in (index, index + 1))
        return self._split(self._pieces(order[first:end], offsets))

    def draw(self, part: int, step: int, parts: NDArray[np.int32]) -> list[Pieces]:
        """A mini-batch of sub-sequences drawn from the utterances of a part; `parts` `[U]` gives the part of each."""
        generator = np.random.default_rng(derive_seed(self._seed, "draw", part, step))
        own = np.flatnonzero(parts == part)
        counts = np.diff(self._ends, prepend=0)[own]
        numbers = np.repeat(self._ends[own] - counts, counts) + _ranges(counts)
        size = self.config.batch * self._accumulate
        chosen = generator.choice(numbers, size, replace=len(numbers) < size)
        return self._split(self._pieces(chosen, generator.integers(self._spare + 1)))

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the sub-sequences, and by how many frames each utterance's first one is shortened."""
        if epoch not in self._epochs:
            generator = np.random.default_rng(derive_seed(self._seed, "sub-sequences", epoch))
            offsets = generator.integers(self._spare + 1)
            self._epochs[epoch] = generator.permutation(self.num_sequences), offsets
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return self._epochs[epoch]

    def _pieces(self, numbers: NDArray[np.int64], offsets: NDArray[np.int64]) -> Pieces:
        utterance = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(utterance > 0, self._ends[utterance - 1], 0)
        first = (numbers - before) * self.config.frames - offsets[utterance]
        end = np.minimum(first + self.config.frames, self.lengths[utterance])
        return np.stack([utterance, np.maximum(first, 0), end], axis=1)

    def _split(self, pieces: Pieces) -> list[Pieces]:
        return [part for part in np.array_split(pieces, self._accumulate) if len(part)]


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, …, count - 1 for each of `counts`, end to end."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
