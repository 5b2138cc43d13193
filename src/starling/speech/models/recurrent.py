"""The sizes of `blstm` and `lstm`, and their presets."""

from dataclasses import dataclass

from starling.speech.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class RecurrentShape(ModelShape):
    """Every size of a stack of LSTM layers; dropout is before every layer but the first, and before the outputs."""

    layers: int  # LSTM layers
    hidden: int  # units of an LSTM layer, per direction
    bottleneck: int  # units between the last LSTM layer and the outputs; 0: none
    channels: int  # output channels of every subsampling layer


PRESETS = {
    "tiny": RecurrentShape(layers=1, hidden=32, bottleneck=0, channels=32, subsampling=4, dropout=0.0),
    "small": RecurrentShape(layers=2, hidden=128, bottleneck=0, channels=128, subsampling=4, dropout=0.1),
    "medium": RecurrentShape(layers=4, hidden=320, bottleneck=0, channels=256, subsampling=4, dropout=0.2),
    "ibm": RecurrentShape(layers=6, hidden=512, bottleneck=256, channels=256, subsampling=2, dropout=0.2),
}
