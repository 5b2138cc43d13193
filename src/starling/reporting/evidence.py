"""What the folders of experiments tell, as the report page shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Seconds = float
Section = Literal["training", "validation", "timeline", "staleness", "consensus", "scores", "audio", "events"]
"""A part of the page that some experiments have no data for."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive mini-batches of one learner. Times are seconds of training since the beginning of the run."""

    learner: int
    begin: Seconds
    end: Seconds
    step: int
    """Of the last mini-batch: its number among those of all learners, from 0."""
    batches: int
    examples: int
    frames: int
    loss: float
    """Mean over the frames; NaN if no loss was finite."""
    computing: Seconds
    waiting_for_data: Seconds
    waiting_for_peers: Seconds


@dataclass(frozen=True)
class CurvePoint:
    """The training loss at one moment."""

    seconds: Seconds | None
    """Of training; None where that is not recorded."""
    step: int
    """Mini-batches of all learners so far."""
    examples: int | None
    """Utterances, or other examples, of all learners so far; None where that is not recorded."""
    loss: float
    """A mean."""
    low: float | None = None
    """With `high`: the lowest and the highest of several runs; None for one run."""
    high: float | None = None


@dataclass(frozen=True)
class Validation:
    """A score of the valid set while the run trained."""

    set_name: str
    epochs: float
    """Epochs so far."""
    step: int
    wer: float
    """Word error rate, in per cent."""


@dataclass(frozen=True)
class Utterance:
    """One scored utterance."""

    rank: Literal["best", "median", "worst"]
    name: str
    errors: int
    words: int
    """In the reference."""
    alignment: tuple[tuple[str, str], ...]
    """Pairs of a word of the reference and one of the hypothesis; empty for no word."""
    audio: str | None = None
    """A `data:` URI."""


@dataclass(frozen=True)
class ScoredSet:
    """The scores of one set, from an experiment's `decode` folder."""

    name: str
    wer: float
    """Word error rate, in per cent."""
    interval: tuple[float, float] | None
    """95 % bootstrap interval of the WER, in per cent; None: too few words."""
    cer: float
    words: int
    insertions: int
    deletions: int
    substitutions: int
    num_utterances: int
    num_wrong: int
    utterances: tuple[Utterance, ...]
    confusions: tuple[tuple[str, str, int], ...]
    """The most frequent errors: the word of the reference and what was recognised, empty for none, and how often."""
    num_confusions: int
    """Of how many kinds."""


@dataclass(frozen=True)
class Happening:
    """An event of a run."""

    at: Seconds | None
    """Since the run began; None on a simulated clock."""
    kind: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """All that an experiment's folder tells."""

    label: str
    """Names the experiment among those of the page."""
    path: str
    strategy: str
    learners: int
    is_virtual: bool
    outcome: str
    """How the run ended, in words."""
    settings: str
    """The recipe, as YAML."""
    environment: str
    commands: tuple[str, ...]
    """With which the run was started, as far as it recorded them."""
    unit: str = "utterances"
    """What its mini-batches are made of."""
    stretches: tuple[Stretch, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    validations: tuple[Validation, ...] = ()
    staleness: tuple[int, ...] = ()
    """How many gradients had a staleness of 0, 1, 2, …; the last place counts all beyond it, too."""
    distances: tuple[tuple[int, float], ...] = ()
    """Consensus distances, each after how many mini-batches."""
    sets: tuple[ScoredSet, ...] = ()
    happenings: tuple[Happening, ...] = ()
    missing: Mapping[Section, str] = field(default_factory=dict)
    """Why a part is not there, in a sentence."""

    @property
    def seconds(self) -> Seconds | None:
        """From the first mini-batch to the last, on the clock of the run."""
        if not self.stretches:
            return None
        return max(each.end for each in self.stretches) - min(each.begin for each in self.stretches)

    @property
    def num_batches(self) -> int:
        """Of all learners."""
        return sum(each.batches for each in self.stretches) or max((each.step for each in self.curve), default=0)

    @property
    def num_examples(self) -> int:
        """Utterances, or other examples, of all learners, each as often as it was trained on."""
        return sum(each.examples for each in self.stretches)

    @property
    def throughput(self) -> float | None:
        """Examples per second of all learners; None where that is not recorded."""
        return self.num_examples / self.seconds if self.seconds else None

    def share(self, what: Literal["computing", "waiting_for_data", "waiting_for_peers"]) -> float | None:
        """In per cent of the recorded time of all learners."""
        total = sum(each.computing + each.waiting_for_data + each.waiting_for_peers for each in self.stretches)
        return 100.0 * sum(getattr(each, what) for each in self.stretches) / total if total > 0.0 else None
