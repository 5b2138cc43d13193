"""What the sizes of all acoustic models have in common, and what the registry knows of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Every size of a network; each architecture adds its own."""

    subsampling: int  # feature frames per encoder frame: 1, 2 or 4
    dropout: float


@dataclass(frozen=True)
class Architecture:
    """A kind of network as recipes see it."""

    network: Callable[..., nn.Module]
    """`network(shape, num_features, vocab_size)`; the shape is of the presets' class."""
    presets: Mapping[str, ModelShape]
    """Complete sets of sizes, by name; all of one class, and one of them is `small`."""

    @property
    def sizes(self) -> list[str]:
        """The names of the sizes that it has: its own first, then those that every network has."""
        common = [field.name for field in fields(ModelShape)]
        return [field.name for field in fields(self.presets["small"]) if field.name not in common] + common
