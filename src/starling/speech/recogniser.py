"""A recogniser: a network with its tokens, its features and any tied states, saved, loaded and used together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from starling.configuration import Config, read_saved
from starling.errors import CheckpointError, ConfigError, DataError
from starling.files import save_tensors, sha256
from starling.speech.augmentation import Codec, transmitted
from starling.speech.decoding import decoders
from starling.speech.decoding.decoders import Phrases
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.hybrid.tying import STATES_FILE, TiedStates
from starling.speech.hybrid.viterbi import WordDecoder, aligned
from starling.speech.models import ModelConfig, build_model
from starling.speech.models.network import Decoder, Network
from starling.speech.models.transformer import AttentionDecoder
from starling.speech.resampling import resampled
from starling.speech.tokens import BLANK, PHONES_FILE, Phones, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from starling.speech.store import SpeechSet, SpeechSets

_FORMAT = 2
_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_NEVER = -100.0
"""The log-probability of every token but the blank in a pause."""


class _Description(Config):
    """The contents of a saved recogniser's `config.json`."""

    format: int
    sampling_rate: int = Field(gt=0)
    features: FeatureConfig
    model: ModelConfig
    vocab_size: int = Field(ge=2)
    sha256: dict[str, str]  # file name -> digest, for all other files

    @field_validator("format")
    @classmethod
    def _is_ours(cls, value: int) -> int:
        if value > _FORMAT:
            raise ValueError(f"it is {value}, but this version reads up to {_FORMAT}: use a newer Starling")
        if value < _FORMAT:
            raise ValueError(
                f"it is {value}, which only versions before Starling 0.2 read: train again, or use the version that "
                "wrote it"
            )
        return value


class Heard(NamedTuple):
    """The outputs of a network for a batch of utterances."""

    log_probs: torch.Tensor  # [B, T', V]: log-probabilities of CTC's tokens or of tied states
    lengths: torch.Tensor  # [B]: number of valid frames along T'
    frames: torch.Tensor | None  # [B, T'', W]: the encoder's frames for the decoder; None without a decoder
    frame_lengths: torch.Tensor  # [B]: number of valid frames along T'', which excludes long pauses

    @property
    def rows(self) -> list[NDArray[np.float32]]:
        """The log-probabilities `[T, V]` of each utterance, without padding."""
        rows = zip(self.log_probs.float().cpu().numpy(), self.lengths.tolist(), strict=True)
        return [np.ascontiguousarray(row[:length]) for row, length in rows]

    @property
    def frame_rows(self) -> list[torch.Tensor]:
        """The encoder's frames `[T, W]` of each utterance, without padding. Raises ValueError without a decoder."""
        if self.frames is None:
            raise ValueError("a recogniser without a decoder has no decoder search and no decoder scores")
        return [row[:length] for row, length in zip(self.frames, self.frame_lengths.tolist(), strict=True)]

    def in_time(self, places: Sequence[NDArray[np.int64]], lengths: Sequence[int]) -> "Heard":
        """The outputs on the time axis of the whole recording, with blanks in the rows that the network did not hear.

        Each utterance is expanded to its number of rows in `lengths`: its n-th row moves to the n-th of its `places`.
        A token that is emitted on both sides of a pause continues through the pause, so that it is not counted twice.
        """
        rows = []
        for row, at, length in zip(self.log_probs, places, lengths, strict=True):
            best = row[: len(at)].argmax(1).cpu().numpy()
            source = np.searchsorted(at, np.arange(length), side="right") - 1  # -1 before the first
            goes_on = np.append(best[1:] == best[:-1], [False, False])[source]
            whole = row.new_full((length, row.shape[1]), _NEVER)
            whole[:, BLANK] = 0.0
            is_heard = torch.from_numpy(goes_on | np.isin(np.arange(length), at))
            whole[is_heard] = row[torch.from_numpy(source)[is_heard]]
            rows.append(whole)
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return self._replace(log_probs=padded, lengths=torch.tensor(lengths, device=self.lengths.device))


