"""Corpora that lhotse's recipes prepare, in the folder layouts in which they are downloaded."""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from starling.errors import DataError, did_you_mean
from starling.speech.corpora.cuts import utterance_of
from starling.speech.corpora.lines import told_as
from starling.speech.corpora.utterance import FileCorpus, Utterance

Rewriting = tuple[tuple[str, str], ...]
"""Regular expressions with the replacements of their matches, in order."""


class LhotseRecipeCorpus(FileCorpus):
    """Any corpus for which lhotse has a recipe, in the folder layout in which it is downloaded.

    Runs `lhotse.recipes.prepare_<recipe>(path, **options)`. A set is one or more of the parts that this call returns,
    e.g. `train: [train-clean-100]`; nested parts, such as Common Voice's languages, have names like 'en/train'. If
    lhotse's function can be limited to certain parts, it reads only those of the set. Audio is read by libsndfile.
    """

    kind: Literal["lhotse-recipe"]
    recipe: str
    """The name of the recipe, such as libri_speech for `lhotse.recipes.prepare_libri_speech`."""
    options: dict[str, str | bool | int | float | tuple[str, ...]] = Field(default={})
    """Further arguments of lhotse's function."""
    rewrite: Rewriting | None = None
    """Changes of the transcripts, as pairs [regular expression, replacement]. The default rewrites the marks of
    GigaSpeech and Switchboard, and changes no other corpus. Utterances without any words left are left out and
    listed."""
    sets: dict[str, str | tuple[str, ...]]

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
        """The manifests of the parts `names`, and perhaps of others, by name."""
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
            # lhotse reads all audio by libsndfile, as Starling does, and starts no other programs; some recipes print
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
    """The corpora that lhotse can prepare."""
    import lhotse.recipes

    return sorted(name.removeprefix("prepare_") for name in vars(lhotse.recipes) if name.startswith("prepare_"))


Making = Callable[[Path, Sequence[str], dict[str, Any]], dict[str, Any]]
"""A function that returns what a corpus needs for a call of lhotse's function, from the corpus's folder, the parts of
the set, and the options."""


@dataclass(frozen=True)
class _Custom:
    """Settings of a corpus that lhotse's function lacks."""

    present: Callable[[Path], Sequence[str]] | None = None
    """A function that lists the parts in a folder; they are checked before lhotse's function, which can be limited to
    some of them, is called."""
    arguments: Making = lambda folder, parts, options: {}
    """A function that returns default arguments of lhotse's function."""
    prepare: Making | None = None
    """A function that returns the manifests of each part, used instead of lhotse's function."""
    rewrite: Rewriting = ()
    speaker: Callable[[str], str] | None = None
    """A function that returns the speaker for the id of an utterance, where lhotse's speaker is wrong."""


def _dataset_parts(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    return {"dataset_parts": list(parts)}


def _peoples_speech_parts(folder: Path) -> list[str]:
    from lhotse.recipes.peoples_speech import PEOPLES_SPEECH

    return [part for part in PEOPLES_SPEECH if (folder / f"{part}.json").is_file()]


def _peoples_speech(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The manifests of the wanted parts only: `prepare_peoples_speech` needs all parts, and reads all of them for each
    set."""
    from lhotse.recipes.peoples_speech import _prepare_subset

    made = {part: _prepare_subset(part, folder, int(options.get("num_jobs", 1))) for part in parts}
    return {part: {"recordings": pair[0], "supervisions": pair[1]} for part, pair in made.items()}


def _commonvoice(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    pairs = [part.split("/") for part in parts]
    return {"languages": sorted({pair[0] for pair in pairs}), "splits": sorted({pair[1] for pair in pairs})}


def _switchboard(folder: Path, parts: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Arguments for absolute paths and no download: without `transcripts_dir`, lhotse fetches the transcripts."""
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
    # no speakers are known; utterances of one recording session have one id but for its number
    "peoples_speech": _Custom(
        _peoples_speech_parts, prepare=_peoples_speech, speaker=lambda utterance: utterance.rpartition("_")[0]
    ),
    "gigaspeech": _Custom(
        lambda folder: ["XS", "S", "M", "L", "XL", "DEV", "TEST"],
        _dataset_parts,
        # punctuation and what is not speech, as its authors' scoring script treats them
        rewrite=((r"<(COMMA|PERIOD|QUESTIONMARK|EXCLAMATIONPOINT|SIL|MUSIC|NOISE|OTHER)>", " "),),
        speaker=lambda utterance: utterance.rpartition("_")[0],  # lhotse's is N/A; this is the recording
    ),
    "switchboard": _Custom(
        arguments=_switchboard,
        # much as in Kaldi's recipe, but without noises and broken words
        rewrite=(
            (r"\[laughter-([^]\s]+)\]", r"\1"),  # a word said while laughing
            (r"\[[^]\s]+/([^]\s]+)\]", r"\1"),  # mispronounced: [said/meant]
            (r"(?<!\S)\S*\[[^]]*\]\S*(?!\S)", " "),  # noises, and words of which a part was not said
            (r"<[^>\s]*>", " "),  # asides
            (r"[{}]", ""),  # coined words
            (r"_\d+(?!\S)", ""),  # variants of pronunciation
        ),
        speaker=lambda utterance: utterance.partition("-")[0],  # sw2001A; lhotse names A for both sides
    ),
}
"""The settings of some corpora, by the name of lhotse's recipe."""


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


def _cuts(manifests: dict[str, Any]) -> Iterator[Any]:
    """A cut for each supervision. Cuts are sorted, because the order of files in a folder differs between machines,
    unless the manifests are read lazily from a file."""
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
