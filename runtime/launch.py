"""Start ranks on this machine from a plain script or notebook, call them, and stop them whatever happens.

    with LocalRanks.start(4) as ranks:
        losses = ranks.call("forward_backward", {"inputs": x})

No launcher, no main guard, no pickled user code: a helper process (``runtime.helper``) forks the ranks, and only data
(``runtime.messages``) reaches them. The ranks meet through a file store in a private temporary folder; gloo is bound to
the loopback interface. Under torchrun there is nothing to start: see ``runtime.world``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from planner.errors import BadInput, MeshwrightError, RankFailed
from runtime.failure import rank_failed
from runtime.helper_handle import MAX_RANKS, current_helper
from runtime.messages import encode
from runtime.session import Exchange, Session
from runtime.world import World, current_world, init_world, share_bytes

__all__ = ["LocalRanks", "World", "current_world", "init_world", "prepare", "share_bytes"]

DEFAULT_RANK_CLASS = "runtime.worker:Rank"


def prepare() -> None:
    """Start the helper in the background, so that the first ``LocalRanks.start`` need not wait for it."""
    current_helper()


class LocalRanks:
    """``n`` ranks on this machine. Made by ``start``; a context manager; calls from several threads take turns."""

    def __init__(self, session: Session, n: int, rank_class: str) -> None:
        self.n = n
        self.directory = ""
        self.process_ids: tuple[int, ...] = ()
        self._rank_class = rank_class
        self._remote: frozenset[str] = frozenset()
        self._session = session
        self._lock = threading.RLock()
        self._failure = ""
        self._release = weakref.finalize(self, session.stop)  # also at interpreter exit

    @classmethod
    def start(
        cls,
        n: int,
        *,
        timeout_s: float = 600.0,
        device: str = "auto",
        rank_class: str = DEFAULT_RANK_CLASS,
        arguments: Mapping[str, Any] | None = None,
    ) -> LocalRanks:
        """Fork ``n`` ranks that have joined one process group.

        ``timeout_s``: of the start and of every collective. ``device``: 'cpu' (gloo), 'cuda' (nccl, one GPU a rank) or
        'auto': cuda where there are ``n`` GPUs. ``rank_class``: 'module:Class', made in each rank with ``rank``,
        ``world_size``, ``device``, ``timeout_s`` (for groups of its own) and ``arguments`` (data only); its REMOTE
        names the methods ``call`` may use.
        Raises BadInput before any process starts, RankFailed when a rank ends or isn't ready in time.
        """
        device = _choose_device(n, device)
        environment = _environment(n, device)
        hello = {
            "world_size": n,
            "device": device,
            "rank_class": rank_class,
            "arguments": dict(arguments or {}),
            "timeout_s": float(timeout_s),
            "environment": environment,
            "threads": _threads(environment["OMP_NUM_THREADS"]),
            "import_path": [os.path.abspath(entry) for entry in sys.path],
            "working_directory": os.getcwd(),
        }
        payloads = {rank: encode({**hello, "rank": rank}, "start") for rank in range(n)}
        ranks = cls(Session(current_helper(), n), n, rank_class)
        ready = ranks._exchange(payloads, "while starting", deadline_s=time.monotonic() + timeout_s)
        ranks._remote = frozenset(ready[0]["remote"])
        ranks._session.directory = ranks.directory = ready[0]["directory"]
        ranks.process_ids = tuple(ready[rank]["pid"] for rank in range(n))
        return ranks

    @property
    def closed(self) -> bool:
        return not self._release.alive

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any] | Sequence[Mapping[str, Any]] = MappingProxyType({}),
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call ``method(**arguments)`` on ``ranks`` (default all) at once; their results in that order.

        ``arguments``: one dict for all of them, or one dict each. Tensors arrive and return on the CPU.
        Raises BadInput (nothing was sent) for unknown methods and arguments that are not data, RankFailed when a rank
        raises or dies; the ranks are gone then, as they are after a KeyboardInterrupt.
        """
        targets = tuple(range(self.n)) if ranks is None else tuple(ranks)
        if len(set(targets)) != len(targets) or not all(0 <= rank < self.n for rank in targets):
            raise BadInput(f"ranks {list(targets)} are not distinct numbers from 0 to {self.n - 1}")
        if not isinstance(arguments, Mapping) and len(arguments) != len(targets):
            raise BadInput(f"{len(arguments)} argument dicts were given for {len(targets)} ranks; give one dict each")
        with self._lock:
            self._check_usable(method)
            if isinstance(arguments, Mapping):
                payload = encode({"method": method, "arguments": arguments}, method)
                payloads = dict.fromkeys(targets, payload)
            else:
                pairs = zip(targets, arguments, strict=True)
                payloads = {rank: encode({"method": method, "arguments": own}, method) for rank, own in pairs}
            replies = self._exchange(payloads, f"in {method!r}")
        return [replies[rank] for rank in targets]

    def close(self) -> None:
        """Stop the ranks and remove their folder; returns when they are gone. Closing twice does nothing."""
        self._session.ask_to_stop()  # a call in another thread ends now
        with self._lock:
            self._release()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalRanks n={self.n} {self._rank_class}{' closed' if self.closed else ''}>"

    def _check_usable(self, method: str) -> None:
        if self._failure:
            raise RankFailed(f"these ranks have stopped after an error; start new ones. The error was: {self._failure}")
        if self.closed:
            raise BadInput(f"cannot call {method!r}: these ranks are closed; start new ones")
        if self._session.owner_pid != os.getpid():
            raise BadInput(f"cannot call {method!r}: these ranks belong to the process that started them")
        if method not in self._remote:
            raise BadInput(f"{method!r} cannot be called on {self._rank_class}; it allows {sorted(self._remote)}")

    def _exchange(self, payloads: Mapping[int, bytes], doing: str, deadline_s: float | None = None) -> dict[int, Any]:
        try:
            since_s = time.monotonic()
            exchange = Exchange(self._session, payloads)
            exchange.run(deadline_s)
            if exchange.failures:
                raise rank_failed(exchange.failures, doing, since_s)
            if exchange.waiting:
                raise BadInput(f"the ranks were closed {doing}")
        except BaseException as error:
            if isinstance(error, MeshwrightError):
                self._failure = str(error).partition("\n")[0]
            self._release()
            raise
        return exchange.replies


