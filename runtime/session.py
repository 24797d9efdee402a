"""The parent's side of one start: the sockets to its ranks and helper, one exchange of messages, and the end."""

from __future__ import annotations

import os
import select
import selectors
import shutil
import socket
import time
from collections.abc import Mapping
from typing import Any

from runtime.failure import Failure, end_of_process
from runtime.helper_handle import HELPERS, HelperProcess
from runtime.messages import FrameReader, FrameWriter, decode

_STOP_S = 10.0  # the helper needs about 3 s at worst; after this long it is itself stuck
_HELPER_EXIT_S = 5.0


class Session:
    """``n`` ranks being started by ``helper``. ``stream`` tells of their ends; ``channels[rank]`` talks to one."""

    def __init__(self, helper: HelperProcess, n: int) -> None:
        self.helper = helper
        self.owner_pid = os.getpid()
        self.asked_to_stop = False
        self.directory = ""
        self.stream, helper_end = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(n)]
        self.channels = [parent_end for parent_end, _ in pairs]
        for end in (self.stream, *self.channels):
            end.setblocking(False)
            HELPERS.drop_after_fork(end)
        theirs = [helper_end, *(rank_end for _, rank_end in pairs)]
        try:
            helper.request(theirs)
        finally:
            for end in theirs:
                end.close()

    def ask_to_stop(self) -> None:
        """Returns at once; safe from any thread."""
        if self.owner_pid == os.getpid():
            self.asked_to_stop = True
            try:
                self.stream.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # closed, or the helper is gone

    def stop(self) -> None:
        """Stop the ranks, wait until they are gone, remove what is left. In a fork of the owner: nothing."""
        if self.owner_pid != os.getpid():
            return
        self.ask_to_stop()
        if self.stream.fileno() >= 0:
            if not _read_to_end(self.stream, time.monotonic() + _STOP_S):
                self.helper.kill()
            if self.helper.exit_code() is not None:  # then nobody waits for the ranks; they end by themselves
                deadline_s = time.monotonic() + _STOP_S
                for channel in self.channels:
                    _read_to_end(channel, deadline_s)
            self.stream.close()
        for channel in self.channels:
            channel.close()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def _read_to_end(stream: socket.socket, deadline_s: float) -> bool:
    """Read and drop until the end of file; False when ``deadline_s`` (monotonic) passes first."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        try:
            if not stream.recv(1 << 16):
                return True
        except BlockingIOError:
            continue
        except OSError:
            return True
    return False


class Exchange:
    """One message to each of some ranks and one reply from each, watching for failures all the while."""

    def __init__(self, session: Session, payloads: Mapping[int, bytes]) -> None:
        self.replies: dict[int, Any] = {}
        self.waiting = set(payloads)
        self._session = session
        self._writers = {rank: FrameWriter(payload) for rank, payload in payloads.items()}
        self._readers = {rank: FrameReader() for rank in payloads}
        self._events = FrameReader()
        self._failures: list[Failure] = []

    @property
    def failures(self) -> list[Failure]:
        """Without the exits that merely follow a rank's own exception."""
        explained = {failure.rank for failure in self._failures if failure.exit_code is None}
        return [each for each in self._failures if each.exit_code is None or each.rank not in explained]

    def run(self, deadline_s: float | None = None) -> None:
        """Fill ``replies`` (by rank), or ``failures``; with neither, the session was closed from another thread.

        After the first failure the helper stops the other ranks; last words are collected until all are gone.
        ``deadline_s`` (monotonic): when a rank that has not replied counts as failed.
        """
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._session.stream, selectors.EVENT_READ, None)
            for rank in sorted(self.waiting):
                channel = self._session.channels[rank]
                self._selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            self._serve(deadline_s)
            if self._failures or self.waiting:
                for rank in sorted(self.waiting):
                    self._receive(rank)
        if self.waiting and not self._failures and not self._session.asked_to_stop:
            code = self._session.helper.exit_code(wait_s=_HELPER_EXIT_S)
            summary = "stopped answering" if code is None else end_of_process(code)
            self._failures.append(Failure(None, summary, "", time.monotonic(), code or 0))

    def _serve(self, deadline_s: float | None) -> None:
        give_up_s: float | None = None
        while self._is_watched(self._session.stream):
            lost = any(not self._is_watched(self._session.channels[rank]) for rank in self.waiting)
            now = time.monotonic()
            if self._failures or lost:
                give_up_s = give_up_s or now + _STOP_S
                if now > give_up_s:
                    return
            elif not self.waiting:
                return
            elif deadline_s is not None and now > deadline_s:
                rank = min(self.waiting)
                self._failures.append(Failure(rank, "it was not ready in time", "", now))
                return
            for key, mask in self._selector.select(1.0):
                if key.data is None:
                    self._receive_events()
                    continue
                if mask & selectors.EVENT_WRITE:
                    self._send(key.data)
                if mask & selectors.EVENT_READ:
                    self._receive(key.data)

    def _is_watched(self, stream: socket.socket) -> bool:
        return stream in self._selector.get_map()

    def _send(self, rank: int) -> None:
        channel = self._session.channels[rank]
        try:
            done = self._writers[rank].write(channel)
        except OSError:
            done = True  # the rank is gone; what it had to say can still be read
        if done:
            self._selector.modify(channel, selectors.EVENT_READ, rank)

    def _receive(self, rank: int) -> None:
        channel = self._session.channels[rank]
        if not self._is_watched(channel):
            return
        try:
            payload = self._readers[rank].read(channel)
        except EOFError:
            self._selector.unregister(channel)
            return
        if payload is None:
            return
        reply = decode(payload)
        if "error" in reply:
            self._failures.append(Failure(rank, reply["error"], reply["traceback"], reply["time_s"]))
        else:
            self.replies[rank] = reply["result"]
            self.waiting.discard(rank)
        self._selector.unregister(channel)

    def _receive_events(self) -> None:
        while True:
            try:
                payload = self._events.read(self._session.stream)
            except EOFError:
                self._selector.unregister(self._session.stream)
                return
            if payload is None:
                return
            event = decode(payload)
            if "refused" in event:
                self._failures.append(Failure(None, event["refused"], "", time.monotonic()))
            elif not event["stopped"]:
                summary = end_of_process(event["code"])
                self._failures.append(Failure(event["exit"], summary, event["tail"], event["time_s"], event["code"]))
