"""Which learners average in each round: mixing patterns, their matrices and spectra.

A mixing matrix T `[L, L]` has one column for each learner: column l holds the weights with which learner l mixes all
learners' models (W <- W T). It conserves the mean if it is doubly stochastic: no entry is negative, and all rows and
columns sum to 1. A `Topology` gives each learner its part of T_k, for every round k, without communication.
"""

from starling.topology.analysis import (
    accelerated_contraction,
    acceleration_constants,
    complete,
    distance_of_noise,
    expected_contraction,
    identity,
    is_connected,
    is_doubly_stochastic,
    mixing_product,
    spectral_gap,
)
from starling.topology.custom import check_pattern, custom, find_topology
from starling.topology.patterns import (
    PATTERNS,
    Matrix,
    Topology,
    complete_graph,
    exponential,
    hierarchical,
    lazy,
    pairs,
    random_ring,
    ring,
)

__all__ = [
    "PATTERNS",
    "Matrix",
    "Topology",
    "accelerated_contraction",
    "acceleration_constants",
    "check_pattern",
    "complete",
    "complete_graph",
    "custom",
    "distance_of_noise",
    "expected_contraction",
    "exponential",
    "find_topology",
    "hierarchical",
    "identity",
    "is_connected",
    "is_doubly_stochastic",
    "lazy",
    "mixing_product",
    "pairs",
    "random_ring",
    "ring",
    "spectral_gap",
]
