"""Muon for the matrices of a model, and AdamW for the rest; as the inner optimizer of DiLoCo, too."""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import starling
from starling.errors import ConfigError
from starling.toy import regression
from starling.training.job import Job
from starling.training.muon import Muon

CONSTANTS = {"lr": 0.02, "weight_decay": 0.05}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.Flatten(), nn.Linear(20, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], num_steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        model.zero_grad()
        model(torch.randn(6, 3, 5, generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw() -> None:
    """To the bit; both from torch."""
    one, two = network(), network()
    train(one, [Muon(list(one.parameters()), **CONSTANTS)], 5)
    matrices = [each for each in two.parameters() if each.ndim == 2]
    others = [each for each in two.parameters() if each.ndim != 2]
    muon = torch.optim.Muon(matrices, **CONSTANTS, adjust_lr_fn="match_rms_adamw")
    train(two, [muon, torch.optim.AdamW(others, **CONSTANTS, fused=True)], 5)
    assert (len(matrices), len(others)) == (2, 6)
    assert torch.equal(weights(one), weights(two))


def test_it_continues_from_its_saved_state() -> None:
    one = network()
    optimizer = Muon(list(one.parameters()), **CONSTANTS)
    train(one, [optimizer], 3)
    two, saved = copy.deepcopy(one), copy.deepcopy(optimizer.state_dict())
    other = Muon(list(two.parameters()), lr=1.0)
    other.load_state_dict(saved)
    for model, its in ((one, optimizer), (two, other)):
        train(model, [its], 2, seed=1)
    assert torch.equal(weights(one), weights(two))


@pytest.mark.parametrize("model", [nn.Linear(4, 2, bias=False), nn.LayerNorm(4)], ids=["matrices", "vectors"])
def test_a_model_may_have_only_one_kind_of_parameters(model: nn.Module) -> None:
    before = weights(model)
    optimizer = Muon(list(model.parameters()), **CONSTANTS)
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weights(model), before)


def job(strategy: str, **options: object) -> Job:
    maker = partial(Muon, lr=0.2, weight_decay=0.0)
    return dataclasses.replace(regression(strategy, **options), make_optimizer=maker)


@pytest.mark.parametrize("compression", ["none", "int8", "int4", "int2"])
def test_muon_inside_diloco_learns_and_its_processes_are_replayed_to_the_bit(compression: str, tmp_path: Path) -> None:
    whole = job("diloco", every=4, momentum=0.6, compression=compression)
    assert starling.simulate(whole, learners=2).loss() < 2.0
    trained = starling.train(whole, learners=2, name="muon", exp=tmp_path)
    assert starling.replay(whole, trained.folder).states.keys() == {0, 1}


def test_a_shard_with_parts_of_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="Muon needs whole matrices, and a shard has parts of them; use one shard"):
        starling.simulate(job("parameter-server", shards=2), learners=2)
    starling.simulate(job("parameter-server"), learners=2)
