"""Makes prepared sets of any size in seconds: an index of any number of utterances, over a few recordings."""

import io
import json
import os
from dataclasses import asdict
from pathlib import Path
from tarfile import TarFile, TarInfo
from zlib import crc32

import numpy as np
import soundfile

from starling.files import sha256
from starling.speech.shards import INDEX_FILES, SetSummary, Shard

RATE = 8000
SHARD_SIZE = 1000
RECORDINGS = 16
"""Number of different recordings in each shard, of 1 to 4 s; every utterance is one of them."""
WORDS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
SPEAKER_OF = 200
"""Number of utterances of a speaker."""


def write_large_set(folder: Path, utterances: int) -> None:
    """Write what `starling prepare` would produce for so many utterances, in shards that are all alike."""
    (folder / "shar").mkdir(parents=True)
    (folder / "index").mkdir()
    tar, samples, offsets, sizes, checks = _recordings()
    numbers = np.arange(utterances)
    shards = []
    for shard in range(-(-utterances // SHARD_SIZE)):
        name = f"recording.{shard:06d}.tar"
        (folder / "shar" / name).write_bytes(tar)
        shards.append(Shard(name, len(tar)))
    chosen = np.random.default_rng(1).integers(RECORDINGS, size=utterances)
    arrays = {
        "durations": (samples[chosen] / RATE).astype(np.float32),
        "num_samples": samples[chosen],
        "speaker_of": (numbers // SPEAKER_OF).astype(np.int32),
        "shard_of": (numbers // SHARD_SIZE).astype(np.int32),
        "offsets": offsets[chosen],
        "sizes": sizes[chosen].astype(np.int32),
        "checks": checks[chosen],
    }
    num_speakers = -(-utterances // SPEAKER_OF)
    texts = [" ".join(WORDS[int(digit)] for digit in f"{number % 1000:03d}") for number in range(1000)]
    strings = {
        "ids": [f"utterance-{number:08d}" for number in range(utterances)],
        "texts": [texts[number % 1000] for number in range(utterances)],
        "speakers": [f"speaker-{number:06d}" for number in range(num_speakers)],
    }
    for name, values in strings.items():
        encoded = [value.encode() for value in values]
        arrays[f"{name}_ends"] = np.cumsum([len(value) for value in encoded], dtype=np.int64)
        arrays[name] = np.frombuffer(b"".join(encoded), np.uint8)
    for name, array in arrays.items():
        np.save(folder / "index" / f"{name}.npy", array, allow_pickle=False)
    seconds = float(arrays["durations"].sum(dtype=np.float64))
    files = {name: sha256(folder / "index" / name) for name in INDEX_FILES}
    summary = SetSummary(
        "large", utterances, seconds, num_speakers, RATE, 0, 0.0, "large", tuple(shards), files=files
    ).signed()
    (folder / "summary.json").write_text(json.dumps(asdict(summary)))


def forget(folder: Path) -> None:
    """Ask the system to drop a set's files from its caches, as far as it does that."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _recordings() -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A tar of FLAC files, their samples, their offsets and sizes in the tar, and their CRC-32, `[RECORDINGS]` each."""
    generator = np.random.default_rng(0)
    samples = np.linspace(RATE, 4 * RATE, RECORDINGS).astype(np.int64)
    file, offsets, sizes, checks = io.BytesIO(), [], [], []
    with TarFile(fileobj=file, mode="w") as tar:
        for number, length in enumerate(samples.tolist()):
            encoded = io.BytesIO()
            time = np.arange(length) / RATE
            audio = 0.1 * np.sin(2 * np.pi * 100 * (number + 1) * time) + 0.001 * generator.standard_normal(length)
            soundfile.write(encoded, audio, RATE, format="FLAC", subtype="PCM_16")
            member = TarInfo(f"{number}.flac")
            member.size = len(encoded.getvalue())
            encoded.seek(0)
            offsets.append(file.tell() + 512)
            sizes.append(member.size)
            checks.append(crc32(encoded.getvalue()))
            tar.addfile(member, encoded)
    places = np.array(offsets, np.int64), np.array(sizes, np.int64)
    return file.getvalue(), samples, *places, np.array(checks, np.uint32)
