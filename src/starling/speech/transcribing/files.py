"""Transcribes files, folders and standard input with a model of an experiment."""

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
    """Load a trained model, to transcribe with.

    Args:
        model: An experiment, whose newest model is taken; a checkpoint; or a folder with a recogniser.
        best: Take the experiment's model that scored best on the validation set.
        beam: Decode with the beam search that `starling evaluate` has tuned. If it has not, that is done first.
        console: Shows the progress of tuning on a terminal.
        segmentation: Where long audio is cut.

    Raises:
        CheckpointError: There is no model, or it is damaged.
        ConfigError: It is not an experiment; or a beam search is asked for that the model does not have.
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
        experiment: As for `load_model`, with `is_best` and `with_beam`.
        inputs: Files, folders, and `-` for standard input.
        tell: Takes the transcripts without an `output`. For `txt` that is a line for each file, with its name, a tab
            and the text; of standard input, the text of each segment.
        console: Shows progress on a terminal.
        form: The format of the transcripts.
        output: A file for the transcript of one input; a folder for those of several.
        raw_rate: Standard input is raw PCM of 16 bits at this rate, in Hz.
        boost: A file with phrases, as for `Transcriber.boosted`.
        is_aligned: Words have the times that `starling align` finds; those of CTC where a word has no pronunciation.
        segmentation: Where long audio is cut.

    Raises:
        DataError: Some files cannot be transcribed. It names them, after all others are done. Or the phrases cannot be
            used.
        ConfigError: The model does not give what `form` needs, or the arguments contradict each other.
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
            f"{experiment}: --format ctm needs word times, which a model trained frame by frame does not give; use "
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
    """In the folder in which it was found; without suffix, unless another one differs in that alone."""
    output: Path | None
    """Where its transcript goes; None: to the screen."""


def _sources(inputs: Sequence[Path], form: str, output: Path | None) -> tuple[list[_Source], list[str]]:
    """The files that are given or in given folders, and folders that have none. Raises ConfigError for an `output` that
    cannot hold their transcripts."""
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
    """Write a transcript, or pass it on."""
    text = formatted(transcript, form, str(source.path) if form == "json" else source.name)
    if source.output is None:
        if form == "txt":
            tell(f"{source.path}\t{transcript.text}")
        elif text:  # CTM of silence has no lines
            tell(text.removesuffix("\n"))
        return
    with writing(f"--output {source.output}", "name another file or folder"):
        source.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(source.output, text)


def _tell_segments(transcriber: Transcriber, raw_rate: int | None, problems: list[str], tell: Say, say: Say) -> None:
    """Pass on the text of each segment of standard input; of raw PCM, as soon as the segment has ended."""
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
    """The transcript of each file, in order; segments of several files are decoded together."""
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
    """A file or standard input; `say` is told what its user should know. Standard input is copied to a temporary file
    first, unless it is raw PCM."""
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
