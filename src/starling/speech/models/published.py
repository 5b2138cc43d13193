"""Published encoders, loaded with `transformers`, with Starling's CTC outputs."""

from pathlib import Path

import torch
from torch import nn

from starling.errors import ConfigError, DataError, require
from starling.speech.models.architectures import Wav2Vec2Config, WhisperConfig
from starling.speech.models.network import Network, frame_mask


class PublishedNetwork(Network):
    """A published encoder, dropout, and CTC outputs.

    Raises ConfigError if the inputs are features rather than waveforms, and MissingExtraError if `transformers` is not
    installed.
    """

    published: tuple[nn.Module, type, str]
    """The encoder; the class of `transformers` whose checkpoints contain the encoder; and the encoder's name in that
    class, which is empty if the encoder is the whole model."""

    def __init__(self, name: str, num_features: int) -> None:
        require("huggingface", f"model.name: {name}", ("transformers",))
        super().__init__()
        if num_features != 1:
            raise ConfigError(f"model.name: {name} needs waveforms as its input: set features.kind: raw")


def load_published(network: nn.Module, checkpoint: Path) -> str:
    """Load the encoder's weights from a folder in the format of `transformers` or from a model of the hub, and return a
    line that says so.

    Raises ConfigError if the network is not a published encoder, or if the checkpoint has no matching safetensors
    weights.
    """
    if not isinstance(network, PublishedNetwork):
        raise ConfigError(f"model.checkpoint: {type(network).__name__} has no published checkpoints; leave it out")
    encoder, kind, part = network.published
    name = checkpoint.as_posix()
    try:
        whole, found = kind.from_pretrained(  # type: ignore[attr-defined]
            name,
            config=encoder.config,
            use_safetensors=True,
            local_files_only=checkpoint.exists(),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model.checkpoint: {name} cannot be read: {error}") from error
    prefix = f"{part}." if part else ""
    if missing := sorted(each for each in found["missing_keys"] if each.startswith(prefix)):
        raise ConfigError(f"model.checkpoint: {name} lacks {len(missing)} tensors, such as {missing[0]}")
    state = whole.get_submodule(part).state_dict()
    encoder.load_state_dict(state)
    return f"checkpoint {name}: {sum(each.numel() for each in state.values()):,} parameters of the encoder"


class Wav2Vec2Ctc(PublishedNetwork):
    """`transformers.Wav2Vec2Model`, applied to waveforms, with dropout and CTC outputs.

    Source: Baevski et al. 2020, "wav2vec 2.0" (arXiv 2006.11477). Its random masks and skipped layers are switched off,
    because they serve training on audio without texts. A checkpoint whose convolutions have a group norm
    (`feat_extract_norm: group`) is affected by the padding, as in its training; one with layer norms is not affected.
    """

    def __init__(self, config: Wav2Vec2Config, num_features: int, vocab_size: int) -> None:
        super().__init__(config.name, num_features)
        import transformers

        theirs = transformers.Wav2Vec2Config.from_dict(
            {**config.encoder, "layerdrop": 0.0, "apply_spec_augment": False}
        )
        self.has_mask = theirs.feat_extract_norm == "layer"
        self.convolutions = config.convolutions
        self.wav2vec2 = transformers.Wav2Vec2Model(theirs)
        self.published = self.wav2vec2, transformers.Wav2Vec2Model, ""
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(theirs.hidden_size, vocab_size)

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map samples `[B, T, 1]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`."""
        inside = frame_mask(lengths, features.shape[1])
        samples = features.masked_fill(~inside, 0.0)[:, :, 0]
        mask = inside[:, :, 0].long() if self.has_mask else None
        frames = self.wav2vec2(samples, attention_mask=mask).last_hidden_state
        for kernel, stride in self.convolutions:
            lengths = (lengths - kernel) // stride + 1
        return self.dropout(frames), lengths


_WINDOW, _HOP = 400, WhisperConfig.HOP  # samples, 25 and 10 ms at 16 kHz
_RANGE = 8.0  # features are clipped this many powers of ten below an utterance's highest energy


class WhisperCtc(PublishedNetwork):
    """Whisper's log-mel features and encoder, applied to waveforms, with dropout and CTC outputs.

    Source: Radford et al. 2022, "Robust speech recognition via large-scale weak supervision" (arXiv 2212.04356). Like
    icefall's recipes, we depart from the paper in the length of utterances. Whisper pads each utterance with silence to
    30 s. Here, an utterance keeps its length, uses the first of Whisper's positions, and is not affected by the padding
    of its batch. For a waveform of exactly 30 s, the outputs equal those of `transformers`.
    """

    def __init__(self, config: WhisperConfig, num_features: int, vocab_size: int) -> None:
        super().__init__(config.name, num_features)
        import transformers
        from transformers.audio_utils import mel_filter_bank
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        theirs = transformers.WhisperConfig.from_dict(config.encoder)
        self.whisper = WhisperEncoder(theirs)
        self.published = self.whisper, transformers.WhisperModel, "encoder"
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(theirs.d_model, vocab_size)
        bank = mel_filter_bank(1 + _WINDOW // 2, theirs.num_mel_bins, 0.0, 8000.0, 16_000, "slaney", "slaney")
        self.register_buffer("bank", torch.from_numpy(bank).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.bank: torch.Tensor  # [_WINDOW / 2 + 1, mel bands]
        self.window: torch.Tensor

    def encode(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map samples `[B, T, 1]` and lengths `[B]` to frames `[B, T', output.in_features]` and lengths `[B]`.

        Raises DataError for utterances longer than 30 s, for which the encoder has no positions.
        """
        encoder = self.whisper
        mel, lengths = self.log_mel(features[:, :, 0], lengths)
        frames = nn.functional.gelu(encoder.conv1(mel)) * frame_mask(lengths, mel.shape[2]).transpose(1, 2)
        frames = nn.functional.gelu(encoder.conv2(frames)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        positions = encoder.embed_positions.weight
        if frames.shape[1] > len(positions):
            seconds = len(positions) * 2 * _HOP / 16_000
            raise DataError(
                f"an utterance is longer than the {seconds:g} s that this Whisper model accepts: cut it, or filter it"
            )
        frames = frames + positions[: frames.shape[1]]
        frames = nn.functional.dropout(frames, encoder.dropout, self.training)
        mask = torch.zeros_like(frames[:, None, None, :, 0])
        mask = mask.masked_fill(~frame_mask(lengths, frames.shape[1])[:, None, None, :, 0], torch.finfo(mask.dtype).min)
        for layer in encoder.layers:
            frames = layer(frames, mask)
        return self.dropout(encoder.layer_norm(frames)), lengths

    def log_mel(self, samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whisper's features `[B, F, N]` of samples `[B, T]`, 0 in the padding, and their lengths `[B]` in frames."""
        samples = samples * frame_mask(lengths, samples.shape[1])[:, :, 0]
        edge = _WINDOW // 2
        mirrored = samples[:, 1 : edge + 1].flip(1)
        samples = nn.functional.pad(torch.cat([mirrored, samples], dim=1), (edge - mirrored.shape[1], edge))
        spectrum = torch.stft(samples, _WINDOW, _HOP, window=self.window, center=False, return_complex=True)
        lengths = lengths // _HOP
        power = torch.view_as_real(spectrum[:, :, : int(lengths.max())]).square().sum(-1)
        mel = (self.bank.T @ power).clamp(min=1e-10).log10()
        inside = frame_mask(lengths, mel.shape[2]).transpose(1, 2)
        loudest = mel.masked_fill(~inside, -torch.inf).amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(mel, loudest - _RANGE) + 4.0) / 4.0 * inside, lengths