@dataclass(eq=False)
class Recogniser:
    """Transcribes waveforms.

    The network outputs either CTC tokens or tied states (`states`); a search over the states finds the best words. If
    the network has a decoder, the decoder produces the texts. `phones` are used only in training.
    """

    model: nn.Module
    """The network."""
    model_config: ModelConfig
    """The network's architecture and sizes."""
    features: LogMel
    """The features that are computed from waveforms."""
    tokenizer: Tokenizer
    """The tokens that spell the recogniser's texts."""
    states: TiedStates | None = None
    """The tied states, if they are the network's outputs."""
    phones: Phones | None = None
    """The phones, if the network was also trained on them."""

    def __post_init__(self) -> None:
        self._words = None if self.states is None else WordDecoder(self.states, self.tokenizer)

    @classmethod
    def create(
        cls,
        model_config: ModelConfig,
        features: LogMel,
        tokenizer: Tokenizer,
        seed: int,
        states: TiedStates | None = None,
        phones: Phones | None = None,
    ) -> Self:
        """A recogniser with randomly initialised weights."""
        num_outputs = tokenizer.vocab_size if states is None else states.num_states
        num_phones = None if phones is None else len(phones.outputs)
        model = build_model(model_config, features.num_features, num_outputs, seed, features.frame_seconds, num_phones)
        return cls(model, model_config, features, tokenizer, states, phones)

    def save(self, folder: Path) -> None:
        """Write `config.json`, `model.safetensors`, tokens, states and phones to `folder`, which is created if missing.

        Nothing may read the folder meanwhile, because its files are replaced one by one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"features.{name}": value for name, value in self.features.statistics.items()}
        save_tensors(folder / _WEIGHTS_FILE, {name: value.detach().cpu().clone() for name, value in tensors.items()})
        files = [folder / _WEIGHTS_FILE, self.tokenizer.save(folder)]
        for name, part in ((STATES_FILE, self.states), (PHONES_FILE, self.phones)):
            if part is not None:
                (folder / name).write_text(part.model_dump_json(), encoding="utf-8")
                files.append(folder / name)
        description = _Description(
            format=_FORMAT,
            sampling_rate=self.features.sampling_rate,
            features=self.features.config,
            model=self.model_config,
            vocab_size=self.tokenizer.vocab_size,
            sha256={path.name: sha256(path) for path in files},
        )
        (folder / _CONFIG_FILE).write_text(description.model_dump_json(indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a recogniser from a folder that `save` wrote.

        Raises CheckpointError, naming the file, if a file is missing, damaged or inconsistent with the others.
        """
        if not (folder / _CONFIG_FILE).exists():
            raise CheckpointError(f"{folder / _CONFIG_FILE} is missing: {folder} contains no complete recogniser")
        description = read_saved(_Description, folder / _CONFIG_FILE)
        for name, digest in description.sha256.items():
            _verify(folder, name, digest)
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab_size != description.vocab_size:
            raise CheckpointError(
                f"{folder}: the tokens need {tokenizer.vocab_size} outputs, but {_CONFIG_FILE} has "
                f"{description.vocab_size}: the files belong to different recognisers"
            )
        features = LogMel(description.features, description.sampling_rate)
        states = read_saved(TiedStates, folder / STATES_FILE) if STATES_FILE in description.sha256 else None
        phones = read_saved(Phones, folder / PHONES_FILE) if PHONES_FILE in description.sha256 else None
        recogniser = cls.create(description.model, features, tokenizer, 0, states, phones)
        recogniser._load_weights(folder / _WEIGHTS_FILE)
        return recogniser

    def transcribe(self, waveform: np.ndarray | torch.Tensor, rate: int) -> str:
        """The text of one recording, sampled at `rate` Hz. The recording is `[T]`, or `[channels, T]`, whose channels
        are averaged.

        Raises DataError for audio that is empty, shorter than one window or not finite.
        """
        return self.texts(self.listen([self.waveform(waveform, rate)]))[0]

    def waveform(self, samples: np.ndarray | torch.Tensor, rate: int) -> torch.Tensor:
        """The waveform `[T]` from which a recording's features are computed. Shapes and errors are those of
        `transcribe`."""
        if rate <= 0:
            raise DataError(f"a sampling rate of {rate} Hz is impossible")
        return self.features.checked(resampled(mono(samples), rate, self.features.sampling_rate))

    def recognise(
        self,
        speech_set: "SpeechSet",
        max_duration: float = 120.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, str]:
        """The text of every utterance of a set, by utterance id. A batch has at most `max_duration` seconds of audio,
        including padding.

        `progress` is called with the number of utterances done and the total.
        """
        texts: dict[str, str] = {}
        for names, heard in self.heard(speech_set, max_duration, progress):
            texts.update(zip(names, self.texts(heard), strict=True))
        return texts

    def heard(
        self,
        speech_set: "SpeechSet | SpeechSets",
        max_duration: float = 120.0,
        progress: Callable[[int, int], None] | None = None,
        codec: Codec | None = None,
    ) -> Iterator[tuple[list[str], Heard]]:
        """Yield, for each batch of a set, the utterance ids and the network's outputs. The longest utterances come
        first. If `codec` is given, the audio passes through it. The other arguments are those of `recognise`."""
        done = 0
        for places in by_duration(speech_set.durations, max_duration):
            stored = speech_set.read(places)
            names = [each.id for each in stored]
            waveforms = [self.features.checked(each.samples, each.id) for each in stored]
            if codec is not None:
                rate = speech_set.sampling_rate
                waveforms = [torch.from_numpy(transmitted(each.numpy(), rate, codec)) for each in waveforms]
            yield names, self.listen(waveforms)
            done += len(names)
            if progress is not None:
                progress(done, len(speech_set))

    @property
    def output_seconds(self) -> float:
        """Seconds between two rows of log-probabilities."""
        return self.features.frame_seconds * self.model_config.subsampling

    @property
    def latency(self) -> float | None:
        """The algorithmic latency of a streaming model in seconds; None if it needs whole recordings."""
        config = self.features.config
        return self.model_config.latency(config.frame_shift, config.frame_length)

    def listen(self, waveforms: Sequence[torch.Tensor]) -> Heard:
        """The network's outputs for waveforms `[T]` that passed `LogMel.checked`. Pauses that are removed from the
        network's input appear as blanks."""
        layer = self.features
        energies = layer.energies(waveforms)
        if layer.config.pauses is None:
            return self.hear(layer.of_energies(energies))
        kept = layer.kept(energies)
        heard = self.hear(layer.of_energies([each[places] for each, places in zip(energies, kept, strict=True)]))
        rate = self.model_config.subsampling
        return heard.in_time(
            [places[::rate] // rate for places in kept],
            [self.model_config.encoder_frames(len(each)) for each in energies],
        )

    def hear(self, matrices: list[torch.Tensor]) -> Heard:
        """The network's outputs for the features `[T, F]` of each utterance."""
        device = next(self.model.parameters()).device
        features = torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True).to(device)
        lengths = torch.tensor([len(matrix) for matrix in matrices], device=device)
        with self.evaluating():
            if self.decoder is None:
                log_probs, lengths = self.model(features, lengths)
                return Heard(log_probs, lengths, None, lengths)
            network = cast(Network, self.model)
            frames, lengths = network.encode(features, lengths)
            return Heard(network.log_probs(frames), lengths, frames, lengths)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the network runs in evaluation mode and without gradients."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.model.train(was_training)

    @property
    def decoder(self) -> Decoder | None:
        """The network's decoder, if it has one in addition to CTC."""
        return self.model.decoder if isinstance(self.model, Network) else None

    def texts(self, heard: Heard) -> list[str]:
        """The text of each utterance: with tied states, the best words of the search; with a decoder, the decoder's
        greedy text; otherwise, CTC's greedy text."""
        if self._words is not None:
            return self._words(heard.log_probs, heard.lengths)
        if self.decoder is None or heard.frames is None:
            return decoders.greedy_decode(heard.log_probs, heard.lengths, self.tokenizer)
        with self.evaluating():
            found = decoders.greedy(self.decoder, heard.frames, heard.frame_lengths)
        return [self.tokenizer.decode(tokens) for tokens in found]

    def searched(self, heard: Heard, beam: int) -> list[str]:
        """The text that the decoder's beam search finds for each utterance. Raises ValueError if there is no
        decoder."""
        if self.decoder is None:
            raise ValueError("a recogniser without a decoder has no beam search with a decoder")
        with self.evaluating():
            found = [decoders.best_text(self.decoder, row, beam) for row in heard.frame_rows]
        return [self.tokenizer.decode(tokens) for tokens in found]

    def phrases(self, lines: Iterable[str], source: str, is_searched: bool = False) -> Phrases:
        """Phrases to boost in greedy texts or, with `is_searched`, in the texts of a beam search over CTC's outputs.
        Raises ConfigError if CTC does not produce the texts, and DataError as `Phrases` does."""
        if self.states is not None or (self.decoder is not None and not is_searched):
            other = "tied states" if self.decoder is None else "its decoder; load it with the beam search (--beam)"
            raise ConfigError(f"{source}: phrases are boosted in texts of CTC, but this model's texts are from {other}")
        return Phrases(self.tokenizer, lines, source)

    def placed(
        self, log_probs: NDArray[np.float32], text: str, is_searched: bool = False, phrases: Phrases | None = None
    ) -> tuple[str, list[decoders.Emission] | None]:
        """Boost phrases in a text that `texts` or a search found in log-probabilities `[T, V]`. Returns the text and
        the frames in which CTC emits its tokens, or None if these frames are unknown."""
        is_greedy = self.states is None and self.decoder is None and not is_searched
        emissions = decoders.emissions_of(log_probs.argmax(1)) if is_greedy else self._aligned(log_probs, text)
        if phrases is None or emissions is None:
            return text, emissions
        boosted = phrases(log_probs, emissions)
        if boosted is None or boosted == " ".join(text.split()):
            return text, emissions
        found = self._aligned(log_probs, boosted)
        return (text, emissions) if found is None else (boosted, found)

    def _aligned(self, log_probs: NDArray[np.float32], text: str) -> list[decoders.Emission] | None:
        """The frames in which CTC emits the tokens of a text that another search found."""
        if self.states is not None:
            return None
        if not text.strip():
            return []
        try:
            tokens = self.tokenizer.encode(text)
        except DataError:  # the tokenizer may be unable to spell a decoder's text
            return None
        return aligned(log_probs, tokens)

    def attention_scores(self, heard: Heard, texts: Sequence[Sequence[str]]) -> list[list[float]]:
        """The log-probability log p(text | audio) under the attention decoder, for each of several texts of each
        utterance. Raises ValueError if there is no attention decoder."""
        if not isinstance(self.decoder, AttentionDecoder):
            raise ValueError("a recogniser without an attention decoder cannot score texts with it")
        encode = self.tokenizer.encode
        with self.evaluating():
            return [
                decoders.scores(self.decoder, row, [encode(text) if text else [] for text in each])
                for row, each in zip(heard.frame_rows, texts, strict=True)
            ]

    def _load_weights(self, path: Path) -> None:
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        stored = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        wanted = self.model.state_dict()
        problems = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
        problems += [f"{name} does not belong to this model" for name in sorted(stored.keys() - wanted.keys())]
        problems += [
            f"{name} has shape {list(stored[name].shape)} and dtype {stored[name].dtype}, the model "
            f"{list(wanted[name].shape)} and {wanted[name].dtype}"
            for name in sorted(wanted.keys() & stored.keys())
            if (stored[name].shape, stored[name].dtype) != (wanted[name].shape, wanted[name].dtype)
        ]
        if problems:
            raise CheckpointError(f"{path} does not fit the model of {_CONFIG_FILE}: " + "; ".join(problems[:5]))
        self.model.load_state_dict(stored)
        prefix = "features."
        self.features.statistics = {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }


