"""`import starling` is quick and offers what it says."""

import subprocess
import sys

import pytest

import starling


def test_every_public_name_is_there_and_documented() -> None:
    """Loaded when asked for."""
    for name in starling.__all__:
        assert getattr(starling, name).__doc__, name
    assert dir(starling) == sorted(starling.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """That lists the known ones."""
    with pytest.raises(AttributeError, match=r"has no attribute 'Workloads'; it has .*Workload"):
        _ = starling.Workloads  # type: ignore[attr-defined]


def test_importing_starling_loads_nothing_else() -> None:
    """Not torch, for one."""
    code = "import sys, starling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
