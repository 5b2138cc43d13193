"""Corpora in lhotse's formats, or prepared by lhotse's recipes."""

import inspect
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from starling.errors import DataError, did_you_mean
from starling.speech.corpora.archives import check_archive
from starling.speech.corpora.audio import MAX_SECONDS, read_audio
from starling.speech.corpora.lines import read_json_lines
from starling.speech.corpora.utterance import Audio, FileCorpus, NamedSets, Utterance

_REFUSED_SOURCES = ("command", "url")


class LhotseCorpus(NamedSets):
    """Manifests of lhotse cuts (`.jsonl`, `.jsonl.gz`), or Shar folders; each cut has one transcribed supervision.

    Relative audio paths start at the working folder, as in lhotse, unless `audio_root` is set.
    """

    kind: Literal["lhotse"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        path = self.set_path(set_name)
        if path.is_dir():
            cuts = _shar_cuts(path)
        else:
            cuts = ((f"{path}:{line}", _cut(item, f"{path}:{line}")) for line, item in read_json_lines(path))
        for origin, cut in cuts:
            yield _utterance(cut, None, origin, self.channel, self.audio_root)


class LhotseRecipeCorpus(FileCorpus):
    """Any corpus for which lhotse has a recipe, in the folder layout in which it is downloaded.

    Runs `lhotse.recipes.prepare_<recipe>(path, **options)`. A set is one or more of the parts that this returns, e.g.
    `train: [train-clean-100]`; nested parts, such as Common Voice's by language, are named 'en/train'.
    """

    kind: Literal["lhotse-recipe"]
    recipe: str
    """The name of the recipe: libri_speech, for example, for `lhotse.recipes.prepare_libri_speech`."""
    options: dict[str, str | bool | int | float | tuple[str, ...]] = Field(default={})
    """Further arguments of lhotse's function."""
    sets: dict[str, str | tuple[str, ...]]
    """Name of a set -> the part, or list of parts, that it is made of."""

    @field_validator("recipe")
    @classmethod
    def _known(cls, name: str) -> str:
        known = recipe_names()
        if name not in known:
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
            raise ValueError(f"lhotse has no recipe {name!r}; {hint}")
        return name

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        from lhotse import CutSet

        wanted = self.sets[set_name]
        # some recipes read their own manifests lazily, so the files must exist while the cuts are used
        with tempfile.TemporaryDirectory(prefix="starling-") as scratch:
            parts = self._prepare(Path(scratch))
            for part in (wanted,) if isinstance(wanted, str) else wanted:
                if part not in parts:
                    raise DataError(
                        f"set {set_name}: lhotse's recipe {self.recipe} has no part {part!r}, only {', '.join(parts)}"
                    )
                manifests = parts[part]
                cuts = CutSet.from_manifests(recordings=manifests["recordings"], supervisions=manifests["supervisions"])
                for cut in cuts.trim_to_supervisions(keep_overlapping=False):
                    name = cut.supervisions[0].id
                    yield _utterance(cut, name, f"{self.recipe}/{part}", self.channel, self.audio_root)

    def _prepare(self, scratch: Path) -> dict[str, dict[str, Any]]:
        import lhotse.recipes

        prepare = getattr(lhotse.recipes, f"prepare_{self.recipe}")
        source = self.located()
        options: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()
        }
        parameters = inspect.signature(prepare).parameters
        unknown = [name for name in options if name not in parameters]
        if unknown:
            raise DataError(
                f"lhotse's recipe {self.recipe} has no option {', '.join(unknown)}, only {', '.join(parameters)}"
            )
        if "output_dir" in parameters:
            options.setdefault("output_dir", scratch)
        try:
            if "corpus_dir" in parameters:
                manifests = prepare(corpus_dir=source, **options)
            else:
                manifests = prepare(source, **options)
        except Exception as error:  # lhotse's recipes raise any kind of error, including bare assertions
            raise DataError(
                f"lhotse's recipe {self.recipe} cannot prepare {source}: {type(error).__name__}: "
                f"{error or 'a check of the corpus folder failed'}; see lhotse.recipes.prepare_{self.recipe}"
            ) from error
        return dict(_parts(manifests, ""))


def recipe_names() -> list[str]:
    """The corpora that lhotse can prepare."""
    import lhotse.recipes

    return sorted(name.removeprefix("prepare_") for name in vars(lhotse.recipes) if name.startswith("prepare_"))


def _parts(manifests: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All dictionaries with recordings and supervisions, each with its path of keys."""
    if isinstance(manifests, tuple) and len(manifests) == 2:
        manifests = {"recordings": manifests[0], "supervisions": manifests[1]}
    if not isinstance(manifests, dict):
        return
    if "recordings" in manifests and "supervisions" in manifests:
        yield prefix or "all", manifests
        return
    for key, value in manifests.items():
        yield from _parts(value, f"{prefix}/{key}" if prefix else str(key))


def _cut(item: dict[str, Any], origin: str) -> Any:
    from lhotse.serialization import deserialize_item

    try:
        return deserialize_item(item)
    except Exception as error:  # lhotse raises any kind of error for invalid fields
        raise DataError(f"{origin}: not a lhotse cut: {type(error).__name__}: {error}") from error


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
    try:
        for cut in CutSet.from_shar(in_dir=folder):
            yield str(folder), cut
    except DataError:
        raise
    except Exception as error:  # tarfile, JSON and lhotse's assertions
        raise DataError(f"{folder}: cannot be read as Shar: {type(error).__name__}: {error}") from error


def _utterance(cut: Any, utterance_id: str | None, origin: str, channel: int | None, root: Path | None) -> Utterance:
    """One cut as an utterance, with `utterance_id` or, if that is None, the cut's id."""
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


def _segment(cut: Any) -> str:
    """A cut's audio files, start and duration."""
    tracks = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
    sources = [source for each in tracks if each.has_recording for source in each.recording.sources]
    return " ".join([*(str(each.source) for each in sources if each.type == "file"), str(cut.start), str(cut.duration)])


def _load(cut: Any, origin: str, channel: int | None, root: Path | None) -> Audio:
    try:
        return _loaded(cut, origin, channel, root)
    except DataError:
        raise
    except Exception as error:  # from any of lhotse's audio backends, or from fields, which may be of any type
        raise DataError(f"{origin} (cut {cut.id}): cannot be read as audio: {type(error).__name__}: {error}") from error


def _loaded(cut: Any, origin: str, channel: int | None, root: Path | None) -> Audio:
    """The audio of a cut. A simple segment of a file is read by `read_audio`, with its checks."""
    name = f"{origin} (cut {cut.id})"
    tracks = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
    sources = [source for each in tracks if each.has_recording for source in each.recording.sources]
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
    """The path of an audio file: unchanged without `root`, otherwise inside it."""
    if root is None:
        return Path(name)
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"audio {name!r} is outside data.corpus.audio_root, {root}")
    return path
