"""Corpora in lhotse's formats, and corpora that lhotse's recipes prepare, in the folder layouts in which they are
downloaded."""

from __future__ import annotations

import inspect
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from starling.errors import DataError, did_you_mean
from starling.speech.audio import MAX_SECONDS, Audio, read_audio
from starling.speech.corpora.lines import read_json_lines, told_as
from starling.speech.corpora.manifests import FileCorpus, NamedSets, Utterance

Rewriting = tuple[tuple[str, str], ...]
"""Regular expressions and the replacements of their matches, in the order in which they are applied."""


class LhotseRecipeCorpus(FileCorpus):
    """Any corpus for which lhotse has a recipe, in the folder layout in which it is downloaded.

    The importer calls `lhotse.recipes.prepare_<recipe>(path, **options)`. A set is one or more of the parts that this
    call returns, e.g. `train: [train-clean-100]`. Nested parts, such as Common Voice's languages, have names like
    'en/train'. If lhotse's function can be limited to certain parts, it reads only the parts of the set. Audio is read
    through libsndfile.
    """

    kind: Literal["lhotse-recipe"]
    recipe: str
    """The name of the recipe, such as libri_speech for `lhotse.recipes.prepare_libri_speech`."""
    options: dict[str, str | bool | int | float | tuple[str, ...]] = Field(default={})
    """Further arguments of lhotse's function."""
    rewrite: Rewriting | None = None
    """Changes of the transcripts, as pairs [regular expression, replacement]. The default rewrites the marks of
    GigaSpeech and Switchboard, and changes no other corpus. Utterances that have no words after rewriting are left out
    and listed."""
    sets: dict[str, str | tuple[str, ...]]
    """The parts of each set, by the name of the set: the name of one part, or a list of names."""

    @field_validator("recipe")
    @classmethod
    def _known(cls, name: str) -> str:
        known = recipe_names()
        if name not in known:
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
            raise ValueError(f"lhotse has no recipe {name!r}; {hint}")
        return name

    @field_validator("rewrite")
    @classmethod
    def _compiles(cls, rewrite: Rewriting | None) -> Rewriting | None:
        for pattern, replacement in rewrite or ():
            try:
                re.sub(pattern, replacement, "")
                re.compile(pattern)
            except (re.error, IndexError, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"{[pattern, replacement]}: not a regular expression and replacement: {error}"
                ) from error
        return rewrite

    @property
    def without_effect(self) -> dict[str, Any]:
        """The keys that no prepared set depends on, for pydantic's `exclude`."""
        return {"options": {"num_jobs", "output_dir"}} | ({"rewrite": True} if self.rewrite is None else {})

    def maker(self, set_name: str) -> str:
        """The default rewriting of transcripts; empty if it is not used."""
        rewrite = self._custom.rewrite
        return repr(rewrite) if rewrite and self.rewrite is None else ""

    @property
    def _custom(self) -> _Custom:
        return _CUSTOMS.get(self.recipe, _Custom())

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        wanted = self.sets[set_name]
        names = (wanted,) if isinstance(wanted, str) else wanted
        custom = self._custom
        rewrite = custom.rewrite if self.rewrite is None else self.rewrite
        # some recipes read their own manifests lazily, so the files must exist while the cuts are used
        with tempfile.TemporaryDirectory(prefix="starling-") as scratch:
            parts = self._prepare(Path(scratch), set_name, names, custom)
            for part in names:
                for cut in _cuts(parts[part]):
                    name = cut.supervisions[0].id
                    found = utterance_of(cut, name, f"{self.recipe}/{part}", self.channel, self.audio_root)
                    if custom.speaker is not None:
                        found = replace(found, speaker=custom.speaker(name))
                    yield _rewritten(found, rewrite)

    def _prepare(self, scratch: Path, set_name: str, names: Sequence[str], custom: _Custom) -> dict[str, Any]:
        """The manifests of at least the parts `names`, by the name of the part."""
        import lhotse.recipes
        from lhotse.audio.backend import get_current_audio_backend, set_current_audio_backend

        prepare = getattr(lhotse.recipes, f"prepare_{self.recipe}")
        source = self.located()
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        parameters = inspect.signature(prepare).parameters
        if unknown := [name for name in options if name not in parameters]:
            raise DataError(
                f"lhotse's recipe {self.recipe} has no option {', '.join(unknown)}, only {', '.join(parameters)}"
            )

        def check(known: Iterable[str]) -> None:
            if missing := next((part for part in names if part not in known), None):
                raise DataError(
                    f"set {set_name}: lhotse's recipe {self.recipe} has no part {missing!r}, only {', '.join(known)}"
                )

        with told_as(f"lhotse.recipes.prepare_{self.recipe} cannot prepare {source}"), ExitStack() as stack:
            if custom.present is not None:
                check(custom.present(source))
            # lhotse must read all audio through libsndfile, as Starling does, and not start other programs; some
            # recipes print to standard output
            stack.enter_context(redirect_stdout(sys.stderr))
            stack.callback(set_current_audio_backend, get_current_audio_backend())
            set_current_audio_backend("LibsndfileBackend")
            if custom.prepare is not None:
                parts = custom.prepare(source, names, options)
            else:
                place = "corpus_dir" if "corpus_dir" in parameters else next(iter(parameters))
                given = {"output_dir": scratch} if "output_dir" in parameters else {}
                parts = dict(
                    _parts(prepare(**{place: source}, **given | custom.arguments(source, names, options) | options), "")
                )
            check(parts)
            return parts


