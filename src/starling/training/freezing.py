"""Parameters that training leaves unchanged, for the whole run or until they are thawed."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

ENCODER = "encoder"
"""Name that stands for all parameters except those of the output layers."""
OUTPUT = "output."
"""Prefix of the output layer's parameters, in every network of Starling."""
PHONES = "phones."
"""Prefix of the parameters of the phones' output layer."""
OUTPUTS = (OUTPUT, PHONES)


class Until(Config):
    """The time at which frozen parameters are thawed."""

    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the data after which the parameters are thawed."""
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the budget after which the parameters are thawed."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.epochs is None) == (self.fraction is None):
            raise ValueError("give either epochs or fraction")
        return self

    def is_over(self, epochs: float, fraction: float) -> bool:
        """Return whether the parameters are thawed after this number of epochs and fraction of the budget."""
        return epochs >= self.epochs if self.epochs is not None else fraction >= (self.fraction or 0.0)

    def __str__(self) -> str:
        return f"{self.epochs:g} epochs" if self.epochs is not None else f"{self.fraction:.0%} of the budget"


class Freeze(Config):
    """Parameters that do not change, by name: they have no gradient, no steps and no optimizer state."""

    parameters: tuple[str, ...] = Field(min_length=1)
    """Names of parameters or modules, with wildcards: `layers.0`, `layers.*.weight_hh_l0`. `encoder` stands for all but
    the output layers."""
    until: Until | None = None
    """When the parameters are thawed; None means never."""

    @model_validator(mode="before")
    @classmethod
    def _of_names(cls, value: object) -> object:
        value = {"parameters": value} if isinstance(value, str | list | tuple) else value
        if isinstance(value, dict) and isinstance(value.get("parameters"), str):
            value = {**value, "parameters": [value["parameters"]]}
        return value

    def holds(self, name: str) -> bool:
        """Return whether the entry includes the parameter with this name."""
        return any(_matches(pattern, name) for pattern in self.parameters)


def _matches(pattern: str, name: str) -> bool:
    if pattern == ENCODER:
        return not name.startswith(OUTPUTS)
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def freeze(model: "nn.Module", frozen: Sequence[Freeze]) -> None:
    """Permanently freeze the parameters of a model that are never thawed. They are not part of a learner's weights.

    Raises:
        ConfigError: A name fits no parameter, or nothing is left to train at some time.
    """
    names = [name for name, _ in model.named_parameters()]
    for each in frozen:
        for pattern in each.parameters:
            if not any(_matches(pattern, name) for name in names):
                modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
                raise ConfigError(
                    f"freeze: {pattern!r} fits no parameter; the model's modules: {', '.join(modules)}; or write "
                    f"{ENCODER!r}"
                )
    if all(any(each.holds(name) for each in frozen) for name in names):
        raise ConfigError("freeze: it leaves no parameter to train at the beginning; leave some out")
    never = [each for each in frozen if each.until is None]
    for name, parameter in model.named_parameters():
        if any(each.holds(name) for each in never):
            parameter.requires_grad_(False)


def in_words(model: "nn.Module", frozen: Iterable[Freeze]) -> list[str]:
    """Return a line for each entry, which says which parameters are frozen and until when."""
    lines = []
    for each in frozen:
        count = sum(value.numel() for name, value in model.named_parameters() if each.holds(name))
        when = "for the whole run" if each.until is None else f"until {each.until}"
        lines.append(f"frozen {when}: {', '.join(each.parameters)}, {count:,} parameters")
    return lines
