"""Sizes as people write and read them: ``40GB`` is powers of 1000, ``24 GiB`` powers of 1024; times and counts too."""

from __future__ import annotations

import math
import re

from planner.errors import BadInput

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    _UNITS[f"{_prefix}IB"] = 1024**_power


def parse_bytes(text: str) -> int:
    """Bytes of ``text``. Raises BadInput with examples when it is not a size above zero."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise BadInput(f"{text!r} is not a memory size; write for example 40GB, 24GiB or 512MB")
    size = float(match[1]) * unit
    if not 1 <= size < math.inf:
        raise BadInput(f"{text!r} is not a memory size above zero; write for example 40GB, 24GiB or 512MB")
    return int(match[1]) * unit if match[1].isdigit() else round(size)


_DURATIONS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Seconds of ``500ms``, ``0.5s``, ``90min``, ``12h`` or ``7d``. Raises BadInput with examples."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", text)
    unit = _DURATIONS.get(match[2]) if match else None
    seconds = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 0 < seconds < math.inf:
        raise BadInput(f"{text!r} is not a time above zero; write for example 500ms, 0.5s, 90min, 12h or 7d")
    return seconds


def format_bytes(size_bytes: float) -> str:
    """Three significant digits in powers of 1000: ``6.00 GB``, ``512 MB``, ``0 B``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size_bytes) >= 0.9995 * unit:
            return f"{_three_digits(size_bytes / unit)} {name}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three significant digits: ``1.23 s``, ``184 ms``, ``45.1 us``, ``0 s``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def format_count(count: int) -> str:
    """A count of parameters: ``6.74 B``, ``124 M``, ``980``."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            return f"{_three_digits(count / unit)} {name}"
    return str(count)


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
