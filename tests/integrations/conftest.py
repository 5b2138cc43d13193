"""What the tests of other libraries' trainers share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from tests.integrations.host_process import run


@dataclass(frozen=True)
class Outcome:
    """What cases left in a folder."""

    folder: Path
    codes: dict[str, list[int]]
    """The exit codes of each case's processes."""

    @property
    def said(self) -> str:
        return (self.folder / "learner-0.log").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Of all cases that are no soak; the libraries are loaded once for all."""
    folder = tmp_path_factory.mktemp("hosts")
    cases = [f"lightning:{case}:2" for case in ("page", "equal", "train", "fail", "sampler", "resume")]
    cases += [f"huggingface:{case}:2" for case in ("page", "equal", "train", "fail", "resume")]
    cases += [f"huggingface:{case}:2" for case in ("accelerated", "accelerated_resume")]
    cases += ["lightning:survive:3", "huggingface:survive:3", "huggingface:accelerated_survive:3"]
    return Outcome(folder, run(folder, *cases))


@pytest.fixture
def check_accuracies() -> Callable[[dict[str, list[float]]], None]:
    return _check_accuracies


def _check_accuracies(found: dict[str, list[float]]) -> None:
    """Others train as well as DDP: a 95 % interval of the difference of means over seeds contains 0 or more, and it is
    0.05 at most; DDP has learnt the task."""
    assert min(found["ddp"]) > 0.5, found
    for name in set(found) - {"ddp"}:
        difference: Any = stats.ttest_ind(found[name], found["ddp"], equal_var=False).confidence_interval(0.95)
        assert difference.high >= 0.0, (name, found)
        assert torch.tensor(found[name]).mean() >= torch.tensor(found["ddp"]).mean() - 0.05, (name, found)
