"""The drop-in in a loop on a CUDA device: recurrent modules, bfloat16, and float16 with a GradScaler."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import starling
from starling.training.flat import trainable

STEPS = 12
REPACKED = "RNN module weights are not part of single contiguous chunk of memory"


class Recogniser(nn.Module):
    """Recurrent layers between others; forward calls flatten_parameters, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 64)
        self.recurrent = nn.LSTM(64, 64, num_layers=2, bidirectional=True)
        self.after = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        found: Tensor = self.after(self.recurrent(self.before(x))[0])
        return found


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    return Recogniser().to(device)


def batch(step: int, device: torch.device) -> Tensor:
    return torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(step)).to(device)


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "dpsgd"])
def test_no_forward_packs_recurrent_weights_anew(strategy: str, model: nn.Module, device: torch.device) -> None:
    """cuDNN takes them where Starling keeps them, and training is the plain loop's."""
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=REPACKED)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with starling.join(model, optimizer, strategy) as learner:
            for step in range(STEPS):
                optimizer.zero_grad()
                model(batch(step, device)).square().mean().backward()
                learner.step()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        twin(batch(step, device)).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(trainable(model), trainable(twin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_packing_anew_would_be_seen(cuda: torch.device) -> None:
    """The warning that the test above forbids is there when weights lie in memory with others."""
    module = nn.LSTM(64, 64, num_layers=2).to(cuda)
    together = torch.cat([each.detach().reshape(-1) for each in (torch.zeros(64, device=cuda), *module.parameters())])
    start = 64
    for each in module.parameters():
        each.data = together[start : start + each.numel()].view(each.shape)
        start += each.numel()
    with pytest.warns(UserWarning, match=REPACKED):
        module(torch.randn(5, 2, 64, device=cuda))


def test_bfloat16_trains_in_a_joined_loop(model: nn.Module, device: torch.device) -> None:
    """Autocast around forward; weights and averages stay float32."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    with starling.join(model, optimizer, "adpsgd") as learner:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(batch(0, device)).square().mean()
            loss.backward()
            learner.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_float16_with_a_scaler_trains_and_skips_what_overflows(model: nn.Module, device: torch.device) -> None:
    """A scale that is far too large at first: the first steps are skipped and change nothing."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24)
    with starling.join(model, optimizer, "adpsgd") as learner:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(60):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                loss = model(batch(0, device)).square().mean()
            scaler.scale(loss).backward()
            learner.step(scaler=scaler)
            scaler.update()
            losses.append(loss.item())
            if step == 0:
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() < 2.0**24
    assert losses[-1] < losses[0] / 2
