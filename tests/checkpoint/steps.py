"""The steps of a save, one by one, so that a test can let something happen at any of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import save_file

CALLS = ("mkdir", "fsync", "rename", "unlink", "rmdir")
"""Functions of `os` that change what is on the disk; `shutil` and `pathlib` come down to them."""


class Steps:
    """Counts steps, and lets `act` happen before step number `at`, which is counted from 1.

    Each call of `os` in `calls` is a step. Writing a file is three: before it, when half of it is written, and after.
    """

    def __init__(self, at: int, act: Callable[[], None], calls: tuple[str, ...] = CALLS) -> None:
        self._at = at
        self._act = act
        self._calls = calls
        self.num_done = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens inside."""
        patches = [mock.patch.object(os, name, self._before(getattr(os, name))) for name in self._calls]
        patches.append(mock.patch.object(Path, "write_text", self._writing(Path.write_text, place=0)))
        modules = ("safetensors.torch", "tests.checkpoint.test_checkpoints")
        patches += [mock.patch(f"{module}.save_file", self._writing(save_file, place=1)) for module in modules]
        try:
            for patch in patches:
                patch.start()
            yield
        finally:
            for patch in patches:
                patch.stop()

    def _step(self) -> None:
        self.num_done += 1
        if self.num_done == self._at:
            self._act()

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._step()
            return call(*args, **options)

        return counted

    def _writing(self, write: Callable[..., Any], place: int) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._step()
            written = write(*args, **options)
            if self.num_done + 1 == self._at:
                os.truncate(args[place], Path(args[place]).stat().st_size // 2)
            self._step()
            self._step()
            return written

        return counted
