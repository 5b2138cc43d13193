"""Checks of what a strategy asks of its learner, shared by all engines; each raises `ProtocolError`.

Without them gloo would abort the process on vectors of different sizes, and silently reinterpret different dtypes.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from starling.errors import ConfigError, ProtocolError

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Optimizers of `torch.optim` that treat each weight alone, so that a shard's step is that of the whole model."""


def check_peer(rank: int, peer: int, world: int) -> None:
    """Check that there is a learner `peer`."""
    if not 0 <= peer < world:
        raise ProtocolError(f"learner {rank} cannot exchange with learner {peer} among {world} learners")


def check_group(rank: int, group: Sequence[int] | None, sync_group: range, world: int) -> None:
    """Check that a mean is over the learner's own sync group."""
    chosen = range(world) if group is None else group
    if chosen != sync_group and list(chosen) != list(sync_group):
        raise ProtocolError(
            f"learner {rank} cannot average over learners {list(chosen)}: its sync group is {list(sync_group)}"
        )


def check_mean(rank: int, vector: Tensor, weights: Tensor) -> None:
    """Check that an averaged vector has the dtype of the weights and is not longer than they are."""
    if vector.dim() != 1 or vector.dtype != weights.dtype or len(vector) > len(weights):
        raise ProtocolError(
            f"learner {rank} cannot average {vector.dtype} {list(vector.shape)}: "
            f"its weights are {weights.dtype} {list(weights.shape)}"
        )


def check_received(rank: int, peer: int, tag: int, theirs: Tensor, like: Tensor) -> None:
    """Check that a received tensor has the expected shape and dtype."""
    if theirs.shape != like.shape or theirs.dtype != like.dtype:
        raise ProtocolError(
            f"learner {rank} and learner {peer} exchange different tensors under tag {tag}: "
            f"{like.dtype} {list(like.shape)} and {theirs.dtype} {list(theirs.shape)}"
        )


def changed_beneath(rank: int) -> ProtocolError:
    """The error if a strategy changes weights while it computes a gradient at them."""
    return ProtocolError(
        f"learner {rank}: its weights changed while a gradient at `weights` was under way; "
        "take the gradient at `snapshot()` instead"
    )


def given_away(rank: int) -> ProtocolError:
    """The error if a strategy awaits a gradient after giving it to `mean`."""
    return ProtocolError(
        f"learner {rank} awaited a gradient after giving it to `mean`; await the mean, or the gradient before that"
    )


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer treats each weight alone."""
    if type(optimizer).__name__ not in ELEMENTWISE or type(optimizer).__module__.partition(".")[0] != "torch":
        raise ConfigError(
            f"island: {type(optimizer).__name__} does not treat each weight alone, so it would step differently on a "
            f"part of a model; choose one of {', '.join(ELEMENTWISE)}, or leave out island"
        )
