"""The consensus distance is what its equation says."""

import numpy as np
import pytest
import torch

from starling.consensus import consensus_distance, rank_ordered_mean


def test_the_consensus_distance_is_the_mean_square_of_what_parts_learners_from_their_mean() -> None:
    """As NumPy computes it from the matrix with a column for each learner."""
    weights = [torch.randn(50, generator=torch.Generator().manual_seed(rank)) for rank in range(7)]
    columns = torch.stack(weights, dim=1).double().numpy()
    expected = np.square(columns - columns.mean(axis=1, keepdims=True)).sum() / 7
    assert consensus_distance(iter(weights), rank_ordered_mean(weights)) == pytest.approx(expected, rel=1e-6)


def test_learners_that_agree_have_no_distance() -> None:
    """Exactly none; and large weights do not overflow."""
    weights = [torch.full((3,), 3e19)] * 2
    assert consensus_distance(weights, weights[0]) == 0.0
    assert consensus_distance(weights, torch.zeros(3)) == pytest.approx(27e38)
