"""Transcribes files, folders and standard input with an experiment's model."""

import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO

from rich.console import Console

from starling.errors import ConfigError, DataError, did_you_mean, noted, require
from starling.files import replace_file, writing
from starling.reporting.progress import Bars, Say, say_on
from starling.speech.audio import Sound, audio_suffixes, check_rate, opened
from starling.speech.decoding.decoders import read_phrases
from starling.speech.trained import is_model, load_recogniser, open_experiment
from starling.speech.transcribing.aligning import Aligner, load_aligner
from starling.speech.transcribing.segmenter import Piece, Seconds, Segmentation, gathered
from starling.speech.transcribing.transcriber import TOGETHER, Transcriber
from starling.speech.transcribing.transcript import FORMATS, Segment, Transcript, formatted

STANDARD_INPUT = Path("-")


def load_model(
    model: Path | str,
    best: bool = False,
    beam: bool = False,
    console: Console | None = None,
    segmentation: Segmentation | None = None,
) -> Transcriber:
    """Load a trained model for transcription.

    Args:
        model: An experiment, whose newest model is used; a checkpoint; or a folder with a recogniser.
        best: Use the experiment's model that scored best on the validation set.
        beam: Decode with the beam search that `starling evaluate` tunes. An untuned beam search is tuned first.
        console: The console that shows the progress of tuning.
        segmentation: The parameters that determine where long audio is cut.

    Raises:
        CheckpointError: The model is missing or damaged.
        ConfigError: `model` is not an experiment, or a beam search is requested that the model does not support.
        MissingExtraError: The beam search or the voice activity model is not installed.

    Example:
        >>> import soundfile, starling
        >>> model = starling.load_model("exp/demo")  # doctest: +SKIP
        >>> model.transcribe(*soundfile.read("hello.wav")).text  # doctest: +SKIP
        'THREE SEVEN ONE'
    """
    if segmentation is not None and segmentation.voice_activity:
        require("vad", "voice activity detection")
    path = Path(model)
    if is_model(path) and (best or beam):
        raise ConfigError(f"{path}: the best model and the beam search belong to an experiment; name its folder")
    recogniser = load_recogniser(path, best)
    if not beam:
        return Transcriber(recogniser, segmentation=segmentation)
    folder, recipe = open_experiment(path)
    if recipe.loss != "ctc":
        raise ConfigError(f"{path}: the beam search is for CTC, but it was trained with {recipe.loss}")
    require("decoding", "the beam search", ("flashlight",))
    from starling.speech.commands.beam_search import best_search

    with Bars(console or Console(stderr=True)) as bars, best_search(recipe, folder, recogniser, bars) as search:
        return Transcriber(recogniser, search.text, segmentation)


def transcribe_files(
    experiment: Path,
    inputs: Sequence[Path],
    tell: Say,
    is_best: bool = False,
    with_beam: bool = False,
    console: Console | None = None,
    form: str = "txt",
    output: Path | None = None,
    raw_rate: int | None = None,
    boost: Path | None = None,
    is_aligned: bool = False,
    segmentation: Segmentation | None = None,
) -> None:
    """Transcribe files, the audio files in folders, and standard input (`-`).

    Args:
        experiment: The model, given as for `load_model`. `is_best` and `with_beam` are that function's `best` and
            `beam`.
        inputs: Files, folders, and `-` for standard input.
        tell: A function that receives the transcripts if there is no `output`. In the format `txt`, it receives one
            line for each file, with the file's name, a tab and the text; for standard input, it receives the text of
            each segment.
        console: The console that shows progress.
        form: The format of the transcripts.
        output: A file for the transcript of one input, or a folder for the transcripts of several inputs.
        raw_rate: If given, standard input is 16-bit raw PCM at this sampling rate, in Hz.
        boost: A file with phrases, as for `Transcriber.boosted`.
        is_aligned: Words have the times that `starling align` finds, or CTC's times if a word has no pronunciation.
        segmentation: The parameters that determine where long audio is cut.

    Raises:
        DataError: Some files cannot be transcribed, or the phrases cannot be used. Files are named in the message after
            all other files have been transcribed.
        ConfigError: The model does not provide what `form` needs, or the arguments contradict each other.
    """
    screen = console or Console(stderr=True)
    if form not in FORMATS:
        hint = did_you_mean(form, FORMATS)
        raise ConfigError(f"--format {form}: unknown; {hint}known are {', '.join(FORMATS)}")
    if is_aligned and form == "txt":
        raise ConfigError("--align finds word times, which --format txt does not have; use ctm, json, srt or vtt")
    if raw_rate is not None:
        check_rate(raw_rate, "--raw-pcm")
        if STANDARD_INPUT not in inputs:
            raise ConfigError("--raw-pcm is the rate of standard input: give - as a file")
    sources, problems = _sources(inputs, form, output)
    phrases = None if boost is None else read_phrases(boost)
    transcriber = load_model(experiment, is_best, with_beam, screen, segmentation)
    if phrases is not None:
        transcriber = transcriber.boosted(phrases, f"--boost {boost}")
    if form == "ctm" and not transcriber.has_times:
        raise ConfigError(
            f"{experiment}: --format ctm needs word times, which a model trained frame by frame does not provide; use "
            "txt, json, srt or vtt"
        )
    total = len(sources) + len(problems)
    is_told = form == "txt" and output is None
    say = say_on(screen)
    with Bars(screen) as bars:
        aligner = load_aligner(experiment, None, bars) if is_aligned else None
        for is_at_once, some in groupby(sources, lambda each: is_told and each.path == STANDARD_INPUT):
            if is_at_once:
                _tell_segments(transcriber, raw_rate, problems, tell, say)
            else:
                for source, transcript in _transcribed(transcriber, list(some), aligner, raw_rate, problems, bars, say):
                    _write(source, transcript, form, tell)
                    if not transcript.text:
                        say(_no_speech(source.path, transcript.seconds))
    if problems:
        several = f"{len(problems)} of {total} files cannot be transcribed: " if total > 1 else ""
        raise DataError(several + "; ".join(problems))


