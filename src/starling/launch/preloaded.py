"""Starts learners on this machine as forks of one process that has already imported torch and the training loop.

The imports take seconds of processor time, which would dominate every start on a machine with fewer cores than
learners, and the replacement of a lost learner. The process that forks computes nothing and has no connections but
those to its launcher. Learners share its memory of the imported modules.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import IO

from starling.engines.processes.forks import owned
from starling.launch.link import VARIABLE

Seconds = float
_MODULES = ("torch._dynamo", "torch.utils.tensorboard", "starling.experiment.train")
"""What a learner imports; the first optimizer of a process imports Dynamo."""
_NUMBERS = 64  # bytes that hold a process number or an exit code


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` that a launcher needs.

    Args:
        pid: The process's number.
        handle: A descriptor of the process, as from `os.pidfd_open`.
        report: The socket on which the process that forked this one sends its exit code. If no code comes, because the
            sender is gone, this process counts as killed.
    """

    def __init__(self, pid: int, handle: int, report: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle, self._report, self._lock = handle, report, threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, negative if a signal killed it."""
        with self._lock:  # a second stop signal is handled in a thread of its own
            if self.returncode is None and self._has_ended(0.0):
                self.returncode = int(self._report.recv(_NUMBERS) or -signal.SIGKILL)
                self._report.close()
                os.close(self._handle)
            return self.returncode

    def wait(self, timeout: Seconds | None = None) -> int | None:
        """Wait for the process to end, and return its exit code. Raises TimeoutExpired."""
        if self.returncode is None and not self._has_ended(timeout):
            raise TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.poll()

    def _has_ended(self, within: Seconds | None) -> bool:
        polling = select.poll()
        polling.register(self._handle, select.POLLIN)
        return bool(polling.poll(None if within is None else 1000.0 * within))

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Send the process SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """A process that imports torch and `modules`, and then forks others. It ends with this process at the latest."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, *modules]
        with theirs:
            self._process = Popen(
                command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        self._line = owned(ours)

    def close(self) -> None:
        """End the process; its forks continue."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def fork(
        self, module: Sequence[str], env: Mapping[str, str], output: IO[bytes], line: socket.socket, folder: Path
    ) -> Forked | None:
        """Start a module with arguments as `python -m` would; None if the process that forks is gone.

        Args:
            module: The module and its arguments.
            env: All environment variables, to which the descriptor of `line` is added.
            output: The file that gets the standard output and error.
            line: The process's end of the connection to its launcher.
            folder: The current folder.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile("w+") as errand, theirs:
            json.dump((list(module), dict(env), str(folder)), errand)
            errand.seek(0)
            with suppress(OSError):
                files = [theirs.fileno(), errand.fileno(), output.fileno(), line.fileno()]
                socket.send_fds(self._line, [b"fork"], files)
        number, handles, *_ = socket.recv_fds(owned(ours), _NUMBERS, 1, socket.MSG_CMSG_CLOEXEC)
        if number:
            return Forked(int(number), handles[0], ours)
        ours.close()
        return None


@contextmanager
def preloading(modules: Sequence[str] = ()) -> Generator[Preloaded | None, None, None]:
    """Within this context, a process imports torch and these modules, and then forks others. None where the system
    cannot do so."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # no Linux, or one older than 5.3, or a sandbox that forbids the call
        yield None
        return
    with closing(Preloaded(modules)) as preloaded:
        yield preloaded


def serve(line: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, fork a process for each request on `line`, and report how it ends, until `line` is closed."""
    for module in (*_MODULES, *modules):
        with suppress(ImportError):  # a learner that needs the module reports the error
            import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the memory that it shares
    with DefaultSelector() as selector:
        selector.register(line, EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _report(key.fd, *key.data)
                    continue
                request, files, _, _ = socket.recv_fds(line, _NUMBERS, 4, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    os._exit(0)  # without the second that an orderly exit takes with this many modules
                report, *others = files
                with socket.socket(fileno=report) as reporting:
                    if (pid := os.fork()) == 0:
                        reporting.close()
                        selector.close()
                        line.close()
                        become(*others)
                        return
                    for number in others:
                        os.close(number)
                    handle = os.pidfd_open(pid)
                    with suppress(OSError):  # its launcher may be gone
                        socket.send_fds(reporting, [str(pid).encode()], [handle])
                    selector.register(handle, EVENT_READ, (pid, reporting.dup()))


def _report(handle: int, pid: int, report: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    with report, suppress(OSError):  # its launcher may be gone
        report.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(errand: int, output: int, line: int) -> None:
    """Be the process that a request describes, to the end of this process."""
    os.setsid()
    with open(errand, "rb") as file, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - the first is a descriptor
        module, environment, folder = json.load(file)
        for number, standard in ((nothing.fileno(), 0), (output, 1), (output, 2)):
            os.dup2(number, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment, **{VARIABLE: str(line)})
    os.chdir(folder)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    Path("/proc/self/comm").write_text(f"learner-{environment['RANK']}", encoding="utf-8")  # its name for ps and top
    tempfile.tempdir = None  # depends on the environment
    sys.modules["numpy"].random.seed()  # all forked processes would draw the same numbers; `random` sees to this itself
    name, *sys.argv[1:] = module
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=os.dup(0)), sys.argv[1:])
