"""A published wav2vec 2.0 encoder, by `transformers`, with CTC outputs of our own."""

import torch
from torch import nn

from starling.errors import ConfigError
from starling.extras import require
from starling.speech.models.published import PublishedNetwork
from starling.speech.models.shape import Wav2Vec2Shape
from starling.speech.models.subsampling import frame_mask


class Wav2Vec2Ctc(PublishedNetwork):
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

    def published_part(self) -> tuple[nn.Module, type, str]:
        """As for `PublishedNetwork`."""
        return self.wav2vec2, type(self.wav2vec2), ""
