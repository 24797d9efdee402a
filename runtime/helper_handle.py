"""The parent's handle on its helper process (``runtime.helper``): one a process, started when first needed.

That there is one, shared by all sessions, is the only state this package keeps in a module: starting it costs seconds.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from planner.errors import BadInput, RankFailed

MAX_RANKS = 200  # their sockets travel in one message, which takes at most 253

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from runtime.helper import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""
_STOP_S = 10.0


class HelperProcess:
    """A running helper. ``request`` may be used from several threads."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [_interpreter(), "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), json.dumps(_import_path())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent only
            )
        self._lock = threading.Lock()
        HELPERS.drop_after_fork(self._control)
        atexit.register(self.stop)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def request(self, sockets: Sequence[socket.socket]) -> None:
        """Ask for one session: its session socket, then one channel for each rank."""
        with self._lock:
            try:
                socket.send_fds(self._control, [b"s"], [each.fileno() for each in sockets])
            except OSError as error:
                raise RankFailed(f"the helper process that starts the ranks is gone ({error}); try again") from error

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """None while it runs; negative for a signal. Waits up to ``wait_s``."""
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill it at once; its ranks see that and end."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it stop its ranks and end."""
        atexit.unregister(self.stop)
        self._control.close()
        if self.exit_code(wait_s=_STOP_S) is None:
            self.kill()


class _Helpers:
    """The helper of this process, and the sockets that a fork of this process must not keep open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: HelperProcess | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def current(self) -> HelperProcess:
        with self._lock:
            if self._helper is not None and self._helper.exit_code() is not None:
                self._helper.stop()
                self._helper = None
            if self._helper is None:
                self._helper = HelperProcess()
            return self._helper

    def drop_after_fork(self, end: socket.socket) -> None:
        self._sockets.add(end)

    def _forget(self) -> None:
        """In a forked child (a data loader's worker): an end it held would hide this process's death."""
        if self._helper is not None:
            atexit.unregister(self._helper.stop)
        for end in list(self._sockets):
            end.close()
        self._lock = threading.Lock()
        self._helper = None


HELPERS = _Helpers()


def current_helper() -> HelperProcess:
    """The helper of this process, started now if there is none. Raises BadInput where no Python can be started."""
    return HELPERS.current()


def _interpreter() -> str:
    """``sys.executable``, or the interpreter of this environment where an embedding program left that empty."""
    folder = os.path.join(sys.prefix, "bin")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, os.path.join(folder, version), os.path.join(folder, "python3")):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise BadInput(
        "cannot start local ranks: this process doesn't know its Python interpreter; set sys.executable to its path, "
        "or start the script under torchrun"
    )


def _import_path() -> list[str]:
    """The parent's import path, and at its end the folder this package was loaded from."""
    package_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [*(os.path.abspath(entry) for entry in sys.path), package_root]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
