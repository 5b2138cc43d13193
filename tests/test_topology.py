"""Mixing matrices against their closed forms."""

import numpy as np
import pytest

from starling.topology import complete, identity, is_doubly_stochastic, spectral_gap


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_the_complete_graph_mixes_at_once_and_the_identity_never(world: int) -> None:
    """Eigenvalues other than the mean's are all 0, or all 1."""
    assert spectral_gap(complete(world)) == pytest.approx(1.0)
    assert spectral_gap(identity(world)) == pytest.approx(1.0 if world == 1 else 0.0)


def test_a_ring_has_the_gap_of_its_closed_form() -> None:
    """The eigenvalues of the ring with 1/3 each are (1 + 2 cos(2 pi j / L)) / 3."""
    world = 8
    ring = (identity(world) + np.roll(identity(world), 1, axis=0) + np.roll(identity(world), -1, axis=0)) / 3
    expected = 1 - max(abs(1 + 2 * np.cos(2 * np.pi * j / world)) / 3 for j in range(1, world))
    assert spectral_gap(ring) == pytest.approx(expected)


def test_a_matrix_that_moves_the_mean_is_refused() -> None:
    """A column that does not sum to 1 is not a mixing that conserves the mean."""
    mixing = complete(3)
    mixing[0, 0] += 0.1
    assert not is_doubly_stochastic(mixing)
    with pytest.raises(ValueError, match="doubly stochastic"):
        spectral_gap(mixing)
