"""The commands of speech recognition, which `starling` finds through its entry point."""

from pathlib import Path
from typing import Annotated

import typer

from starling.commands import Best, Commands, Experiment, Overrides, RecipeArgument, TakesKeys, progress_console
from starling.errors import ConfigError, noted
from starling.timeouts import CLIENT_STALL

COMMANDS = Commands(needs="speech")
Average = Annotated[
    int | None,
    typer.Option(
        "--average", min=1, help="Number of newest checkpoints to average. Default: the number in the recipe."
    ),
]
Boost = Annotated[
    Path | None,
    typer.Option(
        "--boost", metavar="FILE", help="Favour the phrases in this file. Each line is PHRASE or PHRASE<tab>WEIGHT."
    ),
]
Beam = Annotated[bool, typer.Option("--beam", help="Decode with the beam search that `evaluate` has tuned.")]

Vad = Annotated[
    bool, typer.Option("--vad", help="Find speech with a voice activity model, which ignores music. Needs silero-vad.")
]


@COMMANDS.command(cls=TakesKeys, epilog="Example: [bold]starling prepare demo data.folder=corpora/demo jobs=4[/bold]")
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace sets prepared with other settings.")] = False,
) -> None:
    """Import, check and filter a recipe's corpus, and write it as shards. Existing sets are kept.

    jobs=N uses N processes, executor=ray the Ray cluster at launch.address; the result is the same.
    """
    from starling.reporting.progress import Bars
    from starling.speech.prepare import prepare_all
    from starling.speech.prepare_stages import executor_of
    from starling.speech.recipe import load_recipe

    own = [each for each in overrides or () if each.partition("=")[0].strip() in ("jobs", "executor")]
    problems, address = list[str](), "auto"
    with noted(problems, ConfigError):
        loaded = load_recipe(recipe, [each for each in overrides or () if each not in own])
        address = loaded.launch.address
    with noted(problems, ConfigError):
        executor = executor_of(own, address)
    if problems:
        raise ConfigError("\n".join(problems))
    with executor, Bars(progress_console()) as bars:
        described = prepare_all(loaded, bars, executor, overwrite)
    typer.echo(described)


@COMMANDS.command(cls=TakesKeys, epilog="Example: [bold]starling check demo data.check.silence_db=-50[/bold]")
def check(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A recipe, or a folder prepared from a recipe.")],
    overrides: Overrides = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Also list the utterances to leave out (data.filter.leave_out).")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 5 if anything is found.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="EXP", help="Also find transcripts that do not fit what this model hears.")
    ] = None,
) -> None:
    """Find faults, duplicates, and overlap between the sets of a corpus, and list them in check.tsv.

    With --model (an experiment, a checkpoint or a recogniser's folder), also find swapped and wrong transcripts.
    """
    from starling.speech.commands import check

    check.check(data, overrides or (), drop, strict, progress_console(), model)


@COMMANDS.command(cls=TakesKeys, epilog="Example: [bold]starling demo learners=2[/bold]", needs="demo")
def demo(overrides: Overrides = None) -> None:
    """Train the recipe `demo`, a recogniser of synthetic speech, in the current folder."""
    from starling.experiment.train import train_recipe

    train_recipe(Path("demo"), overrides or (), typer.echo, progress_console(), "starling demo")


@COMMANDS.command(epilog="Example: [bold]starling evaluate exp/demo --set test[/bold]")
def evaluate(
    experiment: Experiment,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="A set to score; may be repeated. Default: the test sets.")
    ] = None,
    best: Best = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="Skip the beam search.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes for the beam search.")] = 1,
    conditions: Annotated[
        list[str] | None,
        typer.Option("--condition", help="Pass audio through a codec, such as telephone or opus-8; may be repeated."),
    ] = None,
    average: Average = None,
    boost: Boost = None,
) -> None:
    """Score sets with the newest model of an experiment, and list every error in its decode folder.

    A CTC model is scored by greedy decoding and by beam search with a language model, tuned on the validation set.
    A model with a decoder is also scored by the decoder's own searches.
    """
    from starling.speech.commands import evaluate

    given, console = conditions or (), progress_console()
    evaluate.evaluate(experiment, sets, typer.echo, console, best, not greedy, jobs, given, average, boost)