def mono(waveform: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The samples `[T]`, in [-1, 1], of a recording `[T]` or `[channels, T]`, whose channels are averaged. Raises
    DataError if the recording is empty or not finite."""
    tensor = torch.as_tensor(waveform)
    if tensor.ndim not in (1, 2) or tensor.numel() == 0:
        raise DataError(f"audio of shape {list(tensor.shape)} cannot be transcribed: give [T] or [channels, T]")
    if not tensor.is_floating_point():
        tensor = tensor.float() / -float(torch.iinfo(tensor.dtype).min)
    samples = tensor.float().mean(0) if tensor.ndim == 2 else tensor.float()
    if not bool(torch.isfinite(samples).all()):
        raise DataError("the audio contains samples that are not finite (NaN or infinity): decode it again")
    return samples


def by_duration(durations: np.ndarray, max_duration: float) -> Iterable[list[int]]:
    """Group the indices of utterances, longest first, so that no group exceeds `max_duration` seconds with padding."""
    order = np.argsort(-durations, kind="stable").tolist()
    while order:
        size = max(1, int(max_duration / max(float(durations[order[0]]), 1e-3)))
        yield order[:size]
        order = order[size:]


def _verify(folder: Path, name: str, digest: str) -> None:
    path = folder / name
    if Path(name).name != name:
        raise CheckpointError(f"{folder / _CONFIG_FILE} lists {name!r}, which is not a file name in this folder")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or not a file")
    if sha256(path) != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {_CONFIG_FILE}")
