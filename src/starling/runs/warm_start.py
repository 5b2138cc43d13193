"""Initialises a recogniser with the weights of another experiment."""

from pathlib import Path

import torch

from starling.checkpoint.reader import latest, load
from starling.errors import ConfigError
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer

OUTPUT = "output."
"""The prefix of the output layer's parameters, in every network. Its size depends on the tokens."""


def warm_start(recogniser: Recogniser, source: Path) -> str:
    """Load the weights of an experiment's newest model, or of a recogniser's folder, into `recogniser`; return a
    description.

    All shapes must match, except those of the output layer, which is not loaded if the tokens differ. Raises a
    ConfigError that lists the mismatches, CheckpointError if `source` has no model.
    """
    other = Recogniser.load(source if (source / "config.json").is_file() else load(latest(source)).model_folder)
    own, theirs = recogniser.model.state_dict(), other.model.state_dict()
    has_same_tokens = _tokens(recogniser.tokenizer) == _tokens(other.tokenizer)
    if recogniser.states is not None or other.states is not None:
        has_same_tokens &= recogniser.states is not None and recogniser.states.means_the_same(other.states)
    taken = {
        name: theirs[name]
        for name, value in own.items()
        if name in theirs and theirs[name].shape == value.shape and (has_same_tokens or not name.startswith(OUTPUT))
    }
    problems = [
        f"{name} is {_shape(own.get(name))} here, {_shape(theirs.get(name))} there"
        for name in sorted(own.keys() | theirs.keys())
        if name not in taken and not name.startswith(OUTPUT)
    ]
    if problems:
        raise ConfigError(
            f"warm_start: {source} does not fit this recipe's model: only the output layer may differ, but "
            f"{len(problems)} other tensors do: {'; '.join(problems[:3])}; copy its model: and features: sections"
        )
    recogniser.model.load_state_dict(own | taken)
    notes = ""
    if not has_same_tokens:
        states = recogniser.states
        what = f"{recogniser.tokenizer.vocab_size} other tokens" if states is None else f"{states.num_states} states"
        notes = f"; the output layer is new, for {what}"
    if recogniser.features.sampling_rate != other.features.sampling_rate:
        notes += (
            f"; it was trained at {other.features.sampling_rate} Hz, this recipe has "
            f"{recogniser.features.sampling_rate} Hz"
        )
    count = sum(value.numel() for value in taken.values())
    return f"warm start from {source}: {count:,} of {sum(value.numel() for value in own.values()):,} numbers{notes}"


def _tokens(tokenizer: Tokenizer) -> list[str]:
    """The text of each token, without CTC's blank."""
    return [tokenizer.decode([token]) for token in range(1, tokenizer.vocab_size)]


def _shape(value: torch.Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
