"""The tied states of a recogniser: the tree, the priors of the states, and the words that they form."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from starling.errors import ConfigError, DataError
from starling.speech.decoding import DecodingConfig
from starling.speech.hybrid.tying import StateSpeller, StateTree
from starling.speech.tokens import Tokenizer

STATES_FILE = "states.json"


class TiedStates(StateTree):
    """The meaning of a network's outputs, and how they become words; the contents of `states.json`."""

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
        """Log-likelihoods of frames `[..., S]`, up to a constant for each frame: log posteriors minus `scale` times log
        priors."""
        return log_posteriors - scale * torch.tensor(self.log_priors, dtype=torch.float64).to(log_posteriors)

    def means_the_same(self, other: "TiedStates | None") -> bool:
        """Whether output n is the same state in both, for every n."""
        outputs = {"roots", "nodes", "per_unit", "context"}
        return other is not None and self.model_dump(include=outputs) == other.model_dump(include=outputs)

    def save(self, folder: Path) -> Path:
        """Write the file of a recogniser's states, and return its path."""
        path = folder / STATES_FILE
        path.write_text(self.model_dump_json(), encoding="utf-8")
        return path


def read_words(path: Path) -> list[str]:
    """The words of a list with one word per line. Raises ConfigError for a list that cannot be read or is empty."""
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
