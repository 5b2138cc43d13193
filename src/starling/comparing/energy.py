"""The energy that the processors of this machine take, by Intel's counters (RAPL)."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_LOOK_EVERY = 60.0
"""Seconds; a counter wraps at 262 kJ, which takes a processor of 300 W a quarter of an hour."""


@contextmanager
def metering(folder: Path = POWERCAP) -> Generator[Callable[[], float | None], None, None]:
    """Gives a function that tells the joules since the context began; None where no counter can be read (often only
    root may)."""
    counters = sorted(folder.glob("intel-rapl:?"))  # whole processors; their parts are `intel-rapl:0:0`
    lock, is_over = threading.Lock(), threading.Event()
    last, microjoules = _read(counters), 0

    def look() -> float | None:
        nonlocal last, microjoules
        with lock:
            now = _read(counters) or last
            for (before, _), (after, largest) in zip(last, now, strict=True):
                microjoules += after - before + (largest if after < before else 0)
            last = now
            return microjoules / 1e6 if last else None

    def keep_looking() -> None:
        while not is_over.wait(_LOOK_EVERY):
            look()

    thread = threading.Thread(target=keep_looking, name="starling-energy", daemon=True)
    thread.start()
    try:
        yield look
    finally:
        is_over.set()
        thread.join()


def _read(counters: list[Path]) -> list[tuple[int, int]]:
    """Each counter and where it wraps; nothing if one cannot be read."""
    try:
        return [
            (int((each / "energy_uj").read_text()), int((each / "max_energy_range_uj").read_text()))
            for each in counters
        ]
    except (OSError, ValueError):
        return []