def recipe_names() -> list[str]:
    """The names of the corpora that lhotse can prepare."""
    import lhotse.recipes

    return sorted(name.removeprefix("prepare_") for name in vars(lhotse.recipes) if name.startswith("prepare_"))


Making = Callable[[Path, Sequence[str], dict[str, Any]], dict[str, Any]]
"""A function whose arguments are the corpus's folder, the parts of the set, and the options. Its result is a dictionary
that a field of `_Custom` describes."""


@dataclass(frozen=True)
class _Custom:
    """Settings that adapt lhotse's function to a corpus."""

    present: Callable[[Path], Sequence[str]] | None = None
    """A function that lists the parts in a folder, for corpora whose lhotse function can be limited to some parts. The
    parts of a set are checked before the function is called."""
    arguments: Making = lambda folder, parts, options: {}
    """A function that returns default arguments for lhotse's function."""
    prepare: Making | None = None
    """A function that returns the manifests of each part, used instead of lhotse's function."""
    rewrite: Rewriting = ()
    speaker: Callable[[str], str] | None = None
    """A function that returns the speaker for an utterance's id, for corpora in which lhotse's speaker is wrong."""


def _dataset_parts(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    return {"dataset_parts": list(parts)}


def _peoples_speech_parts(folder: Path) -> list[str]:
    from lhotse.recipes.peoples_speech import PEOPLES_SPEECH

    return [part for part in PEOPLES_SPEECH if (folder / f"{part}.json").is_file()]


def _peoples_speech(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The manifests of only the requested parts. `prepare_peoples_speech` is not used because it needs all parts, and
    reads all of them for each set."""
    from lhotse.recipes.peoples_speech import _prepare_subset

    made = {part: _prepare_subset(part, folder, int(options.get("num_jobs", 1))) for part in parts}
    return {part: {"recordings": pair[0], "supervisions": pair[1]} for part, pair in made.items()}


def _commonvoice(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    pairs = [part.split("/") for part in parts]
    return {"languages": sorted({pair[0] for pair in pairs}), "splits": sorted({pair[1] for pair in pairs})}


def _switchboard(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make paths absolute and prevent a download: without `transcripts_dir`, lhotse downloads the
    transcripts."""
    transcripts = folder / "swb_ms98_transcriptions"
    if "transcripts_dir" not in options and not transcripts.is_dir():
        raise DataError(
            f"{transcripts}: no such folder; put Switchboard's transcripts (switchboard_word_alignments.tar.gz of "
            "openslr.org/5) there, or set data.corpus.options.transcripts_dir to where they are"
        )
    return {"transcripts_dir": transcripts, "absolute_paths": True}


_CUSTOMS = {
    "librispeech": _Custom(
        lambda folder: sorted(each.name for each in folder.iterdir() if each.is_dir()), _dataset_parts
    ),
    "commonvoice": _Custom(
        lambda folder: sorted(f"{file.parent.name}/{file.stem}" for file in folder.glob("*/*.tsv")), _commonvoice
    ),
    # speakers are unknown; the ids of utterances from one recording session differ only in their last number
    "peoples_speech": _Custom(
        _peoples_speech_parts, prepare=_peoples_speech, speaker=lambda utterance: utterance.rpartition("_")[0]
    ),
    "gigaspeech": _Custom(
        lambda folder: ["XS", "S", "M", "L", "XL", "DEV", "TEST"],
        _dataset_parts,
        # remove punctuation and non-speech, as the scoring script of the corpus's authors does
        rewrite=((r"<(COMMA|PERIOD|QUESTIONMARK|EXCLAMATIONPOINT|SIL|MUSIC|NOISE|OTHER)>", " "),),
        speaker=lambda utterance: utterance.rpartition("_")[0],  # the recording, because lhotse's speaker is N/A
    ),
    "switchboard": _Custom(
        arguments=_switchboard,
        # similar to Kaldi's recipe, but removes noises and broken words
        rewrite=(
            (r"\[laughter-([^]\s]+)\]", r"\1"),  # a word said while laughing
            (r"\[[^]\s]+/([^]\s]+)\]", r"\1"),  # mispronounced: [said/meant]
            (r"(?<!\S)\S*\[[^]]*\]\S*(?!\S)", " "),  # noises, and words that were spoken only in part
            (r"<[^>\s]*>", " "),  # asides
            (r"[{}]", ""),  # coined words
            (r"_\d+(?!\S)", ""),  # variants of pronunciation
        ),
        speaker=lambda utterance: utterance.partition("-")[0],  # such as sw2001A; lhotse names A for both sides
    ),
}
"""The settings of corpora that need any, by the name of lhotse's recipe."""


def _parts(manifests: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all dictionaries with recordings and supervisions, each with its path of keys."""
    if isinstance(manifests, tuple) and len(manifests) == 2:
        manifests = {"recordings": manifests[0], "supervisions": manifests[1]}
    if not isinstance(manifests, dict):
        return
    if "recordings" in manifests and "supervisions" in manifests:
        yield prefix or "all", manifests
        return
    for key, value in manifests.items():
        yield from _parts(value, f"{prefix}/{key}" if prefix else str(key))


def _cuts(manifests: dict[str, Any]) -> Iterator[Any]:
    """An iterator over cuts, one for each supervision. Unless the manifests are read lazily from a file, the cuts are
    sorted, because the order of files in a folder differs between machines."""
    from lhotse import CutSet

    cuts = CutSet.from_manifests(recordings=manifests["recordings"], supervisions=manifests["supervisions"])
    segments = cuts.trim_to_supervisions(keep_overlapping=False)
    if getattr(manifests["supervisions"], "is_lazy", False):
        return iter(segments)
    return iter(sorted(segments, key=lambda cut: str(cut.supervisions[0].id)))


def _rewritten(utterance: Utterance, rewrite: Rewriting) -> Utterance:
    text = utterance.text
    for pattern, replacement in rewrite:
        text = re.sub(pattern, replacement, text)
    if text.strip() or not utterance.text.strip():
        return replace(utterance, text=text)
    return replace(utterance, wordless=utterance.text.strip())


def check_archive(path: Path) -> None:
    """Check the names and types of a tar's members, without reading their contents.

    Raises:
        DataError: The tar cannot be read, or contains `..`, an absolute name, a link, a device or a duplicate name.
    """
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    seen: set[str] = set()
    with told_as(f"{path}: cannot be read as Shar"), tarfile.open(path, "r:") as tar:  # compressed tars could be bombs
        for member in tar:
            name = member.name
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise DataError(f"{path}: {name[:200]!r} leads out of the archive")
            if not member.isfile():
                raise DataError(f"{path}: {name[:200]!r} is not a regular file but a link, a device or similar")
            if name in seen:
                raise DataError(f"{path}: contains {name[:200]!r} twice")
            seen.add(name)


_REFUSED_SOURCES = ("command", "url")


class LhotseCorpus(NamedSets):
    """Manifests of lhotse cuts (`.jsonl`, `.jsonl.gz`), or Shar folders. Each cut must have one transcribed
    supervision.

    As in lhotse, audio paths are relative to the working folder, unless `audio_root` is set.
    """

    kind: Literal["lhotse"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        path = self.set_path(set_name)
        for origin, cut in _shar_cuts(path) if path.is_dir() else _listed_cuts(path):
            yield utterance_of(cut, None, origin, self.channel, self.audio_root)


def _listed_cuts(manifest: Path) -> Iterator[tuple[str, Any]]:
    from lhotse.serialization import deserialize_item

    for line, item in read_json_lines(manifest):
        origin = f"{manifest}:{line}"
        with told_as(f"{origin}: not a lhotse cut"):
            cut = deserialize_item(item)
        yield origin, cut


def _shar_cuts(folder: Path) -> Iterator[tuple[str, Any]]:
    from lhotse import CutSet

    manifests = sorted(folder.glob("cuts.*.jsonl*"))
    if not manifests:
        raise DataError(f"{folder}: no cuts.*.jsonl.gz here; a Shar folder is expected")
    for manifest in manifests:
        for _ in read_json_lines(manifest):  # rejects decompression bombs and long lines before lhotse reads the file
            pass
    for archive in sorted(folder.glob("*.tar*")):
        check_archive(archive)
    with told_as(f"{folder}: cannot be read as Shar"):
        for cut in CutSet.from_shar(in_dir=folder):
            yield str(folder), cut


def utterance_of(cut: Any, utterance_id: str | None, origin: str, channel: int | None, root: Path | None) -> Utterance:
    """Convert a cut to an utterance. The utterance's id is `utterance_id` or, if that is None, the cut's id."""
    name = str(getattr(cut, "id", "?"))
    try:
        spoken = [each for each in getattr(cut, "supervisions", ()) if each.text is not None]
        segment = _segment(cut)
    except (AttributeError, TypeError, ValueError) as error:  # fields may be of any type
        raise DataError(f"{origin}: cut {name} is not a valid lhotse cut ({error})") from error
    if len(spoken) != 1:
        raise DataError(
            f"{origin}: cut {name} has {len(spoken)} transcribed supervisions, exactly one is expected; "
            f"use lhotse's CutSet.trim_to_supervisions"
        )
    if not cut.has_recording:
        raise DataError(f"{origin}: cut {name} has no recording")
    return Utterance(
        utterance_id or name,
        str(spoken[0].speaker or "unknown"),
        str(spoken[0].text),
        origin,
        partial(_load, cut, origin, channel, root),
        segment,
    )


def _tracks_and_sources(cut: Any) -> tuple[list[Any], list[Any]]:
    """The cuts that a cut mixes (or the cut itself), and their audio sources."""
    tracks = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
    return tracks, [source for each in tracks if each.has_recording for source in each.recording.sources]


def _segment(cut: Any) -> str:
    """A cut's audio files, start and duration, as a string."""
    _, sources = _tracks_and_sources(cut)
    return " ".join([*(str(each.source) for each in sources if each.type == "file"), str(cut.start), str(cut.duration)])


def _load(cut: Any, origin: str, channel: int | None, root: Path | None) -> Audio:
    """The audio of a cut. Raises DataError if it cannot be read."""
    name = f"{origin} (cut {cut.id})"
    with told_as(f"{name}: cannot be read as audio"):  # the cut's fields may have any type
        return _loaded(cut, name, channel, root)


def _loaded(cut: Any, name: str, channel: int | None, root: Path | None) -> Audio:
    """The audio of a cut. A simple segment of a file is read by `read_audio`, with its checks."""
    tracks, sources = _tracks_and_sources(cut)
    for source in sources:
        if source.type in _REFUSED_SOURCES:
            raise DataError(f"{name}: its audio source is a {source.type} ({source.source!r}); only files are read")
        if source.type == "file" and not _inside(root, source.source).is_file():
            raise DataError(f"{name}: audio file {_inside(root, source.source)} is missing or not a regular file")
    if cut.duration > MAX_SECONDS:
        raise DataError(f"{name}: {cut.duration:.0f} s of audio, the limit is {MAX_SECONDS:.0f} s")
    wanted = cut.channel if channel is None and not hasattr(cut, "tracks") else channel
    if len(tracks) == 1 and len(sources) == 1 and sources[0].type == "file" and not cut.recording.transforms:
        channels = list(sources[0].channels)
        column = channels.index(wanted) if wanted in channels else wanted
        if isinstance(column, int):
            return read_audio(_inside(root, sources[0].source), cut.start, cut.duration, column)
    if root is not None:
        cut = cut.with_recording_path_prefix(root)
    samples = np.atleast_2d(cut.load_audio())
    if len(samples) > 1 and channel is None:
        raise DataError(f"{name}: {len(samples)} channels; set data.corpus.channel to the one to read (from 0)")
    if channel is not None and channel >= len(samples):
        raise DataError(f"{name}: {len(samples)} channels, so there is no channel {channel} (from 0)")
    return np.ascontiguousarray(samples[channel or 0], dtype=np.float32), int(cut.sampling_rate)


def _inside(root: Path | None, name: str) -> Path:
    """The path of the audio file `name`. Unless `root` is None, the path must be inside `root`."""
    if root is None:
        return Path(name)
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"audio {name!r} is outside data.corpus.audio_root, {root}")
    return path
