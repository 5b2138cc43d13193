"""How a model's weights lie in one vector."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from starling.training.flat import CUDNN_ALIGNMENT, FlatModel, avoid_cudnn_packing, split, trainable

CPU = torch.device("cpu")


class Network(nn.Module):
    """A projection, a recurrent module and an output layer."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.before = nn.Linear(16, recurrent.input_size, bias=False)
        self.recurrent = recurrent
        self.after = nn.Linear(recurrent.hidden_size * (2 if recurrent.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        found: Tensor = self.after(self.recurrent(self.before(x))[0])
        return found


KINDS = {
    "lstm": lambda: nn.LSTM(16, 16, num_layers=3, bidirectional=True),
    "gru": lambda: nn.GRU(16, 16, num_layers=2),
    "rnn": lambda: nn.RNN(16, 16),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def cudnn_offsets(module: nn.RNNBase) -> dict[str, int]:
    """Where cuDNN expects each parameter from the beginning of its weights, in numbers: the matrices of all layers and
    directions, then the biases of all."""
    offsets, next_free = {}, 0
    for what in ("weight", "bias"):
        for layer in range(module.num_layers):
            for direction in ("", "_reverse")[: 1 + module.bidirectional]:
                for gate in ("ih", "hh"):
                    name = f"{what}_{gate}_l{layer}{direction}"
                    offsets[name] = next_free
                    next_free += getattr(module, name).numel()
    return offsets


def is_taken_as_it_is(module: nn.RNNBase) -> bool:
    """What torch asks before it packs weights for cuDNN (`try_get_weight_buf` in aten/src/ATen/native/cudnn)."""
    first, offsets = module._flat_weights[0], cudnn_offsets(module)
    begin, size = first.untyped_storage().data_ptr(), first.element_size()
    needed = sum(each.numel() for each in module.parameters()) * size
    return first.untyped_storage().nbytes() >= needed and all(
        parameter.data_ptr() == begin + offsets[name] * size for name, parameter in module.named_parameters()
    )


def flat_on_aligned_memory(model: nn.Module) -> FlatModel:
    """As a device would give it; the CPU aligns to less."""
    flat = FlatModel(model, CPU)
    memory = torch.empty(len(flat.weights) + CUDNN_ALIGNMENT)
    start = -memory.data_ptr() % CUDNN_ALIGNMENT // memory.element_size()
    flat.use_weights(memory[start : start + len(flat.weights)].copy_(flat.weights))
    avoid_cudnn_packing(model, flat.weights)
    return flat


@every_kind
def test_cudnn_takes_recurrent_weights_as_they_are(kind: str) -> None:
    """They are in one vector with all others, and look like memory of their own."""
    model = Network(KINDS[kind]())
    flat = FlatModel(model, CPU)
    assert not is_taken_as_it_is(model.recurrent)  # their storage begins with another layer's weights
    flat = flat_on_aligned_memory(model)
    assert is_taken_as_it_is(model.recurrent)
    begin, size = flat.weights.data_ptr(), flat.weights.element_size()
    ends = [parameter.data_ptr() + parameter.numel() * size for parameter in flat.parameters]
    assert [begin, *ends[:-1]] == [parameter.data_ptr() for parameter in flat.parameters]


@every_kind
def test_training_continues_in_the_flat_vector(kind: str) -> None:
    """A step of the optimizer changes the vector, and a change of the vector is what the next forward sees, although
    forward calls flatten_parameters."""
    torch.manual_seed(1)
    model = Network(KINDS[kind]())
    twin = copy.deepcopy(model)
    flat = flat_on_aligned_memory(model)
    x = torch.randn(5, 2, 16)
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(x).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for part, parameter in zip(split(flat.weights, flat.parameters), flat.parameters, strict=True):
        assert torch.equal(part, parameter)
    flat.weights.zero_()
    assert not model(x).any()


def test_one_order_holds_for_all_and_repeats_nothing() -> None:
    """Matrices come before biases within a recurrent module; all else is in the order of `parameters()`."""
    model = Network(nn.LSTM(16, 16, num_layers=2))
    model.after.weight = model.before.weight = nn.Parameter(torch.zeros(16, 16))  # tied
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for parameter in trainable(model)]
    recurrent = [name for name in names.values() if name.startswith("recurrent.")]
    assert sorted(order) == sorted(names.values())
    assert order == [
        "before.weight",
        *(name for name in recurrent if ".weight" in name),
        *(name for name in recurrent if ".bias" in name),
        "after.bias",
    ]


@pytest.mark.parametrize(
    "recurrent", [nn.LSTM(16, 16, bias=False), nn.LSTM(16, 16, proj_size=4)], ids=["no biases", "projection"]
)
def test_what_cudnn_lays_out_otherwise_is_left_to_it(recurrent: nn.RNNBase) -> None:
    """It works as before; cuDNN packs."""
    model = nn.ModuleList([recurrent])
    flat = flat_on_aligned_memory(model)
    storage = flat.weights.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == storage for each in recurrent.parameters())


def test_weights_at_an_odd_address_are_left_to_cudnn() -> None:
    """It never sees memory that is aligned to less than what CUDA allocates."""
    model = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.LSTM(16, 16)])
    flat = flat_on_aligned_memory(model)
    assert not is_taken_as_it_is(model[1])
    assert torch.equal(flat.weights, torch.cat([each.detach().reshape(-1) for each in trainable(model)]))


def test_frozen_weights_of_a_module_stay_where_they_are() -> None:
    """They are not in the vector, and nothing moves the others out of it."""
    model = nn.ModuleList([nn.LSTM(16, 16)])
    model[0].bias_hh_l0.requires_grad_(False)
    flat = FlatModel(model, CPU)
    frozen = model[0].bias_hh_l0.data_ptr()
    avoid_cudnn_packing(model, flat.weights)
    assert model[0].bias_hh_l0.data_ptr() == frozen
    model[0].flatten_parameters()
    assert torch.equal(flat.weights, torch.cat([each.detach().reshape(-1) for each in trainable(model)]))
    assert model[0].weight_ih_l0.data_ptr() == flat.weights.data_ptr()


def test_a_model_that_cudnn_knows_can_be_copied_and_pickled() -> None:
    """By its user; the copy has memory of its own."""
    model = Network(nn.LSTM(16, 16, num_layers=2))
    flat_on_aligned_memory(model)
    x = torch.randn(5, 2, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        assert torch.equal(other(x), model(x))
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(other.parameters(), model.parameters(), strict=True))