@dataclass(frozen=True)
class _Source:
    """A file to transcribe."""

    path: Path
    name: str
    """The file's path in the folder in which it was found, without its suffix unless another file differs only in the
    suffix."""
    output: Path | None
    """The file to which the transcript is written; None prints it."""


def _sources(inputs: Sequence[Path], form: str, output: Path | None) -> tuple[list[_Source], list[str]]:
    """The files that are given or are in given folders, and messages about folders without audio files. Raises
    ConfigError if the transcripts cannot be written to `output`."""
    found: list[tuple[Path, Path]] = []
    problems, suffixes = [], audio_suffixes()
    for path in inputs:
        if path != STANDARD_INPUT and path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.suffix.lower() in suffixes and each.is_file())
            found += [(each, each.relative_to(path)) for each in inside]
            if not inside:
                problems.append(f"{path}: this folder has no audio files ({', '.join(sorted(suffixes))})")
        else:
            found.append((path, Path("stdin" if path == STANDARD_INPUT else path.name)))
    if output is None and form in ("srt", "vtt") and len(found) > 1:
        raise ConfigError(f"--format {form}: subtitles of {len(found)} files need --output FOLDER")
    is_one = len(inputs) == 1 and (inputs[0] == STANDARD_INPUT or not inputs[0].is_dir())
    into = output if output is not None and (not is_one or output.is_dir()) else None
    if into is not None and into.exists() and not into.is_dir():
        raise ConfigError(f"--output {into}: is a file; give a folder for {len(found)} transcripts")
    twice = [name for name, count in Counter(relative for _, relative in found).items() if count > 1]
    if into is not None and twice:
        raise ConfigError(f"--output {into}: {len(twice)} names are given twice, such as {twice[0]}; run them apart")
    counts, sources = Counter(relative.with_suffix("") for _, relative in found), []
    for path, relative in found:
        plain = relative.with_suffix("")
        name = str(relative if counts[plain] > 1 else plain)
        sources.append(_Source(path, name, output if into is None else into / f"{name}.{form}"))
    return sources, problems


def _write(source: _Source, transcript: Transcript, form: str, tell: Say) -> None:
    """Write a transcript to its file, or pass it to `tell`."""
    text = formatted(transcript, form, str(source.path) if form == "json" else source.name)
    if source.output is None:
        if form == "txt":
            tell(f"{source.path}\t{transcript.text}")
        elif text:  # the CTM of a silent recording has no lines
            tell(text.removesuffix("\n"))
        return
    with writing(f"--output {source.output}", "name another file or folder"):
        source.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(source.output, text)


def _tell_segments(transcriber: Transcriber, raw_rate: int | None, problems: list[str], tell: Say, say: Say) -> None:
    """Pass the text of each segment of standard input to `tell`. For raw PCM, do so as soon as the segment has
    ended."""
    is_told = False
    with noted(problems, DataError), _opened(STANDARD_INPUT, raw_rate, say) as sound:
        for some in transcriber.stream(sound, sound.rate, TOGETHER if raw_rate is None else 0.0):
            for text in filter(None, (segment.text for segment in some)):
                tell(text)
                is_told = True
        if not is_told:
            say(_no_speech(STANDARD_INPUT, sound.heard))


def _no_speech(path: Path, seconds: Seconds) -> str:
    return f"{_name(path)}: no speech was recognised in {seconds:.1f} s of audio"


def _name(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def _transcribed(
    transcriber: Transcriber,
    sources: Sequence[_Source],
    aligner: Aligner | None,
    raw_rate: int | None,
    problems: list[str],
    bars: Bars,
    say: Say,
) -> Iterator[tuple[_Source, Transcript]]:
    """Yield the transcript of each file, in order. Segments of several files are decoded together."""
    segments: defaultdict[int, list[Segment]] = defaultdict(list)
    read: dict[int, Sound] = {}

    def pieces() -> Iterator[Piece]:
        for number, source in enumerate(sources):
            with noted(problems, DataError), _opened(source.path, raw_rate, say) as sound:
                for piece in transcriber.pieces(sound, sound.rate):
                    yield replace(piece, recording=number)
                    if len(sources) == 1:
                        bars("seconds of audio", round(sound.heard), round(sound.seconds or 0.0))
                read[number] = sound
                bars("transcribing", number + 1, len(sources))

    def finished() -> Iterator[tuple[_Source, Transcript]]:
        for number, sound in read.items():
            yield sources[number], Transcript(tuple(segments.pop(number, ())), sound.heard, sound.note)
        read.clear()

    for some in gathered(pieces(), TOGETHER * transcriber.rate):
        for piece, found in zip(some, transcriber.decode(some), strict=True):
            segments[piece.recording].append(found if aligner is None else aligner.timed(piece, found))
        yield from finished()
    yield from finished()


@contextmanager
def _opened(path: Path, raw_rate: int | None, say: Say) -> Iterator[Sound]:
    """Open a file or standard input, and pass remarks for the user to `say`. Standard input, unless it is raw PCM, is
    first copied to a temporary file."""
    with ExitStack() as stack:
        audio: Path | IO[bytes] = path
        if path == STANDARD_INPUT:
            audio = sys.stdin.buffer
            if raw_rate is None:
                audio = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(sys.stdin.buffer, audio)
                audio.seek(0)
        sound = stack.enter_context(opened(audio, _name(path), raw_rate))
        if sound.note:
            say(sound.note)
        yield sound
