"""Trains and decodes with tied states of characters, frame by frame (`loss: frames`). This module has the sections of a
recipe that only these models use, and the frames of a training set on disk: their features and aligned states, from
which sub-sequences are cut.

<folder>/features.bin      [N, F] float16: normalised log-mel, utterance after utterance
<folder>/states.npy        [N] int32: the tied state of each frame
<folder>/ends.npy          [U] int64: the frame after the last of each utterance
<folder>/utterances.npy    [U] int32: the numbers of the utterances in the training set, ascending
<folder>/speeds.npy        [U] float64: the speed factor of each utterance; 1 for all if the file is missing
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from starling.configuration import Config
from starling.errors import DataError


class SequencesConfig(Config):
    """The contents of a mini-batch; the `sequences:` section of a recipe."""

    frames: int = Field(default=21, ge=1)
    """Number of frames of a sub-sequence; the remainder of an utterance is shorter."""
    batch: int = Field(default=128, ge=1)
    """Number of sub-sequences in a micro-batch, drawn from all utterances."""


class StatesConfig(Config):
    """The tied states, which are the network's outputs; the `states:` section of a recipe."""

    number: int = Field(default=100, ge=2, le=1_000_000)
    """Maximum number of tied states."""
    per_unit: int = Field(default=3, ge=1, le=10)
    """Number of states of a character, from left to right."""
    context: Literal[0, 1, 2] = 1
    """Number of neighbours on either side, within the word, on which a state depends."""
    min_frames: int = Field(default=20, ge=1)
    """Minimum number of frames of the training set for each tied state."""


class AlignmentConfig(Config):
    """The alignment of frames to states; the `alignment:` section of a recipe."""

    experiment: Path | None = None
    """The model that aligns the training set: an experiment, or a recogniser's folder. A model with tied states aligns
    by its scaled likelihoods, and a CTC model by its best path. null makes a flat start, which divides each utterance
    equally."""
    rounds: int | None = Field(default=None, ge=0, le=1000)
    """Number of rounds that estimate a Gaussian for each state and align with the Gaussians. null makes 20 rounds after
    a flat start, 5 after CTC, and none after a model with tied states."""


FEATURES, STATES, ENDS, UTTERANCES = "features.bin", "states.npy", "ends.npy", "utterances.npy"
SPEEDS = "speeds.npy"


class FrameWriter:
    """Writes the features of utterances, one after another, until it is closed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = (folder / FEATURES).open("wb")
        self._rows: list[tuple[int, int, float]] = []

    def close(self) -> None:
        """Close the file of features, and write the index."""
        self._file.close()
        rows = np.array(self._rows, [("length", np.int64), ("number", np.int32), ("speed", np.float64)])
        np.save(self._folder / ENDS, np.cumsum(rows["length"]))
        np.save(self._folder / UTTERANCES, rows["number"])
        np.save(self._folder / SPEEDS, rows["speed"])

    def write(self, number: int, features: NDArray[np.float32], speed: float = 1.0) -> None:
        """Add the features `[T, F]` of utterance `number` at speed factor `speed`."""
        features.astype(np.float16).tofile(self._file)
        self._rows.append((len(features), number, speed))


class Frames:
    """The memory-mapped features of U utterances. A pickled copy opens the files again in its process."""

    def __init__(self, folder: Path, num_bands: int) -> None:
        """Open the files. Raises DataError for files that are missing or do not belong together."""
        self.folder, self.num_bands = folder, num_bands
        try:
            self.ends: NDArray[np.int64] = np.load(folder / ENDS, allow_pickle=False)
            self.utterances: NDArray[np.int32] = np.load(folder / UTTERANCES, allow_pickle=False)
            has_speeds = (folder / SPEEDS).exists()  # missing in experiments older than augment.speed
            self.speeds: NDArray[np.float64] = (
                np.load(folder / SPEEDS, allow_pickle=False) if has_speeds else np.ones(len(self.ends))
            )
            self._features = np.memmap(folder / FEATURES, np.float16, "r", shape=(int(self.ends[-1]), num_bands))
        except (OSError, ValueError, IndexError) as error:  # an IndexError or ValueError if there are no frames
            raise DataError(f"{folder}: the frames cannot be read ({error}); train again without resume") from error
        self.starts = np.concatenate([[0], self.ends[:-1]]).astype(np.int64)
        self.lengths: NDArray[np.int64] = self.ends - self.starts

    def __len__(self) -> int:
        return len(self.ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder.absolute(), self.num_bands)

    def features(self, utterance: int, splice: int = 0) -> NDArray[np.float32]:
        """The features of an utterance, `[T, (2 * splice + 1) * F]`."""
        whole: NDArray[np.float32] = self.cut(np.asarray([[utterance, 0, self.lengths[utterance]]]), splice)[0]
        return whole

    def cut(self, pieces: NDArray[np.int64], splice: int) -> NDArray[np.float32]:
        """Cut out sub-sequences `[B, T, (2 * splice + 1) * F]`, padded with zeros to the length of the longest.

        Each frame is joined with its neighbours. At the ends of an utterance, the outermost frame is repeated.

        Args:
            pieces: The utterance, the first frame, and the frame after the last of each sub-sequence, `[B, 3]`.
            splice: The number of neighbours on either side of a frame.
        """
        found: NDArray[np.float32] = self._taken(self._features, pieces, splice, 0.0).astype(np.float32)
        return found.reshape(*found.shape[:2], -1)

    def _taken(self, values: NDArray[Any], pieces: NDArray[np.int64], splice: int, padding: float) -> NDArray[Any]:
        """Select from `values` `[N, ...]` those of the sub-sequences' frames and their neighbours. The result is
        `[B, T, 2 * splice + 1, ...]`."""
        utterance, first, end = pieces.T
        length = int((end - first).max())
        place = first[:, None, None] + np.arange(length)[:, None] + np.arange(-splice, splice + 1)
        place = np.clip(place, 0, self.lengths[utterance][:, None, None] - 1)
        found: NDArray[Any] = values[place + self.starts[utterance][:, None, None]]
        found[np.arange(length) >= (end - first)[:, None]] = padding
        return found


class AlignedFrames(Frames):
    """The features of U utterances, and the tied state of each frame."""

    def __init__(self, folder: Path, num_bands: int) -> None:
        super().__init__(folder, num_bands)
        try:
            self._states: NDArray[np.int32] = np.load(folder / STATES, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: the alignment cannot be read ({error}); train again") from error
        if len(self._states) != self.ends[-1]:
            raise DataError(f"{folder}: {len(self._states)} frames are aligned, but there are {self.ends[-1]}")

    def states(self, pieces: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
        """The states `[B, T]` of the sub-sequences that `cut` returns, with `padding` after the end of shorter ones."""
        return self._taken(self._states, pieces, 0, padding)[..., 0].astype(np.int64)


def save_states(folder: Path, states: Sequence[NDArray[np.int32]]) -> None:
    """Write the tied states of all frames to `folder`, utterance by utterance."""
    np.save(folder / STATES, np.concatenate(states).astype(np.int32))
