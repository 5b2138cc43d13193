"""Initialises a recogniser with the weights of another experiment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from starling.errors import ConfigError
from starling.speech.recogniser import Recogniser
from starling.speech.trained import load_newest
from starling.training.freezing import OUTPUT, OUTPUTS, PHONES

_ROW_BLOCKS = {".weight_ih_l": 4, ".weight_hh_l": 4, ".bias_ih_l": 4, ".bias_hh_l": 4, ".attention.inputs.": 3}
"""Parts of names, and the blocks of rows that such parameters have: the gates of an LSTM; queries, keys and values."""
_OF_FEATURES = ("subsampling.convolutions.0.weight", "subsampling.projection.weight", "window.weight")
"""Parameters with a column for each feature. If the features differ, no column has the same meaning."""
_LISTED = 6


@dataclass
class _Taken:
    """What was taken over, by name."""

    in_part: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    num_values: int = 0


def warm_start(recogniser: Recogniser, source: Path, sizes: Literal["strict", "partial"] = "strict") -> list[str]:
    """Load the weights of an experiment's newest model, a checkpoint or a recogniser's folder into `recogniser`; return
    lines that say what was taken.

    Of the outputs, the rows of tokens and phones that both models have are copied, matched by name. With `partial`
    sizes, a parameter whose size differs from its counterpart's takes the part that overlaps, separately for each gate
    of an LSTM and each direction of a bidirectional one. Weights from new units to old ones are set to zero, so
    that added units do not change old ones. Parameters of layers that the source does not have stay as they are.

    Raises:
        ConfigError: `sizes` is strict and some sizes differ, which the message lists; or nothing fits.
        CheckpointError: `source` has no model.
    """
    other = load_newest(source)
    own, theirs = recogniser.model.state_dict(), other.model.state_dict()
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
    taken = _Taken()
    has_other_features = recogniser.features.num_features != other.features.num_features
    directions = 2 if all(each.model_config.name.startswith("blstm") for each in (recogniser, other)) else 1
    for name, value in own.items():
        if name.startswith(OUTPUTS):
            continue
        if name not in theirs or (has_other_features and name in _OF_FEATURES and value.ndim < 4):
            taken.new.append(name)
        elif value.shape == theirs[name].shape:
            value.copy_(theirs[name])
            taken.num_values += value.numel()
        else:
            _overlap(name, value, theirs[name], directions, taken)
    output = _output(recogniser, other, own, theirs, directions, taken)
    if recogniser.phones is not None:
        there = other.phones.names if other.phones is not None else []
        _take_rows(PHONES, _alike(recogniser.phones.names, there), own, theirs, directions, taken)
    if not taken.num_values:
        raise ConfigError(f"warm_start: nothing of {source} fits this recipe's model; use the same model.name")
    recogniser.model.load_state_dict(own)
    return [
        f"warm start from {source}: {taken.num_values:,} of {sum(value.numel() for value in own.values()):,} numbers"
        f"{output}{_rates(recogniser, other)}",
        *_in_part(taken, sorted(theirs.keys() - own.keys())),
    ]


def _output(
    recogniser: Recogniser,
    other: Recogniser,
    own: dict[str, Tensor],
    theirs: dict[str, Tensor],
    directions: int,
    taken: _Taken,
) -> str:
    """Take the rows of the output layer that mean the same, and describe that."""
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
    _take_rows(OUTPUT, rows, own, theirs, directions, taken)
    mine = {row for row, _ in rows}
    new = [repr(name) for row, name in enumerate(names) if row not in mine]
    if not new:
        return ""
    listed = ", ".join(new[:_LISTED]) + (", …" if len(new) > _LISTED else "")
    return f"; in the output layer {len(rows) - 1} of {len(names) - 1} tokens keep their rows; new: {listed}"


def _alike(names: Sequence[str], there: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of rows, in `names` and in `there`, of the outputs that both have."""
    places = {name: row for row, name in enumerate(there)}
    return [(row, places[name]) for row, name in enumerate(names) if name in places]


def _take_rows(
    prefix: str,
    rows: Sequence[tuple[int, int]],
    own: dict[str, Tensor],
    theirs: dict[str, Tensor],
    directions: int,
    taken: _Taken,
) -> None:
    """Copy the paired rows from `theirs` to `own`, in all parameters whose names start with `prefix`."""
    mine, source = torch.tensor([row for row, _ in rows]), torch.tensor([row for _, row in rows])
    for name in (each for each in own if each.startswith(prefix)):
        if name not in theirs or own[name].shape[1:].numel() == 0 or own[name].ndim != theirs[name].ndim:
            taken.new.append(name)
            continue
        value, given = own[name][mine], theirs[name][source]
        if value.shape == given.shape:
            value = given
            taken.num_values += value.numel()
        else:
            _overlap(name, value, given, directions, taken)
        own[name][mine] = value


def _overlap(name: str, value: Tensor, given: Tensor, directions: int, taken: _Taken) -> None:
    """Copy what overlaps of `given` into `value`, and set the weights from new units to old ones to zero."""
    if value.ndim != given.ndim or value.shape[2:] != given.shape[2:]:
        taken.new.append(name)
        return
    rows = next((count for part, count in _ROW_BLOCKS.items() if part in name), 1)
    columns = directions if value.ndim > 1 and ".weight_hh_l" not in name and _is_behind_lstm(name) else 1
    mine, theirs = _blocks(value, rows, columns), _blocks(given, rows, columns)
    if mine is None or theirs is None:
        taken.new.append(name)
        return
    height, width = min(mine.shape[1], theirs.shape[1]), min(mine.shape[3], theirs.shape[3])
    mine[:, :height, :, width:] = 0
    mine[:, :height, :, :width] = theirs[:, :height, :, :width]
    taken.in_part[name] = f"{_shape(given)} of {_shape(value)}"
    taken.num_values += mine[:, :height, :, :width].numel()


def _is_behind_lstm(name: str) -> bool:
    """Whether the inputs of a BLSTM's parameter are the outputs of both directions."""
    return not name.startswith(("subsampling.", "layers.0."))


def _blocks(value: Tensor, rows: int, columns: int) -> Tensor | None:
    """A view `[rows, R, columns, C, …]` of a tensor; None if its size is no multiple of the blocks."""
    matrix = value if value.ndim > 1 else value[:, None]
    if matrix.shape[0] % rows or (value.ndim > 1 and matrix.shape[1] % columns):
        return None
    columns = columns if value.ndim > 1 else 1
    return matrix.view(rows, matrix.shape[0] // rows, columns, matrix.shape[1] // columns, *matrix.shape[2:])


def _in_part(taken: _Taken, unused: list[str]) -> list[str]:
    """Lines about what was not taken as it is."""
    lines = []
    for what, names in (
        ("taken in part", [f"{name} {sizes}" for name, sizes in taken.in_part.items()]),
        ("new", taken.new),
        ("not used", unused),
    ):
        if names:
            lines.append(
                f"{what}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" * (len(names) > _LISTED))
            )
    return lines


def _rates(recogniser: Recogniser, other: Recogniser) -> str:
    here, there = recogniser.features.sampling_rate, other.features.sampling_rate
    return "" if here == there else f"; it was trained at {there} Hz, this recipe has {here} Hz"


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
