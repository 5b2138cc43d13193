"""Forced alignment: assigns each frame to a state of its transcript, without other software."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starling.speech.hybrid.store import Frames
from starling.speech.hybrid.tying import ContextState, StateSpeller, StateTree, Statistics, grow_tree
from starling.speech.hybrid.viterbi import best_path, ctc_spans

SPLICE = 2
"""Number of neighbours on either side that the Gaussians hear with a frame."""
_SMALLEST = 1e-2
"""Share of the mean variance within states that is added to each variance: bands that never change have none."""
_MOST_SCORES = 1 << 23
"""Number of scores (utterances x frames x positions) that are computed together."""

Labels = list[NDArray[np.int32]]
"""For each utterance, a label for each of its positions or frames."""
Scorer = Callable[[Sequence[int]], Tensor]
"""Log-likelihoods of all labels in the frames of some utterances, `[B, T, K]`."""


@dataclass(frozen=True)
class StateSequences:
    """The states that the frames of each utterance go through, in order: its positions."""

    states: list[ContextState]
    """All states that occur, each once."""
    rows: Labels
    """The index in `states` of each position."""
    optional: list[NDArray[np.bool_]]
    """Whether a position may be skipped."""

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
        """A label for each position, given one for each of `states`."""
        table = np.asarray(labels, np.int32)
        return [table[row] for row in self.rows]


def flat_start(transcripts: StateSequences, lengths: NDArray[np.int64]) -> Labels:
    """The position of each frame when an utterance's frames are divided equally among its positions or, where it has
    too few frames, among those that may not be skipped."""
    positions = []
    for optional, length in zip(transcripts.optional, lengths.tolist(), strict=True):
        places = np.arange(len(optional)) if length >= len(optional) else np.flatnonzero(~optional)
        positions.append(places[np.arange(length) * len(places) // length].astype(np.int32))
    return positions


def align(lengths: NDArray[np.int64], labels: Labels, optional: Sequence[NDArray[np.bool_]], scorer: Scorer) -> Labels:
    """The position of each frame of each utterance on the path of the highest likelihood.

    Args:
        lengths: Frames of each utterance, `[U]`: at least as many as it has positions that are not optional.
        labels: The label whose likelihood counts at each position.
        optional: Whether a position may be skipped.
        scorer: The function that gives the likelihoods.
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
    """A Gaussian for each of K labels, over frames of D dimensions; all with one covariance, so that the difference of
    two log-likelihoods is linear in the frame."""

    def __init__(self, num_labels: int, size: int) -> None:
        self.counts = torch.zeros(num_labels, dtype=torch.float64)
        self.sums = torch.zeros(num_labels, size, dtype=torch.float64)
        self.squares = torch.zeros(size, size, dtype=torch.float64)

    def add(self, frames: Tensor, labels: Tensor) -> None:
        """Count frames `[N, D]` with labels `[N]`."""
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
        """Weights `[D, K]` and biases `[K]` that give log-likelihoods, up to a term that all labels share."""
        means = self.means()
        weights = torch.linalg.solve(self.within(), means.T)
        biases = -0.5 * (means * weights.T).sum(1)
        return weights.float(), biases.float()


def align_with_gaussians(
    frames: Frames, transcripts: StateSequences, positions: Labels, rounds: int
) -> tuple[Labels, float]:
    """Positions after `rounds` rounds of estimating a Gaussian for each state of a unit, whatever its context, and
    aligning with them (Viterbi training), and the share of frames that the last round moved to another state."""
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

    A boundary lies halfway between the frames in which two neighbours are emitted, as do those of silence at the ends;
    the token of a space is silence. A character's frames are divided equally among its states.
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
    """Utterances of similar length, longest first, as many as may be scored together."""
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
    """The Gaussians of all frames, from the label of each position and the position of each frame."""
    gaussians = Gaussians(num_labels, frames.num_bands * (2 * SPLICE + 1))
    for first in range(0, len(frames), 64):
        chosen = range(first, min(first + 64, len(frames)))
        own = np.concatenate([labels[each][positions[each]] for each in chosen]).astype(np.int64)
        features = [torch.from_numpy(frames.features(each, SPLICE)) for each in chosen]
        gaussians.add(torch.cat(features), torch.from_numpy(own))
    return gaussians
