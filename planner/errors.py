"""Every error a user can meet: what happened, where, and what to do next.

The command line turns each into one message and its exit code; anything else is a defect of ours.
"""

from __future__ import annotations

from dataclasses import dataclass


class MeshwrightError(Exception):
    """Base of all errors meant for the user. ``exit_code`` is what the command line returns."""

    exit_code = 1


class BadInput(MeshwrightError):
    """An argument, batch, file or option that cannot be used as it is."""

    exit_code = 2


class TraceError(MeshwrightError):
    """The model could not be turned into a graph."""

    exit_code = 3


class InvalidPlan(MeshwrightError):
    """A plan that is truncated, of another version, of another model, or not legal."""

    exit_code = 4


@dataclass(frozen=True)
class Shortage:
    """The least memory that is missing: ``missing_bytes`` over ``memory_limit_bytes`` on a device of ``stage`` of the
    plan that comes nearest, one of ``configuration``."""

    missing_bytes: int
    configuration: str
    stage: int
    memory_limit_bytes: int


class Infeasible(MeshwrightError):
    """No plan in the space fits; the message says what is missing and what would help.

    ``shortage``: by how much, where memory is what is missing. ``figures``: ways out, as data for scripts.
    """

    exit_code = 5

    def __init__(
        self, message: str, shortage: Shortage | None = None, figures: dict[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.shortage = shortage
        self.figures = figures or {}


class OutOfTime(MeshwrightError):
    """The time limit passed before any plan was found."""

    exit_code = 6


class RankFailed(MeshwrightError):
    """A worker process died or raised; the message carries the first error."""

    exit_code = 7
