"""The states that the frames of a text pass through, and tied states.

States whose contexts sound alike are tied: they share one output of the network. A decision tree determines which
states are tied. A recogniser stores the tree, the priors of the tied states, and its words.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from starling.configuration import Config
from starling.errors import ConfigError, DataError
from starling.speech.decoding import DecodingConfig
from starling.speech.tokens import BLANK, Tokenizer

SILENCE = BLANK
"""The unit of frames without speech, which is also the context before and after a word. No text contains it."""

ContextState = tuple[int, ...]
"""A state of a unit in its context: its number in the unit, the unit, the units before it, and the units after it."""


class Units(Protocol):
    """An interface that converts words to units, such as characters or phones."""

    def encode(self, text: str, utterance: str = "") -> list[int]:
        """The units of a text. Raises DataError, naming `utterance`, for a text that cannot be written in units."""
        ...


class StateSpeller:
    """Converts words and texts to states.

    Each unit of a word, such as a character, has `per_unit` states, which depend on `context` units on either side
    within the word. Silence has one state, and may come before, between and after words.
    """

    def __init__(self, units: Units, per_unit: int, context: int) -> None:
        self._units = units
        self.per_unit = per_unit
        self.context = context
        self.silence: ContextState = (0, SILENCE, *[SILENCE] * (2 * context))
        self._known: dict[str, tuple[ContextState, ...]] = {}

    def word(self, word: str, utterance: str = "") -> Sequence[ContextState]:
        """The states of a word. Raises DataError, naming `utterance`, for a character that is not a token."""
        if word not in self._known:
            beyond = [SILENCE] * self.context
            units = [*beyond, *self._units.encode(word, utterance), *beyond]
            self._known[word] = tuple(
                (part, units[place], *units[place - self.context : place], *units[place + 1 : place + 1 + self.context])
                for place in range(self.context, len(units) - self.context)
                for part in range(self.per_unit)
            )
        return self._known[word]

    def text(self, text: str, utterance: str = "") -> tuple[list[ContextState], list[bool]]:
        """The states of a text, and whether each state may be skipped, which is true of silences only. Raises DataError
        as `word` does, and for an empty text."""
        words = text.split()
        if not words:
            raise DataError(f"the transcript of utterance {utterance!r} is empty: remove it from the manifest")
        states, optional = [self.silence], [True]
        for word in words:
            own = self.word(word, utterance)
            states += [*own, self.silence]
            optional += [*[False] * len(own), True]
        return states, optional


class Node(Config):
    """A node of the tree: a question with the nodes to which its answers lead, or a tied state."""

    place: int = 0
    """Index, in the context of a `ContextState`, of the neighbour that the question is about."""
    units: tuple[int, ...] = ()
    """The units for which the answer is yes."""
    yes: int = -1
    no: int = -1
    state: int | None = None
    """The tied state; None for a question."""


class StateTree(Config):
    """A decision tree that maps each state in context to its tied state, also in contexts that no training text has."""

    roots: tuple[tuple[int, int, int], ...]
    """The first node for each state of each unit, as (state of the unit, unit, node)."""
    nodes: tuple[Node, ...]

    @cached_property
    def _root_of(self) -> dict[tuple[int, int], int]:
        return {(part, unit): node for part, unit, node in self.roots}

    @property
    def num_states(self) -> int:
        return sum(node.state is not None for node in self.nodes)

    def tied(self, state: ContextState) -> int:
        """The tied state of a state in context. Raises DataError for a unit that was not trained."""
        number = self._root_of.get((state[0], state[1]))
        if number is None:
            raise DataError(f"token {state[1]} occurs in no training text, so it has no states")
        while (node := self.nodes[number]).state is None:
            number = node.yes if state[2 + node.place] in node.units else node.no
        return node.state


@dataclass
class Statistics:
    """Statistics of the frames of each of C states in context, in D dimensions."""

    states: list[ContextState]
    counts: NDArray[np.float64]
    """Number of frames, `[C]`."""
    sums: NDArray[np.float64]
    """Sums of the features of the frames, `[C, D]`."""


@dataclass(order=True)
class _Split:
    """The best question for a leaf; questions with the largest gain come first."""

    loss: float
    number: int
    question: tuple[int, tuple[int, ...]] = field(compare=False)
    members: NDArray[np.int64] = field(compare=False)
    is_yes: NDArray[np.bool_] = field(compare=False)


def grow_tree(statistics: Statistics, number: int, min_frames: int) -> StateTree:
    """Grow a tree of at most `number` leaves. The statistics must come from a space in which the covariance within
    states is the identity.

    The tree begins with a leaf for each state of each unit, whatever the context. Then leaves are split, one at a time.
    The next split is always the one that raises the log-likelihood of all frames most, among the splits whose halves
    have at least `min_frames` frames each. With a Gaussian for each leaf and the identity as their shared covariance,
    the log-likelihood rises by half of `n_yes |m_yes|² + n_no |m_no|² - n |m|²`, with the number n and the mean m of
    the frames of a leaf and its halves (Young, Odell and Woodland 1994). A question asks whether a neighbour is in a
    set of units. The sets are single units, and the clusters of a hierarchical clustering of the units' means, as in
    Kaldi.

    Raises DataError if `number` is too small even without context.
    """
    keys = [(state[0], state[1]) for state in statistics.states]
    roots = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    if number < len(roots):
        raise DataError(
            f"states.number is {number}, and the training texts have {len(roots)} states of units without context: "
            f"raise it to at least {len(roots)}, or lower states.per_unit"
        )
    questions = _Questions(statistics)
    nodes: list[Node | None] = [None] * len(roots)
    members_of = [np.flatnonzero([roots[key] == leaf for key in keys]) for leaf in range(len(roots))]
    open_splits = [split for leaf, own in enumerate(members_of) if (split := questions.best(leaf, own, min_frames))]
    heapq.heapify(open_splits)
    num_leaves = len(roots)
    while open_splits and num_leaves < number:
        split = heapq.heappop(open_splits)
        place, units = split.question
        nodes[split.number] = Node(place=place, units=units, yes=len(nodes), no=len(nodes) + 1)
        for own in (split.members[split.is_yes], split.members[~split.is_yes]):
            nodes.append(None)
            if (following := questions.best(len(nodes) - 1, own, min_frames)) is not None:
                heapq.heappush(open_splits, following)
        num_leaves += 1
    leaves = {leaf: state for state, leaf in enumerate(place for place, node in enumerate(nodes) if node is None)}
    return StateTree(
        roots=tuple((*key, node) for key, node in roots.items()),
        nodes=tuple(node or Node(state=leaves[place]) for place, node in enumerate(nodes)),
    )


class _Questions:
    """All questions about all states, with the answers in matrices."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        contexts = np.asarray([state[2:] for state in statistics.states], np.int64)
        contexts = contexts.reshape(len(statistics.states), -1)
        centres = np.asarray([state[1] for state in statistics.states])
        self._num_units = int(max(centres.max(), contexts.max(initial=0))) + 1
        self._contexts = contexts
        self._sets = list(dict.fromkeys(_clusters(statistics, centres)))
        self._is_in = np.zeros((len(self._sets), self._num_units))
        for row, units in enumerate(self._sets):
            self._is_in[row, list(units)] = 1.0

    def best(self, leaf: int, members: NDArray[np.int64], min_frames: int) -> _Split | None:
        """The split of a leaf by the question with the largest gain; None if no question gains anything and leaves at
        least `min_frames` frames on each side."""
        counts, sums = self._statistics.counts[members], self._statistics.sums[members]
        if len(members) < 2 or counts.sum() < 2 * min_frames:
            return None
        total, whole = counts.sum(), sums.sum(0)
        before = float(whole @ whole) / total
        found: tuple[float, int, int] | None = None
        for place in range(self._contexts.shape[1]):
            own = self._contexts[members, place]
            unit_counts = np.bincount(own, counts, self._num_units)
            unit_sums = np.zeros((self._num_units, sums.shape[1]))
            np.add.at(unit_sums, own, sums)
            yes_counts, yes_sums = self._is_in @ unit_counts, self._is_in @ unit_sums
            no_counts, no_sums = total - yes_counts, whole - yes_sums
            fits = (yes_counts >= min_frames) & (no_counts >= min_frames)
            with np.errstate(divide="ignore", invalid="ignore"):
                gains = np.square(yes_sums).sum(1) / yes_counts + np.square(no_sums).sum(1) / no_counts - before
            gains = np.where(fits, gains, -np.inf)
            row = int(gains.argmax())
            if gains[row] > 1e-9 * abs(before) and (found is None or gains[row] > found[0]):
                found = float(gains[row]), place, row
        if found is None:
            return None
        gain, place, row = found
        is_yes = self._is_in[row, self._contexts[members, place]] > 0.0
        return _Split(-gain, leaf, (place, self._sets[row]), members, is_yes)


