"""The sizes of an acoustic model, and the named presets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Every size of a recogniser's network."""

    layers: int  # LSTM layers
    hidden: int  # units of an LSTM layer, per direction
    bottleneck: int  # units between the last LSTM layer and the outputs; 0: none
    channels: int  # output channels of every subsampling layer
    subsampling: int  # feature frames per encoder frame: 1, 2 or 4
    dropout: float  # before every LSTM layer but the first, and before the outputs


PRESETS: dict[str, ModelShape] = {
    "tiny": ModelShape(layers=1, hidden=32, bottleneck=0, channels=32, subsampling=4, dropout=0.0),
    "small": ModelShape(layers=2, hidden=128, bottleneck=0, channels=128, subsampling=4, dropout=0.1),
    "medium": ModelShape(layers=4, hidden=320, bottleneck=0, channels=256, subsampling=4, dropout=0.2),
    "ibm": ModelShape(layers=6, hidden=512, bottleneck=256, channels=256, subsampling=2, dropout=0.2),
}
