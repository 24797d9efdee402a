"""The helper: one process beside the user's that imports torch once and forks ranks.

It holds none of the user's code, runs no thread and never touches CUDA, so forking it is safe and takes a fraction of
a second. The user's process (here: the parent) starts it with one end of a socket pair, the *control* socket:

    control    parent -> helper   a byte and 1 + n sockets: start a session of n ranks; end of file: stop everything
    session    helper -> parent   {"exit": rank, ...} for each rank that ends; {"refused": text}; end of file: all gone
               parent -> helper   end of file: stop the ranks of this session
    channel    parent <-> rank    calls and replies; one for each rank, not kept by the helper

Whoever dies, nobody is left behind: the parent's death is the end of file on ``control`` (or a change of the parent
process id, where a child of the parent still holds the socket); the helper's own death is the end of file on the pipe
whose write end only the helper holds; a rank's death is a SIGCHLD. When one rank ends unasked, the others get
``GRACE_S`` to hand in their errors, then SIGTERM, then SIGKILL ``KILL_AFTER_S`` later.
"""

from __future__ import annotations

import gc
import io
import os
import select
import selectors
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from runtime import messages
from runtime.rank_process import run_rank

GRACE_S = 0.5
KILL_AFTER_S = 2.0
TAIL_LINES = 20
MAX_FDS = 250  # Linux passes at most 253 descriptors in one message
_WATCH_PERIOD_S = 1.0
_SEND_TIMEOUT_S = 5.0
_READ_BYTES = 65536
_DRAIN_READS = 64
_TAIL_CHARS = 400


@dataclass
class _RankProcess:
    """A forked rank: its number, its output pipe, the last lines it wrote, and whether the helper stopped it."""

    number: int
    pid: int
    output: io.RawIOBase
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    partial_line: bytes = b""
    stopped: bool = False


@dataclass
class _Session:
    """The ranks of one start; ``alive`` by process id. ``term_at``/``kill_at``: when (monotonic, s) to signal them."""

    parent: socket.socket
    directory: str
    alive: dict[int, _RankProcess] = field(default_factory=dict)
    term_at: float | None = None
    kill_at: float | None = None


