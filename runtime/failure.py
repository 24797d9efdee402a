"""Which rank failed first, and how to say it.

When one rank fails, its peers fail too a moment later, with connection errors. The first real error is chosen by

    1. killed by a signal from outside (out of memory, a crash): peers can only notice it
    2. an exception, an exit or an abort, in order of time
    3. a lost connection, in order of time: always the echo of another rank's end
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from planner.errors import RankFailed

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited"
    r"|failed to (recv|send)|peer (has )?(closed|exited|gone)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """What is known of one rank's end.

    ``rank`` is None for the helper. ``exit_code`` is negative for a signal, None when the rank sent its exception.
    ``summary`` is one line; ``detail`` is the traceback or the last lines it printed. ``time_s`` is monotonic.
    """

    rank: int | None
    summary: str
    detail: str
    time_s: float
    exit_code: int | None = None

    @property
    def order(self) -> tuple[int, float]:
        if self.exit_code is not None and self.exit_code < 0 and self.exit_code != -signal.SIGABRT:
            return 1, self.time_s
        if self.exit_code is None and _LOST_CONNECTION.search(self.summary):
            return 3, self.time_s
        return 2, self.time_s


def end_of_process(exit_code: int) -> str:
    """``was killed by SIGKILL`` or ``ended with exit code 3``."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}"


def rank_failed(failures: Iterable[Failure], doing: str, since_s: float = 0.0) -> RankFailed:
    """The error to raise for ``failures`` (at least one); ``doing`` says what was asked of the ranks at ``since_s``."""
    first = min(failures, key=lambda failure: failure.order)
    if first.time_s < since_s:
        doing = f"between calls, before it was asked to work {doing}"
    who = "the helper process that runs the ranks" if first.rank is None else f"rank {first.rank}"
    lines = [
        f"{who} {first.summary} {doing}" if first.exit_code is not None else f"{who} failed {doing}: {first.summary}"
    ]
    if first.detail:
        lines.append("\n".join(f"  | {line}" for line in first.detail.splitlines()))
    if first.exit_code == -signal.SIGKILL and first.rank is not None:
        lines.append("If nobody killed it, the machine ran out of memory: use fewer ranks or smaller micro-batches.")
    lines.append("All ranks were stopped.")
    return RankFailed("\n".join(lines))
