"""Encoders that others have trained, by `transformers`, with CTC outputs of our own."""

from pathlib import Path

from torch import nn

from starling.errors import ConfigError
from starling.speech.models.network import Network


class PublishedNetwork(Network):
    """A published encoder, dropout, CTC outputs."""

    def published_part(self) -> tuple[nn.Module, type, str]:
        """The encoder; the class of `transformers` whose checkpoints have it; and the name that it has in there, empty
        for all of it."""
        raise NotImplementedError


def load_published(network: nn.Module, checkpoint: Path) -> str:
    """Load the encoder's weights from a folder in the format of `transformers`, or a model of the hub, and say so.

    Raises ConfigError for a network of another kind, and for a checkpoint without fitting weights in safetensors.
    """
    if not isinstance(network, PublishedNetwork):
        raise ConfigError(f"model.checkpoint: {type(network).__name__} has no published checkpoints; leave it out")
    encoder, kind, part = network.published_part()
    name = checkpoint.as_posix()
    try:
        whole, found = kind.from_pretrained(  # type: ignore[attr-defined]
            name,
            config=encoder.config,
            use_safetensors=True,
            local_files_only=checkpoint.exists(),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.checkpoint: {name} cannot be read: {error}") from error
    prefix = f"{part}." if part else ""
    if missing := sorted(each for each in found["missing_keys"] if each.startswith(prefix)):
        raise ConfigError(f"model.checkpoint: {name} lacks {len(missing)} tensors, such as {missing[0]}")
    state = whole.get_submodule(part).state_dict()
    encoder.load_state_dict(state)
    return f"checkpoint {name}: {sum(each.numel() for each in state.values()):,} numbers of the encoder"
