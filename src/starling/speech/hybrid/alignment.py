"""Forced alignment, which assigns each frame to a state of its transcript. It needs no other software."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starling.speech.hybrid import Frames
from starling.speech.hybrid.tying import ContextState, StateSpeller, StateTree, Statistics, grow_tree
from starling.speech.hybrid.viterbi import best_path, ctc_spans

SPLICE = 2
"""Number of neighbouring frames on either side that are joined to a frame for the Gaussians."""
_SMALLEST = 1e-2
"""Share of the mean variance within states that is added to each variance, because bands that never change have a
variance of 0."""
_MOST_SCORES = 1 << 23
"""Maximum number of scores (utterances x frames x positions) that are computed together."""

Labels = list[NDArray[np.int32]]
"""Labels of the positions or frames of each utterance."""
Scorer = Callable[[Sequence[int]], Tensor]
"""A function that returns the log-likelihoods `[B, T, K]` of all labels in the frames of the given utterances."""


@dataclass(frozen=True)
class StateSequences:
    """The states that the frames of each utterance pass through, in order. Each state in this order is a position."""

    states: list[ContextState]
    """All states that occur, without repetitions."""
    rows: Labels
    """The index in `states` of each position, for each utterance."""
    optional: list[NDArray[np.bool_]]
    """Whether each position may be skipped, for each utterance."""

    @classmethod
    def of(cls, texts: Sequence[tuple[str, str]], speller: StateSpeller) -> "StateSequences":
        """The state sequences of (id, text) pairs. Raises DataError as `StateSpeller.text` does."""
        known: dict[ContextState, int] = {}
        rows, optional = [], []
        for name, text in texts:
            states, skippable = speller.text(text, name)
            rows.append(np.asarray([known.setdefault(state, len(known)) for state in states], np.int32))
            optional.append(np.asarray(skippable))
        return cls(list(known), rows, optional)

    def labelled(self, labels: Sequence[int]) -> Labels:
        """The label of each position, given the label of each state in `states`."""
        table = np.asarray(labels, np.int32)
        return [table[row] for row in self.rows]


def flat_start(transcripts: StateSequences, lengths: NDArray[np.int64]) -> Labels:
    """The position of each frame if the frames of an utterance are divided equally among its positions. If there are
    too few frames, they are divided among the positions that may not be skipped."""
    positions = []
    for optional, length in zip(transcripts.optional, lengths.tolist(), strict=True):
        places = np.arange(len(optional)) if length >= len(optional) else np.flatnonzero(~optional)
        positions.append(places[np.arange(length) * len(places) // length].astype(np.int32))
    return positions


def align(lengths: NDArray[np.int64], labels: Labels, optional: Sequence[NDArray[np.bool_]], scorer: Scorer) -> Labels:
    """The position of each frame of each utterance on the path of the highest likelihood.

    Args:
        lengths: The number of frames of each utterance, `[U]`, which must be at least its number of positions that are
            not optional.
        labels: The label whose likelihood counts at each position.
        optional: Whether a position may be skipped.
        scorer: The function that computes the likelihoods.
    """
    positions: Labels = [np.zeros(0, np.int32)] * len(labels)
    for chosen in _together(lengths, [len(row) for row in labels]):
        scores = scorer(chosen).numpy()
        num_positions = np.asarray([len(labels[each]) for each in chosen])
        own = np.zeros((*scores.shape[:2], num_positions.max()), scores.dtype)
        skippable = np.zeros((len(chosen), num_positions.max()), np.bool_)
        for place, each in enumerate(chosen):
            own[place, :, : num_positions[place]] = scores[place][:, labels[each]]
            skippable[place, : num_positions[place]] = optional[each]
        paths = best_path(own, lengths[chosen], skippable, num_positions)
        for place, each in enumerate(chosen):
            positions[each] = paths[place, : lengths[each]].astype(np.int32)
    return positions


class Gaussians:
    """A Gaussian for each of K labels, over frames of D dimensions. All Gaussians share one covariance, so that the
    difference of two log-likelihoods is linear in the frame."""

    def __init__(self, num_labels: int, size: int) -> None:
        self.counts = torch.zeros(num_labels, dtype=torch.float64)
        self.sums = torch.zeros(num_labels, size, dtype=torch.float64)
        self.squares = torch.zeros(size, size, dtype=torch.float64)

    def add(self, frames: Tensor, labels: Tensor) -> None:
        """Add frames `[N, D]` with labels `[N]` to the statistics."""
        frames = frames.double()
        self.counts.index_add_(0, labels, torch.ones(len(labels), dtype=torch.float64))
        self.sums.index_add_(0, labels, frames)
        self.squares += frames.T @ frames

    def means(self) -> Tensor:
        """The mean of each label, `[K, D]`; for a label without frames, the mean of all frames."""
        means = self.sums / self.counts.clamp(min=1.0)[:, None]
        return torch.where(self.counts[:, None] > 0.0, means, self.sums.sum(0) / self.counts.sum())

    def within(self) -> Tensor:
        """The covariance within labels, `[D, D]`, slightly enlarged so that it can be inverted."""
        means = self.means()
        within = (self.squares - (means * self.counts[:, None]).T @ means) / self.counts.sum()
        return within + _SMALLEST * within.diagonal().mean().clamp(min=1e-6) * torch.eye(len(within))

    def linear(self) -> tuple[Tensor, Tensor]:
        """Weights `[D, K]` and biases `[K]` that map a frame to log-likelihoods, up to a term that all labels share."""
        means = self.means()
        weights = torch.linalg.solve(self.within(), means.T)
        biases = -0.5 * (means * weights.T).sum(1)
        return weights.float(), biases.float()


def align_with_gaussians(
    frames: Frames, transcripts: StateSequences, positions: Labels, rounds: int
) -> tuple[Labels, float]:
    """Improve `positions` by Viterbi training. Each of the `rounds` rounds estimates a Gaussian for each state of a
    unit, whatever its context, and aligns with the Gaussians. Returns the new positions, and the share of frames that
    the last round moved to a different state."""
    keys: dict[tuple[int, int], int] = {}
    table = [keys.setdefault((state[0], state[1]), len(keys)) for state in transcripts.states]
    labels = transcripts.labelled(table)
    changed = 0.0
    for _ in range(rounds):
        weights, biases = estimated(frames, labels, positions, len(keys)).linear()

        def scores(chosen: Sequence[int], weights: Tensor = weights, biases: Tensor = biases) -> Tensor:
            whole = np.asarray([[each, 0, frames.lengths[each]] for each in chosen])
            spliced = torch.from_numpy(frames.cut(whole, SPLICE))
            return torch.addmm(biases, spliced.flatten(0, 1), weights).view(len(chosen), -1, len(biases))

        following = align(frames.lengths, labels, transcripts.optional, scores)
        moved = sum(
            int((labels[each][following[each]] != labels[each][positions[each]]).sum()) for each in range(len(frames))
        )
        changed = moved / int(frames.ends[-1])
        positions = following
    return positions, changed


def tie_states(
    frames: Frames, transcripts: StateSequences, positions: Labels, number: int, min_frames: int
) -> tuple[StateTree, Labels]:
    """At most `number` tied states for aligned frames, and the tied state of each frame. Raises DataError as
    `grow_tree` does."""
    gaussians = estimated(frames, transcripts.rows, positions, len(transcripts.states))
    counts = gaussians.counts.numpy()
    seen = np.flatnonzero(counts)
    whitening = np.linalg.inv(np.linalg.cholesky(gaussians.within().numpy())).T
    sums = gaussians.sums.numpy()[seen] @ whitening
    tree = grow_tree(Statistics([transcripts.states[each] for each in seen], counts[seen], sums), number, min_frames)
    tied = transcripts.labelled([tree.tied(state) for state in transcripts.states])
    return tree, [row[path] for row, path in zip(tied, positions, strict=True)]


def from_ctc(path: NDArray[np.int32], subsampling: int, num_frames: int, text: str, per_unit: int) -> NDArray[np.int32]:
    """The position of each feature frame, from the path of a CTC model through `ctc_row` of a text's characters.

    The boundary between two characters lies halfway between the frames in which they are emitted. The silences at the
    ends also extend halfway to the nearest character. A space is silence. The frames of a character are divided equally
    among its states.
    """
    first, behind = (each * subsampling for each in ctc_spans(path, len(text)))
    last = np.minimum(behind, num_frames)
    cuts = [first[0] // 2, *((last[:-1] + first[1:]) // 2), (last[-1] + num_frames) // 2, num_frames]
    positions = np.zeros(num_frames, np.int32)
    position = 1
    for character, begin, end in zip(text, cuts[:-2], cuts[1:-1], strict=True):
        num_states = 1 if character == " " else per_unit
        positions[begin:end] = position + np.arange(end - begin) * num_states // max(end - begin, 1)
        position += num_states
    positions[cuts[-2] :] = position
    return positions


def _together(lengths: NDArray[np.int64], widths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of utterances that may be scored together. They have similar lengths, and the longest come first."""
    order = np.argsort(-lengths, kind="stable").tolist()
    chosen: list[int] = []
    widest = 0
    for each in order:
        wider = max(widest, widths[each])
        if chosen and (len(chosen) + 1) * int(lengths[chosen[0]]) * wider > _MOST_SCORES:
            yield chosen
            chosen, wider = [], widths[each]
        chosen.append(each)
        widest = wider
    if chosen:
        yield chosen


def estimated(frames: Frames, labels: Labels, positions: Labels, num_labels: int) -> Gaussians:
    """The Gaussians estimated from all frames, given the label of each position and the position of each frame."""
    gaussians = Gaussians(num_labels, frames.num_bands * (2 * SPLICE + 1))
    for first in range(0, len(frames), 64):
        chosen = range(first, min(first + 64, len(frames)))
        own = np.concatenate([labels[each][positions[each]] for each in chosen]).astype(np.int64)
        features = [torch.from_numpy(frames.features(each, SPLICE)) for each in chosen]
        gaussians.add(torch.cat(features), torch.from_numpy(own))
    return gaussians