def _clusters(statistics: Statistics, centres: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of units for questions: single units, and clusters of units whose means are close."""
    from scipy.cluster.hierarchy import linkage

    neighbours = {unit for state in statistics.states for unit in state[2:]}
    units = sorted(neighbours | set(centres.tolist()))
    yield from ((unit,) for unit in units)
    spoken = [unit for unit in units if (centres == unit).any()]
    if len(spoken) < 3:
        return
    own = [centres == unit for unit in spoken]
    means = [statistics.sums[each].sum(0) / statistics.counts[each].sum() for each in own]
    clusters: list[tuple[int, ...]] = [(unit,) for unit in spoken]
    for first, second, *_ in linkage(means, "ward")[:-1]:
        clusters.append(tuple(sorted(clusters[int(first)] + clusters[int(second)])))
        yield clusters[-1]


STATES_FILE = "states.json"


class TiedStates(StateTree):
    """The tied states that a network's outputs represent, and the search that turns them into words; the contents of
    `states.json`."""

    format: int = Field(default=1, ge=1, le=1)
    per_unit: int = Field(ge=1)
    """Number of states of a unit."""
    context: int = Field(ge=0)
    """Number of neighbours on either side on which a state depends."""
    log_priors: tuple[float, ...]
    """Natural logarithm of each tied state's share of the training frames, `[S]`."""
    words: tuple[str, ...] = Field(min_length=1)
    """The words that can be recognised."""
    decoding: DecodingConfig
    """The settings of the search for words."""

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        """Check that children come after their parents, so that every question leads to a state."""
        for number, node in enumerate(self.nodes):
            if node.state is None and not (number < node.yes < len(self.nodes) and number < node.no < len(self.nodes)):
                raise ValueError(f"node {number} leads to {node.yes} and {node.no} of {len(self.nodes)}")
            if node.state is None and not 0 <= node.place < 2 * self.context:
                raise ValueError(f"node {number} asks about neighbour {node.place} of {2 * self.context}")
        states = sorted(node.state for node in self.nodes if node.state is not None)
        if states != list(range(len(self.log_priors))):
            raise ValueError(f"{len(states)} tied states, and {len(self.log_priors)} priors")
        if any(not 0 <= node < len(self.nodes) for *_, node in self.roots):
            raise ValueError("a unit leads to no node")
        return self

    def speller(self, tokenizer: Tokenizer) -> StateSpeller:
        """The speller that turns texts into states."""
        return StateSpeller(tokenizer, self.per_unit, self.context)

    def scaled(self, log_posteriors: Tensor, scale: float = 1.0) -> Tensor:
        """The log-likelihoods `[..., S]` of frames, up to a constant for each frame. They are the log posteriors minus
        `scale` times the log priors."""
        return log_posteriors - scale * torch.tensor(self.log_priors, dtype=torch.float64).to(log_posteriors)

    def means_the_same(self, other: "TiedStates | None") -> bool:
        """Whether every output stands for the same tied state here and in `other`."""
        outputs = {"roots", "nodes", "per_unit", "context"}
        return other is not None and self.model_dump(include=outputs) == other.model_dump(include=outputs)


def read_words(path: Path) -> list[str]:
    """Read a list with one word per line. Raises ConfigError for a list that cannot be read or is empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"decoding.word_list: {path} cannot be read ({error}); name a text file of words") from error
    words = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise ConfigError(f"decoding.word_list: {path} contains no words; write one per line, or leave it out")
    if wrong := next((word for word in words if len(word.split()) > 1), None):
        raise ConfigError(f"decoding.word_list: {path} contains {wrong!r}, which is several words; write one per line")
    return words


def check_words(states: TiedStates, tokenizer: Tokenizer) -> None:
    """Raise DataError, naming the word, unless every word can be recognised."""
    speller = states.speller(tokenizer)
    for word in states.words:
        try:
            for state in speller.word(word, word):
                states.tied(state)
        except DataError as error:
            raise DataError(f"the word {word!r} cannot be recognised: {error}") from error


def words_of(texts: Sequence[str]) -> list[str]:
    """The different words of texts, sorted."""
    return sorted({word for text in texts for word in text.split()})
