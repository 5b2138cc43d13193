"""Initialises a recogniser with the weights of another experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from starling.errors import ConfigError, some
from starling.speech.recogniser import Recogniser
from starling.speech.trained import load_newest
from starling.training.freezing import OUTPUT, OUTPUTS, PHONES

_ROW_BLOCKS = {".weight_ih_l": 4, ".weight_hh_l": 4, ".bias_ih_l": 4, ".bias_hh_l": 4, ".attention.inputs.": 3}
"""Number of blocks of rows in parameters, by parts of their names: the gates of an LSTM; queries, keys and values."""
_OF_FEATURES = ("subsampling.convolutions.0.weight", "subsampling.projection.weight", "window.weight")
"""Parameters with a column for each feature. If the features differ, no column has the same meaning."""
_LISTED = 6


def warm_start(recogniser: Recogniser, source: Path, sizes: Literal["strict", "partial"] = "strict") -> list[str]:
    """Load the weights of an experiment's newest model, a checkpoint or a recogniser's folder into `recogniser`; return
    lines that report what was taken.

    The output rows of tokens and phones that both models have are copied, matched by name. With `partial` sizes, a
    parameter whose size differs from its counterpart's takes the part that overlaps, separately for each gate of an
    LSTM and each direction of a bidirectional one. Weights from new units to old ones are set to zero, so that added
    units do not change old ones. Parameters of layers that the source does not have stay unchanged.

    Raises:
        ConfigError: `sizes` is strict and some sizes differ, which the message lists; or nothing fits.
        CheckpointError: `source` has no model.
    """
    other = load_newest(source)
    transfer = _Transfer(recogniser, other)
    own, theirs = transfer.own, transfer.theirs
    problems = [
        f"{name} is {_shape(own.get(name))} here, {_shape(theirs.get(name))} there"
        for name in sorted(own.keys() | theirs.keys())
        if not name.startswith(OUTPUTS)
        and (name not in own or name not in theirs or own[name].shape != theirs[name].shape)
    ]
    if problems and sizes == "strict":
        raise ConfigError(
            f"warm_start: {source} does not fit this recipe's model: only the outputs may differ, but "
            f"{len(problems)} other tensors do: {'; '.join(problems[:3])}; copy its model: and features: sections, or "
            "take what fits with warm_start.sizes: partial"
        )
    has_other_features = recogniser.features.num_features != other.features.num_features
    for name in own:
        if name.startswith(OUTPUTS):
            continue
        if name not in theirs or (has_other_features and name in _OF_FEATURES and own[name].ndim < 4):
            transfer.new.append(name)
        else:
            transfer.take(name, own[name], theirs[name])
    output = _output(recogniser, other, transfer)
    if recogniser.phones is not None:
        there = other.phones.outputs if other.phones is not None else []
        transfer.take_rows(PHONES, _alike(recogniser.phones.outputs, there))
    if not transfer.num_values:
        raise ConfigError(f"warm_start: nothing of {source} fits this recipe's model; use the same model.name")
    recogniser.model.load_state_dict(own)
    here, rate = recogniser.features.sampling_rate, other.features.sampling_rate
    rates = "" if here == rate else f"; it was trained at {rate} Hz, this recipe has {here} Hz"
    return [
        f"warm start from {source}: {transfer.num_values:,} of {sum(value.numel() for value in own.values()):,} numbers"
        f"{output}{rates}",
        *transfer.in_part_lines(),
    ]


class _Transfer:
    """Copies parameters of another model, and records by name what was taken."""

    def __init__(self, recogniser: Recogniser, other: Recogniser) -> None:
        self.own, self.theirs = recogniser.model.state_dict(), other.model.state_dict()
        self.in_part: dict[str, str] = {}
        self.new: list[str] = []
        self.num_values = 0
        self._directions = 2 if all(each.model_config.name.startswith("blstm") for each in (recogniser, other)) else 1

    def take_rows(self, prefix: str, rows: Sequence[tuple[int, int]]) -> None:
        """Copy the paired rows of all parameters whose names start with `prefix`."""
        mine, source = torch.tensor([row for row, _ in rows]), torch.tensor([row for _, row in rows])
        for name in (each for each in self.own if each.startswith(prefix)):
            own = self.own[name]
            if name not in self.theirs or own.shape[1:].numel() == 0 or own.ndim != self.theirs[name].ndim:
                self.new.append(name)
                continue
            value = own[mine]
            self.take(name, value, self.theirs[name][source])
            own[mine] = value

    def take(self, name: str, value: Tensor, given: Tensor) -> None:
        """Copy `given` into `value`. If their sizes differ, copy the part that overlaps, and set weights from new units
        to old ones to zero."""
        if value.shape == given.shape:
            value.copy_(given)
            self.num_values += value.numel()
            return
        if value.ndim != given.ndim or value.shape[2:] != given.shape[2:]:
            self.new.append(name)
            return
        rows = next((count for part, count in _ROW_BLOCKS.items() if part in name), 1)
        is_behind_lstm = not name.startswith(("subsampling.", "layers.0."))  # hears the outputs of both directions
        columns = self._directions if value.ndim > 1 and ".weight_hh_l" not in name and is_behind_lstm else 1
        mine, theirs = _blocks(value, rows, columns), _blocks(given, rows, columns)
        if mine is None or theirs is None:
            self.new.append(name)
            return
        height, width = min(mine.shape[1], theirs.shape[1]), min(mine.shape[3], theirs.shape[3])
        mine[:, :height, :, width:] = 0
        mine[:, :height, :, :width] = theirs[:, :height, :, :width]
        self.in_part[name] = f"{_shape(given)} of {_shape(value)}"
        self.num_values += mine[:, :height, :, :width].numel()

    def in_part_lines(self) -> list[str]:
        """Lines about parameters that were not taken unchanged."""
        found = {
            "taken in part": [f"{name} {sizes}" for name, sizes in self.in_part.items()],
            "new": self.new,
            "not used": sorted(self.theirs.keys() - self.own.keys()),
        }
        return [f"{what}: {some(names, _LISTED)}" for what, names in found.items() if names]


def _output(recogniser: Recogniser, other: Recogniser, transfer: _Transfer) -> str:
    """Take the rows of the output layer that mean the same, and return a description of this."""
    if recogniser.states is not None or other.states is not None:
        if recogniser.states is None or not recogniser.states.means_the_same(other.states):
            states = recogniser.states
            what = f"{recogniser.tokenizer.vocab_size} tokens" if states is None else f"{states.num_states} states"
            return f"; the output layer is new, for {what}"
        rows = [(row, row) for row in range(recogniser.states.num_states)]
        names = []
    else:
        names = recogniser.tokenizer.names
        rows = _alike(names, other.tokenizer.names)
    transfer.take_rows(OUTPUT, rows)
    mine = {row for row, _ in rows}
    new = [repr(name) for row, name in enumerate(names) if row not in mine]
    if not new:
        return ""
    kept = f"in the output layer {len(rows) - 1} of {len(names) - 1} tokens keep their rows"
    return f"; {kept}; new: {some(new, _LISTED)}"


def _alike(names: Sequence[str], there: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of rows, in `names` and in `there`, for the outputs that both have."""
    places = {name: row for row, name in enumerate(there)}
    return [(row, places[name]) for row, name in enumerate(names) if name in places]


def _blocks(value: Tensor, rows: int, columns: int) -> Tensor | None:
    """A view `[rows, R, columns, C, …]` of a tensor; None if its size is not a multiple of the blocks."""
    matrix = value if value.ndim > 1 else value[:, None]
    if matrix.shape[0] % rows or matrix.shape[1] % columns:
        return None
    return matrix.view(rows, matrix.shape[0] // rows, columns, matrix.shape[1] // columns, *matrix.shape[2:])


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
