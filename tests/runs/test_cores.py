"""The number of cores that a process may use."""

import os

import pytest

from starling.engines.processes.place import NODE_CPUS, cores_here


def test_a_learner_on_ray_uses_no_more_cores_than_its_node_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with two CPUs runs on a machine with many: threads for all of them would fight for two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.delenv(NODE_CPUS, raising=False)
    assert cores_here() == 64
    monkeypatch.setenv(NODE_CPUS, "2")
    assert cores_here() == 2
    monkeypatch.setenv(NODE_CPUS, "128")
    assert cores_here() == 64
