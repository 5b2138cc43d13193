"""The best path through states in a row, for many utterances at once."""

import torch
from torch import Tensor

NEVER = -torch.inf


def best_path(scores: Tensor, lengths: Tensor, optional: Tensor, num_positions: Tensor) -> Tensor:
    """The position of every frame on the path of the highest total score, `[B, T]` int64.

    A path begins at the first position and ends at the last; from frame to frame it stays, moves to the next position,
    or skips one that is optional. It may also leave out an optional first or last position. Of paths with the same
    score, the one that moves later. Behind an utterance's end its last position is repeated.

    Args:
        scores: Log-likelihood of position p at frame t, `[B, T, P]`.
        lengths: Frames of each utterance, `[B]`: at least as many as it has positions that are not optional.
        optional: `[B, P]`; no two positions in a row may be.
        num_positions: `[B]`.
    """
    count, num_frames, width = scores.shape
    never = scores.new_full((count, 2), NEVER)
    skips = torch.zeros_like(optional)
    skips[:, 2:] = optional[:, 1:-1]
    best = torch.full_like(scores[:, 0], NEVER)
    best[:, 0] = scores[:, 0, 0]
    if width > 1:
        best[:, 1] = torch.where(optional[:, 0], scores[:, 0, 1], NEVER)
    steps = torch.zeros(num_frames, count, width, dtype=torch.int8, device=scores.device)
    for frame in range(1, num_frames):
        behind = torch.cat([never, best], dim=1)  # behind[:, p + 2 - k] is where one comes from by k positions
        moved, skipped = behind[:, 1:-1], behind[:, :-2].masked_fill(~skips, NEVER)
        is_moved = moved > best
        following = torch.where(is_moved, moved, best)
        is_skipped = skipped > following
        following = torch.where(is_skipped, skipped, following) + scores[:, frame]
        inside = (frame < lengths)[:, None]
        best = torch.where(inside, following, best)
        steps[frame] = torch.where(is_skipped, 2, is_moved.to(torch.int8)) * inside
    rows = torch.arange(count, device=scores.device)
    place = num_positions - 1
    before = (place - 1).clamp(min=0)
    place = torch.where(optional[rows, place] & (best[rows, before] > best[rows, place]), before, place)
    path = torch.empty(count, num_frames, dtype=torch.int64, device=scores.device)
    for frame in range(num_frames - 1, -1, -1):
        path[:, frame] = place
        place = place - steps[frame, rows, place]
    return path