class Helper:
    """The event loop: start requests, ends of file, dead children, and lines the ranks print."""

    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._selector = selectors.DefaultSelector()
        self._sessions: list[_Session] = []
        liveness_read, liveness_write = os.pipe()
        self._liveness = os.fdopen(liveness_read, "rb", buffering=0)
        self._liveness_write = os.fdopen(liveness_write, "wb", buffering=0)
        self._wakeup, self._wakeup_write = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write.fileno())
        self._watch(self._control, self._on_control)
        self._watch(self._wakeup, self._on_wakeup)

    def run(self) -> None:
        """Serve until the parent is gone and every rank with it."""
        while self._control.fileno() >= 0 or self._sessions:
            for key, _ in self._selector.select(self._wait_s()):
                if self._selector.get_map().get(key.fd) is key:  # an earlier callback may have closed it
                    key.data()
            if os.getppid() != self._parent_pid:
                self._stop_everything()
            self._reap()
            self._signal_due()

    def _watch(self, source: Any, callback: Callable[[], Any]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _unwatch(self, source: Any) -> None:
        """Forget ``source`` and close it, if that was not done before."""
        if source.fileno() >= 0 if isinstance(source, socket.socket) else not source.closed:
            try:
                self._selector.unregister(source)
            except KeyError:
                pass
            source.close()

    def _wait_s(self) -> float:
        due = [at for session in self._sessions for at in (session.term_at, session.kill_at) if at is not None]
        return min([_WATCH_PERIOD_S, *(max(0.0, at - time.monotonic()) for at in due)])

    # requests of the parent

    def _on_control(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, MAX_FDS)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._stop_everything()
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._start([socket.socket(fileno=descriptor) for descriptor in descriptors])

    def _stop_everything(self) -> None:
        self._unwatch(self._control)
        for session in self._sessions:
            self._stop(session)

    def _start(self, sockets: list[socket.socket]) -> None:
        parent, *channels = sockets
        parent.settimeout(_SEND_TIMEOUT_S)
        session = _Session(parent, directory="")
        self._sessions.append(session)
        self._watch(parent, lambda: self._on_session(session))
        try:
            session.directory = tempfile.mkdtemp(prefix="meshwright-")
            for number in range(len(channels)):
                self._fork(session, number, channels)
        except OSError as error:
            self._tell(session, {"refused": f"the operating system refused to start the ranks: {error}"})
            self._stop(session)
        for channel in channels:
            channel.close()

    def _fork(self, session: _Session, number: int, channels: list[socket.socket]) -> None:
        output_read, output_write = os.pipe()
        output = os.fdopen(output_read, "rb", buffering=0)
        try:
            pid = os.fork()
        except OSError:
            output.close()
            os.close(output_write)
            raise
        if pid == 0:
            output.close()
            self._become_rank(session, number, channels, output_write)
        os.close(output_write)
        _own_process_group(pid)
        os.set_blocking(output.fileno(), False)
        process = _RankProcess(number, pid, output)
        session.alive[pid] = process
        self._watch(output, lambda: self._on_output(process))

    def _become_rank(
        self, session: _Session, number: int, channels: list[socket.socket], output_write: int
    ) -> NoReturn:
        """In the forked child: let go of everything that is the helper's or another rank's, then serve calls."""
        try:
            _own_process_group(0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            self._wakeup_write.close()
            self._liveness_write.close()
            for other, channel in enumerate(channels):
                if other != number:
                    channel.close()
            os.dup2(output_write, 1)
            os.dup2(output_write, 2)
            os.close(output_write)
            run_rank(channels[number], self._liveness, session.directory)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    # ends of sessions

    def _on_session(self, session: _Session) -> None:
        try:
            if session.parent.recv(1):
                return
        except OSError:
            pass
        self._selector.unregister(session.parent)  # still open: the parent reads until the end
        self._stop(session)

    def _stop(self, session: _Session, after_s: float = 0.0) -> None:
        due = time.monotonic() + after_s
        if session.kill_at is None and (session.term_at is None or due < session.term_at):
            session.term_at = due

    def _signal_due(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions):
            if session.term_at is not None and session.term_at <= now:
                session.term_at, session.kill_at = None, now + KILL_AFTER_S
                self._signal(session, signal.SIGTERM)
            if session.kill_at is not None and session.kill_at <= now:
                session.kill_at = now + KILL_AFTER_S
                self._signal(session, signal.SIGKILL)
            if not session.alive:
                self._end(session)

    def _signal(self, session: _Session, number: signal.Signals) -> None:
        for pid, process in session.alive.items():
            process.stopped = True
            _signal_group(pid, number)

    def _end(self, session: _Session) -> None:
        self._sessions.remove(session)
        if session.directory:
            shutil.rmtree(session.directory, ignore_errors=True)
        self._unwatch(session.parent)

    def _on_wakeup(self) -> None:
        try:
            self._wakeup.recv(4096)
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        for session in self._sessions:
            for pid, process in list(session.alive.items()):
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    _signal_group(pid, signal.SIGKILL)  # what the rank itself had started
                    del session.alive[pid]
                    self._on_exit(session, process, os.waitstatus_to_exitcode(status))

    def _on_exit(self, session: _Session, process: _RankProcess, exit_code: int) -> None:
        """``exit_code`` is negative for a signal. A rank that ends, for whatever reason, ends its session."""
        for _ in range(_DRAIN_READS):
            if process.output.closed or not self._on_output(process):
                break
        self._unwatch(process.output)
        tail = "" if process.stopped or exit_code == 0 else "\n".join(process.tail)
        self._tell(
            session,
            {
                "exit": process.number,
                "code": exit_code,
                "stopped": process.stopped,
                "time_s": time.monotonic(),
                "tail": tail,
            },
        )
        self._stop(session, after_s=GRACE_S)

    def _tell(self, session: _Session, message: dict[str, Any]) -> None:
        payload = messages.encode(message)
        try:
            session.parent.sendall(messages.frame(payload) + payload)
        except OSError:
            self._stop(session)  # the parent is gone or no longer listens

    # output of the ranks

    def _on_output(self, process: _RankProcess) -> bool:
        """Read once, pass on whole lines headed by the rank's number, keep the last ones. False when nothing was there.

        A rank's own children may keep its pipe open after its death, so the end of file is not waited for.
        """
        chunk = process.output.read(_READ_BYTES)
        if chunk is None:
            return False
        *lines, rest = (process.partial_line + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > _READ_BYTES):
            lines, rest = [*lines, rest], b""
        process.partial_line = rest
        for line in filter(None, lines):
            text = line.decode(errors="replace")
            process.tail.append(text[:_TAIL_CHARS])
            _write_to_stderr(f"[rank {process.number}] {text}\n".encode())
        if not chunk:
            self._unwatch(process.output)
        return bool(chunk)


def _own_process_group(pid: int) -> None:
    """Called on both sides of the fork, so it holds before either goes on; what a rank starts then dies with it."""
    try:
        os.setpgid(pid, 0)
    except OSError:
        pass


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # empty, or only a dead process not yet reaped


def _write_to_stderr(data: bytes) -> None:
    """Write as long as the other side reads; a stalled or closed terminal must not stall the helper."""
    for start in range(0, len(data), select.PIPE_BUF):  # a pipe that polls writable takes this much without blocking
        try:
            if not select.select([], [2], [], 0.1)[1]:
                return
            os.write(2, data[start : start + select.PIPE_BUF])
        except OSError:
            return


def main(control_fd: int, parent_pid: int) -> None:
    """Entry of the helper process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_for_ranks()
    Helper(socket.socket(fileno=control_fd), parent_pid).run()
    os._exit(0)  # torch's teardown takes time and has nothing to tear down


def _import_for_ranks() -> None:
    """Import what every rank needs, once, before the first fork."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    gc.collect()
    gc.freeze()
