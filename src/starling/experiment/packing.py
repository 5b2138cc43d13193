"""Pickles a job for the launcher's own learners, which import the user's script before they unpickle it."""

import io
import pickle
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import current_process, spawn
from pathlib import Path
from types import FunctionType
from typing import Any

from starling.errors import ConfigError
from starling.experiment.folder import ExperimentFolder
from starling.recipe.run import RunConfig
from starling.training.job import Job


def pack(job: Job, run: RunConfig) -> bytes:
    """Pickle everything that a learner needs: how to import this script, the settings, and the job.

    Raises ConfigError for a job that cannot be pickled.
    """
    preparation = spawn.get_preparation_data("starling-learner")
    preparation.pop("authkey", None)
    script = preparation.get("init_main_from_path")
    if script is not None and not Path(script).exists():
        raise ConfigError(
            f"job: learner processes import the script that calls starling.train, but {Path(script).name} is no file; "
            "save the script in a file, and start that instead of reading it from standard input"
        )
    buffer = io.BytesIO()
    pickle.dump(preparation, buffer)
    has_script = "init_main_from_name" in preparation or script is not None
    try:  # not multiprocessing's pickler, whose shared memory would end with this process
        (pickle.Pickler if has_script else _WithoutScript)(buffer).dump((job, run))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"job: cannot be sent to learner processes ({error}); define its functions and classes at the top level of "
            "a module or of the script, and bind their arguments with functools.partial"
        ) from error
    return buffer.getvalue()


class _WithoutScript(pickle.Pickler):
    """The pickler in a notebook or an interactive session, whose functions and classes no other process can import."""

    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", None) == "__main__" and isinstance(thing, (type, FunctionType)):
            raise ConfigError(
                f"job: {thing.__qualname__} is defined in a notebook or an interactive session, from which learner "
                "processes cannot import it; put the job's functions and classes into a file (in a notebook, with "
                "%%writefile my_job.py as the first line of their cell), and import them from my_job"
            )
        return NotImplemented


@contextmanager
def packed_command(job: Job, run: RunConfig, folder: ExperimentFolder) -> Generator[list[str], None, None]:
    """The command of a learner that reads a packed job. Its last argument is the job's file, which exists within this
    context."""
    shared = None if run.launch.kind == "local" else folder.path  # where learners on other machines find it
    with tempfile.TemporaryDirectory(prefix=".starling-job-", dir=shared) as scratch:
        file = Path(scratch) / "job"
        file.write_bytes(pack(job, run))
        yield [sys.executable, "-m", "starling.experiment.job_process", str(file)]


def unpack(packed: bytes) -> tuple[Job, RunConfig]:
    """The inverse of `pack`; call it only with bytes from this process's own launcher."""
    buffer = io.BytesIO(packed)
    preparation = pickle.load(buffer)  # noqa: S301 - written by this learner's own launcher
    process = current_process()
    process._inheriting = True  # type: ignore[attr-defined]  # multiprocessing's flag while the script is imported
    try:
        spawn.prepare(preparation)
        job, run = pickle.load(buffer)  # noqa: S301 - as above
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"job: a learner cannot import a function or class of it ({error}); define it at the top level of a module "
            "or of the script, not under `if __name__`"
        ) from error
    finally:
        del process._inheriting  # type: ignore[attr-defined]
    return job, run


def refuse_if_importing(caller: str) -> None:
    """Raise ConfigError if a learner, or a process that computes cells, is importing the script that makes the call."""
    if getattr(current_process(), "_inheriting", False):
        raise ConfigError(
            f"{caller} was called while another process imported this script; put the call under "
            '`if __name__ == "__main__":`'
        )
