"""Recordings in containers that libsndfile does not know, which FFmpeg decodes."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from starling.errors import DataError
from starling.speech import audio
from starling.speech.audio import opened, read_audio

av = pytest.importorskip("av", reason="the extra [media] is not installed")

SECONDS = 3.0
Write = Callable[[Path], Path]


def sweep(rate: int) -> NDArray[np.float32]:
    """A tone that rises from 200 to 1,200 Hz."""
    time = np.arange(int(rate * SECONDS)) / rate
    return np.asarray(0.3 * np.sin(2 * np.pi * (200 * time + 500 / SECONDS * time**2)), np.float32)


def written(path: Path, form: str, codec: str, rate: int = 16000, channels: int = 1, **how: Any) -> Path:
    """The sweep in all channels, each half as loud as the previous one."""
    from tests.speech.media import write_media

    return write_media(path, form, codec, np.stack([sweep(rate) / 2**each for each in range(channels)]), rate, **how)


WRITE: dict[str, Write] = {
    "m4a": lambda folder: written(folder / "a.m4a", "ipod", "aac"),
    "aac": lambda folder: written(folder / "a.aac", "adts", "aac"),
    "webm": lambda folder: written(folder / "a.webm", "webm", "libopus", rate=48000),
    "webm of a browser, without its length": lambda folder: written(
        folder / "a.webm", "webm", "libopus", rate=48000, live="1"
    ),
    "mp4 with a picture": lambda folder: written(folder / "a.mp4", "mp4", "aac", has_video=True),
    "mkv": lambda folder: written(folder / "a.mkv", "matroska", "pcm_s16le"),
}


@pytest.mark.parametrize("kind", WRITE)
def test_audio_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    """Within the limits of codecs, it is as loud, and at most 30 ms late; bare AAC does not say how late it is."""
    path, most_late = WRITE[kind](tmp_path), 0.08 if kind == "aac" else 0.03
    samples, rate = read_audio(path)
    expected = sweep(rate)
    assert abs(len(samples) - len(expected)) <= most_late * rate
    around, middle = rate // 10, slice(rate, 2 * rate)
    similarity = np.correlate(samples[rate - around : 2 * rate + around], expected[middle], "valid")
    assert abs(similarity.argmax() - around) <= most_late * rate
    assert similarity.max() / np.sum(expected[middle] ** 2) == pytest.approx(1.0, abs=0.05)
    part, _ = read_audio(path, 1.0, 0.5)
    np.testing.assert_array_equal(part, samples[rate : rate + rate // 2])
    with path.open("rb") as file, opened(file, "stream") as sound:
        np.testing.assert_array_equal(np.concatenate(list(sound))[: len(samples)], samples)
        assert sound.seconds == pytest.approx(SECONDS, abs=most_late)


def test_several_channels_are_averaged_or_chosen(tmp_path: Path) -> None:
    """They are treated as in any other file."""
    path = written(tmp_path / "a.webm", "webm", "libopus", rate=48000, channels=2)
    first, second = (read_audio(path, channel=channel)[0] for channel in (0, 1))
    assert np.std(second) / np.std(first) == pytest.approx(0.5, abs=0.05)
    with opened(path, "a.webm") as sound:
        np.testing.assert_allclose(np.concatenate(list(sound))[: len(first)], (first + second) / 2, atol=1e-6)
    with pytest.raises(DataError, match=r"a\.webm: 2 channels; set data\.corpus\.channel"):
        read_audio(path)


def test_without_ffmpeg_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are not searched for such files."""
    path = WRITE["m4a"](tmp_path)
    assert ".m4a" in audio.audio_suffixes()
    monkeypatch.setattr(audio, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"a\.m4a: cannot be read .* pip install 'starling-asr\[media\]'"):
        read_audio(path)
    assert ".m4a" not in audio.audio_suffixes()


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{}\n", "ffconcat version 1.0\nfile {}\n"]
)
def test_a_playlist_opens_no_other_file(tmp_path: Path, text: str) -> None:
    """A recording sent to a server must not make it read its own files."""
    path = tmp_path / "list.m4a"
    path.write_text(text.format(WRITE["mkv"](tmp_path)))
    for given in (path, io.BytesIO(path.read_bytes())):
        with (
            pytest.raises(DataError, match=r"cannot be read as audio: libsndfile does not .* and FFmpeg: "),
            opened(given, "x"),
        ):
            pass


def test_a_recording_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """Its header is at its beginning, and declares what is missing now. Up to a tenth may be missing."""
    whole = written(tmp_path / "a.m4a", "ipod", "aac", movflags="faststart").read_bytes()
    cut = tmp_path / "cut.m4a"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.m4a: truncated: only \d+ of \d+ samples"):
        read_audio(cut)
    with pytest.raises(DataError, match="truncated"), opened(cut, "cut.m4a") as sound:
        list(sound)
    cut.write_bytes(whole[: round(0.97 * len(whole))])
    assert len(read_audio(cut)[0]) >= 0.9 * SECONDS * 16000


def test_a_picture_alone_is_not_a_recording(tmp_path: Path) -> None:
    """The error says so."""
    path = tmp_path / "silent.mp4"
    with av.open(str(path), "w") as file:
        picture = file.add_stream("mpeg4", rate=10)
        picture.width, picture.height, picture.pix_fmt = 32, 32, "yuv420p"
        file.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(picture.encode(None))
    with pytest.raises(DataError, match="there is no audio in it"):
        read_audio(path)


def test_damaged_files_are_read_or_named(tmp_path: Path) -> None:
    """Cut or overwritten files raise nothing but a `DataError`, and never give more audio than there was."""
    wholes, drawn = [WRITE[kind](tmp_path).read_bytes() for kind in ("m4a", "webm")], random.Random(1)
    damaged, refused = tmp_path / "damaged", 0
    for number in range(100):
        whole = wholes[number % 2]
        content = bytearray(whole[: drawn.randrange(1, len(whole)) if number % 3 == 0 else len(whole)])
        for _ in range(drawn.randrange(1, 20) if number % 3 else 0):
            content[drawn.randrange(len(content))] = drawn.randrange(256)
        damaged.write_bytes(content)
        try:
            samples, rate = read_audio(damaged)
        except DataError as error:
            assert str(error).startswith(str(damaged))
            refused += 1
        else:
            assert 0 < len(samples) <= 1.1 * SECONDS * rate
    assert 0 < refused < 100