@COMMANDS.command(epilog="Example: [bold]starling score exp/demo exp/demo-adpsgd --by speaker[/bold]")
def score(
    experiment: Annotated[Path, typer.Argument(metavar="A", help="An experiment that `starling evaluate` has scored.")],
    other: Annotated[Path | None, typer.Argument(metavar="B", help="An experiment to compare A with.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="A set to score; may be repeated. Default: all.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Print a table by speaker, or by this column of a TSV.")] = None,
    table: Annotated[Path | None, typer.Option(help="A TSV with a header and the ids in its first column.")] = None,
    normalise: Annotated[
        list[str] | None, typer.Option(help="Normalise numbers, punctuation or case; may be repeated. Default: none.")
    ] = None,
    language: Annotated[str, typer.Option(help="The language in which numbers are written.")] = "en",
) -> None:
    """Score decoded texts again, by speaker or column, or normalised. Test whether two experiments differ."""
    from starling.speech.commands.score import score as score_texts

    if table is not None and by is None:
        raise ConfigError("score: --table needs --by, the column to group by")
    experiments = [each for each in (experiment, other) if each is not None]
    score_texts(experiments, sets or (), by, table, normalise or (), language)


@COMMANDS.command(epilog="Example: [bold]starling transcribe exp/demo talk.flac --format srt --output talk.srt[/bold]")
def transcribe(
    experiment: Experiment,
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Files (WAV, FLAC, MP3, Opus) of any length and rate, or folders; - is standard input.",
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="The format: txt, json, srt, vtt or ctm.")] = "txt",
    output: Annotated[
        Path | None, typer.Option(help="The output file; a folder for several inputs. Default: the screen.")
    ] = None,
    raw_pcm: Annotated[
        int | None,
        typer.Option(
            metavar="RATE", help="Standard input is raw PCM at this rate: 16 bits, little-endian, one channel."
        ),
    ] = None,
    best: Best = False,
    beam: Beam = False,
    boost: Boost = None,
    align: Annotated[
        bool, typer.Option("--align", help="Make word times more exact, as `starling align` does.")
    ] = False,
    vad: Vad = False,
) -> None:
    """Transcribe audio with the newest model of an experiment.

    Files that cannot be transcribed are named at the end, and the exit code is then 5.
    """
    from starling.speech.transcribing.files import transcribe_files
    from starling.speech.transcribing.segmenter import Segmentation

    chosen, console = Segmentation(voice_activity=vad), progress_console()
    transcribe_files(experiment, paths, typer.echo, best, beam, console, form, output, raw_pcm, boost, align, chosen)


@COMMANDS.command(
    epilog="Example: [bold]starling align exp/demo talk.wav --text talk.txt --output talk.TextGrid[/bold]"
)
def align(
    experiment: Experiment,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Recordings of up to five minutes.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the spoken text. Default: NAME.txt beside the recording."),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="The format: textgrid, ctm or json.")] = "textgrid",
    output: Annotated[
        Path | None, typer.Option(help="The output file; a folder for several recordings. Default: the screen.")
    ] = None,
    voice: Annotated[
        str | None, typer.Option(help="The voice of espeak-ng that pronounces the words, such as en-us.")
    ] = None,
    lexicon: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a word and its phones on each line, as in CMUdict.")
    ] = None,
) -> None:
    """Find when each word and phone of a known text is spoken.

    Words are pronounced as in training (model.phones), or else as they are spelled. The first call learns word times
    from the experiment's training set, and keeps them in its folder align.
    """
    from starling.speech.tokens import PhonesConfig
    from starling.speech.transcribing.aligning import align_files

    if voice is not None and lexicon is not None:
        raise ConfigError("align: --voice and --lexicon both pronounce words; give one of them")
    phones = None if voice is None and lexicon is None else PhonesConfig(voice=voice, lexicon=lexicon)
    align_files(experiment, paths, text, form, output, phones, typer.echo, progress_console())


@COMMANDS.command(epilog="Example: [bold]starling serve exp/demo[/bold]", needs="serve")
def serve(
    experiment: Experiment,
    host: Annotated[
        str, typer.Option(help="The address to serve at. Any address other than loopback is open to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to serve at; 0 chooses a free port.")] = 8000,
    max_megabytes: Annotated[float, typer.Option(min=0.001, help="Largest upload in megabytes.")] = 500.0,
    max_minutes: Annotated[float, typer.Option(min=0.01, help="Longest audio of an upload in minutes.")] = 240.0,
    stall_seconds: Annotated[float, typer.Option(min=0.1, help="Longest client silence in seconds.")] = CLIENT_STALL,
    best: Best = False,
    beam: Beam = False,
    vad: Vad = False,
) -> None:
    """Serve the newest model of an experiment: a web page, files over HTTP, and microphones over a WebSocket.

    Clients of OpenAI's API can request transcriptions under /v1.
    """
    from starling.speech.serving.app import serve as serve_model
    from starling.speech.serving.guard import Limits
    from starling.speech.transcribing.segmenter import Segmentation

    limits = Limits(round(1e6 * max_megabytes), 60 * max_minutes, stall_seconds)
    serve_model(experiment, typer.echo, host, port, best, beam, limits, Segmentation(voice_activity=vad))


@COMMANDS.command(epilog="Example: [bold]starling export exp/demo demo-model --onnx[/bold]")
def export(
    experiment: Experiment,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the model.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write ONNX graphs, and a program that runs without Starling.")
    ] = False,
    best: Best = False,
    average: Average = None,
) -> None:
    """Write the newest model of an experiment to a folder: weights, tokens, language model, and a model card."""
    from starling.speech.exporting import export

    export(experiment, folder, typer.echo, onnx, best, average)
