"""What a strategy must not ask of its learner: the checks that all engines share, each with a `ProtocolError`.

gloo would abort the process on vectors of unequal sizes, and silently reinterpret unequal dtypes.
"""

from collections.abc import Sequence

from torch import Tensor

from starling.errors import ProtocolError


def check_peer(rank: int, peer: int, world: int) -> None:
    """There must be a learner `peer`."""
    if not 0 <= peer < world:
        raise ProtocolError(f"learner {rank} cannot exchange with learner {peer} among {world} learners")


def check_group(rank: int, group: Sequence[int] | None, sync_group: range, world: int) -> None:
    """A mean is taken over the learner's own sync group."""
    chosen = range(world) if group is None else group
    if chosen != sync_group and list(chosen) != list(sync_group):
        raise ProtocolError(
            f"learner {rank} cannot average over learners {list(chosen)}: its sync group is {list(sync_group)}"
        )


def check_mean(rank: int, vector: Tensor, weights: Tensor) -> None:
    """An averaged vector must have the dtype of the weights and be no longer than they are."""
    if vector.dim() != 1 or vector.dtype != weights.dtype or len(vector) > len(weights):
        raise ProtocolError(
            f"learner {rank} cannot average {vector.dtype} {list(vector.shape)}: "
            f"its weights are {weights.dtype} {list(weights.shape)}"
        )


def check_received(rank: int, peer: int, tag: int, theirs: Tensor, like: Tensor) -> None:
    """A received tensor must have the expected shape and dtype."""
    if theirs.shape != like.shape or theirs.dtype != like.dtype:
        raise ProtocolError(
            f"learner {rank} and learner {peer} exchange tensors that differ under tag {tag}: "
            f"{like.dtype} {list(like.shape)} and {theirs.dtype} {list(theirs.shape)}"
        )


def changed_beneath(rank: int) -> ProtocolError:
    """The error of a strategy that changes weights while it computes a gradient at them."""
    return ProtocolError(
        f"learner {rank}: its weights changed while a gradient at `weights` was under way; "
        "take the gradient at `snapshot()` instead"
    )


def given_away(rank: int) -> ProtocolError:
    """The error of a strategy that awaits a gradient which `mean` has taken."""
    return ProtocolError(
        f"learner {rank} awaited a gradient that it had given to `mean`; await the mean, or the gradient before it"
    )
