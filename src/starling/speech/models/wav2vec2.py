"""A published wav2vec 2.0 encoder, by `transformers`, with CTC outputs of our own."""

from pathlib import Path

import torch
from torch import nn

from starling.errors import ConfigError
from starling.extras import require
from starling.speech.models.network import Network
from starling.speech.models.shape import Wav2Vec2Shape
from starling.speech.models.subsampling import frame_mask


class Wav2Vec2Ctc(Network):
    """`transformers.Wav2Vec2Model` on waveforms, dropout, CTC outputs.

    Source: Baevski et al. 2020, "wav2vec 2.0" (arXiv 2006.11477). Its random masks and skipped layers are switched off:
    they are for training on audio without texts. A checkpoint whose convolutions have a group norm
    (`feat_extract_norm: group`) hears the padding, as it did when it was trained; one with layer norms does not.
    """

    def __init__(self, shape: Wav2Vec2Shape, num_features: int, vocab_size: int) -> None:
        require("huggingface", "model.name: wav2vec2", ("transformers",))
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        super().__init__()
        if num_features != 1:
            raise ConfigError("model.name: wav2vec2 hears waveforms: set features.kind: raw")
        config = Wav2Vec2Config.from_dict({**(shape.encoder or {}), "layerdrop": 0.0, "apply_spec_augment": False})
        self.has_mask = config.feat_extract_norm == "layer"
        self.shape = shape
        self.wav2vec2 = Wav2Vec2Model(config)
        self.dropout = nn.Dropout(shape.dropout)
        self.output = nn.Linear(config.hidden_size, vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Frames `[B, T', output.in_features]` and lengths `[B]` of samples `[B, T, 1]` and lengths `[B]`."""
        inside = frame_mask(lengths, features.shape[1])
        samples = features.masked_fill(~inside, 0.0)[:, :, 0]
        mask = inside[:, :, 0].long() if self.has_mask else None
        frames = self.wav2vec2(samples, attention_mask=mask).last_hidden_state
        for kernel, stride in self.shape.convolutions:
            lengths = (lengths - kernel) // stride + 1
        return self.dropout(frames), lengths


def load_published(network: nn.Module, checkpoint: Path) -> str:
    """Load the encoder's weights from a folder in the format of `transformers`, and say so. Nothing is downloaded.

    Raises ConfigError for a network of another kind, and for a folder without fitting weights in safetensors.
    """
    if not isinstance(network, Wav2Vec2Ctc):
        raise ConfigError(f"model.checkpoint: {type(network).__name__} has no published checkpoints; leave it out")
    from transformers import Wav2Vec2Model

    try:
        published, found = Wav2Vec2Model.from_pretrained(
            checkpoint,
            config=network.wav2vec2.config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.checkpoint: {checkpoint} cannot be read: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"model.checkpoint: {checkpoint} lacks {len(missing)} tensors, such as {missing[0]}")
    state = published.state_dict()
    network.wav2vec2.load_state_dict(state)
    return f"checkpoint {checkpoint}: {sum(each.numel() for each in state.values()):,} numbers of the encoder"
