"""Why a model could not be traced, and where: one message instead of torch.export's logs.

The place is the last line of the model's own code (not torch's) that ran, read off the traceback.
"""

from __future__ import annotations

import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from planner.errors import TraceError

TORCH_FOLDER = str(Path(torch.__file__).parent)
OWN_FOLDER = str(Path(__file__).parent)
NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._draft_export")
DEPENDS_ON_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError")
_FRAME = re.compile(r'File "?(?P<file>[^"\n]+?)"?(?:, line |:)(?P<line>\d+),? in (?P<function>[^,\n]+)')


class ModelRaised(Exception):
    """The model or its loss raised, while being traced, what stands in ``__cause__``."""


class Untraceable(TraceError):
    """What keeps a module from being traced, but not from running as it is.

    ``modules``: paths of the modules it was met in, from outside to inside, where the traceback does not tell.
    """

    def __init__(self, text: str, modules: tuple[str, ...] = (), depends_on_values: bool = False) -> None:
        super().__init__(text)
        self.modules, self.depends_on_values = modules, depends_on_values


def modules_of(node: torch.fx.Node) -> tuple[str, ...]:
    """Paths of the modules a traced node was called in, from outside to inside; the outermost holds model and loss."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return tuple(str(path).removeprefix("model").removeprefix(".") for path, *_ in stack[1:])


@contextmanager
def quietly() -> Iterator[None]:
    """Without torch's own reports of failures and deprecations while it traces."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message=".*assigned during export")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trace_failure(error: BaseException) -> Untraceable:
    """What to tell about ``error``, raised while the model ran on stand-ins for its tensors."""
    kind = type(error).__name__
    place = _place(error)
    if kind in DEPENDS_ON_VALUES and "data-dependent" in f"{error} {kind}".lower().replace(
        "datadependent", "data-dependent"
    ):
        return depends_on_values(place)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{kind}: {lines[0]}" if lines else kind
    return Untraceable(
        f"the model cannot be traced: {what}{place}\n"
        "It ran on stand-ins for example_inputs, shapes without values; check that the model takes those inputs."
    )


def depends_on_values(place: str, modules: tuple[str, ...] = ()) -> Untraceable:
    return Untraceable(
        f"the model cannot be traced: what it runs depends on the values of tensors{place}\n"
        "An if, a loop, .item() or a mask as an index has one outcome in a plan. Write it with torch.where or with fixed "
        "shapes, or take it out of the model.",
        modules,
        depends_on_values=True,
    )


def refuse_unknown_shapes(graph: torch.fx.Graph) -> None:
    """Raises TraceError naming the first operator whose result's shape depends on the values of tensors."""
    for node in graph.nodes:
        results = node.meta.get("val")
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool) or (
                isinstance(result, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in result.shape)
            ):
                raise depends_on_values(place_in_text(str(node.meta.get("stack_trace") or "")), modules_of(node))


def place_here() -> str:
    """The line of the model's own code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if _is_theirs(frame.filename):
            return _at(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
    return ""


def _place(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return _at(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
    return place_in_text(str(error))


def place_in_text(text: str) -> str:
    """The last line of the model's own code in a text with frames, as node.meta['stack_trace'] holds."""
    for match in reversed(list(_FRAME.finditer(text))):
        if _is_theirs(match["file"]):
            line = linecache.getline(match["file"], int(match["line"])).strip()
            return _at(match["file"], int(match["line"]), match["function"], line)
    return ""


def _is_theirs(file: str) -> bool:
    return not file.startswith(("<", TORCH_FOLDER, OWN_FOLDER))


def _at(file: str, line: int, function: str, text: str) -> str:
    return (
        f"\n  at {file}:{line}, in {function.strip()}: {text}"
        if text
        else f"\n  at {file}:{line}, in {function.strip()}"
    )
