"""`import starling` is quick, and its public names exist."""

import subprocess
import sys

import pytest

import starling


def test_every_public_name_exists_and_is_documented() -> None:
    """They are loaded when they are first used."""
    for name in starling.__all__:
        assert getattr(starling, name).__doc__, name
    assert dir(starling) == sorted(starling.__all__)


def test_what_a_strategy_from_outside_needs_is_public() -> None:
    """Its contract, its options, its facts, and a pattern of its own."""
    assert {"Learner", "Handle", "Config", "Strategy", "Topology"} <= set(starling.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """That lists the known ones."""
    with pytest.raises(AttributeError, match=r"has no attribute 'Workloads'; it has .*Workload"):
        _ = starling.Workloads  # type: ignore[attr-defined]


def test_importing_starling_loads_nothing_else() -> None:
    """Not torch, for one."""
    code = "import sys, starling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
