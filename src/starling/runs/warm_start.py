"""Beginning with the weights of another experiment: pretrain large, adapt small."""

from pathlib import Path

import torch

from starling.checkpoint.reader import latest, load
from starling.errors import ConfigError
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import Tokenizer

OUTPUT = "output."
"""The layer that makes tokens, in every network; another set of tokens needs another one."""


def warm_start(recogniser: Recogniser, source: Path) -> str:
    """Give `recogniser` the weights of an experiment's newest model, or of a recogniser's folder; what was done, in
    words.

    Everything must fit but the output layer, which stays as it is where tokens differ. Raises ConfigError that lists
    what does not fit, CheckpointError when there is nothing to begin with.
    """
    other = Recogniser.load(source if (source / "config.json").is_file() else load(latest(source)).model_folder)
    own, theirs = recogniser.model.state_dict(), other.model.state_dict()
    is_same_language = _tokens(recogniser.tokenizer) == _tokens(other.tokenizer)
    if recogniser.states is not None or other.states is not None:
        is_same_language &= recogniser.states is not None and recogniser.states.means_the_same(other.states)
    taken = {
        name: theirs[name]
        for name, value in own.items()
        if name in theirs and theirs[name].shape == value.shape and (is_same_language or not name.startswith(OUTPUT))
    }
    problems = [
        f"{name} is {_shape(own.get(name))} here, {_shape(theirs.get(name))} there"
        for name in sorted(own.keys() | theirs.keys())
        if name not in taken and not name.startswith(OUTPUT)
    ]
    if problems:
        raise ConfigError(
            f"warm_start: {source} does not fit this recipe's model, and only the output layer may differ "
            f"({len(problems)} tensors do): {'; '.join(problems[:3])}; take over its model: and features: sections"
        )
    recogniser.model.load_state_dict(own | taken)
    fresh = ""
    if not is_same_language:
        states = recogniser.states
        what = f"{recogniser.tokenizer.vocab_size} other tokens" if states is None else f"{states.num_states} states"
        fresh = f"; the output layer is new, for {what}"
    if recogniser.features.sampling_rate != other.features.sampling_rate:
        fresh += f"; it heard {other.features.sampling_rate} Hz, here are {recogniser.features.sampling_rate} Hz"
    count = sum(value.numel() for value in taken.values())
    return f"warm start from {source}: {count:,} of {sum(value.numel() for value in own.values()):,} numbers{fresh}"


def _tokens(tokenizer: Tokenizer) -> list[str]:
    """What each output stands for; the first is CTC's blank."""
    return [tokenizer.decode([token]) for token in range(1, tokenizer.vocab_size)]


def _shape(value: torch.Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