def _choose_device(n: int, device: str) -> str:
    if not hasattr(os, "fork"):
        raise BadInput("local ranks need a system with fork (Linux, macOS); here, start the script under torchrun")
    if not 1 <= n <= MAX_RANKS:
        raise BadInput(f"cannot start {n} local ranks; ask for 1 to {MAX_RANKS}")
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"device {device!r} is unknown; use 'auto', 'cpu' or 'cuda'")
    available = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and available < n:
        raise BadInput(f"{n} GPUs were asked for and this machine has {available}; ask for fewer or use device='cpu'")
    return "cuda" if available >= n else "cpu"


def rank_threads(n: int, device: str) -> int:
    """Threads that each of ``n`` local ranks computes with."""
    return _threads(_environment(n, device)["OMP_NUM_THREADS"])


def _threads(setting: str) -> int:
    """The outermost level of ``OMP_NUM_THREADS``, which may list several (``4,2``)."""
    first = setting.partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def _environment(n: int, device: str) -> dict[str, str]:
    """The parent's environment; what it doesn't say: each rank its share of the cores, sockets on loopback only."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = "lo" if sys.platform == "linux" else "lo0"
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // n)), "GLOO_SOCKET_IFNAME": loopback}
    if device == "cuda":
        defaults["NCCL_SOCKET_IFNAME"] = loopback
    return {**defaults, **os.environ}
