"""How attention tells one frame's place from another's: by sinusoids, of places or of distances, or by rotations."""

import torch

_LONGEST_PERIOD = 10_000.0  # in frames, divided by 2 pi


def phases(num_frames: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """`[num_frames, size / 2]` angles in radians: frame p, pair i of units -> p * 10000^(-2i / size)."""
    pair = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    frame = torch.arange(num_frames, device=device, dtype=torch.float32)
    return torch.outer(frame, _LONGEST_PERIOD ** (-pair / size))


def sinusoids(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Absolute positions `[num_frames, width]`, to be added to the frames.

        PE(p, 2i) = sin(p / 10000^(2i / width)),    PE(p, 2i + 1) = cos(p / 10000^(2i / width))

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.5 (arXiv 1706.03762).
    """
    angles = phases(num_frames, width, device)
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def distances(num_frames: int, width: int, device: torch.device | None = None) -> torch.Tensor:
    """Sinusoids `[2 * num_frames - 1, width]` of the distances from 1 - num_frames to num_frames - 1 frames.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3 (arXiv 1901.02860).
    """
    angles = phases(num_frames, width, device)
    angles = torch.cat([-angles.flip(0)[:-1], angles])
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def rotate(vectors: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Queries or keys `[B, T, ..., D]`, each frame's turned by its `phases(T, D)`: rotary positions.

        <R_p q, R_s k> = <q, R_(s - p) k>

    Attention then sees only how far frames are apart, not where they stand; nothing is learned.
    Source: Su et al. 2021, "RoFormer: enhanced Transformer with rotary position embedding", section 3.2
    (arXiv 2104.09864). Unit i is paired with unit i + D / 2 here, not with its neighbour as there: another order of the
    units, with no interleaving.
    """
    angles = angles.view(angles.shape[0], *[1] * (vectors.ndim - 3), -1)
    cosines, sines = angles.cos(), angles.sin()
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
    return turned.to(vectors.dtype)
