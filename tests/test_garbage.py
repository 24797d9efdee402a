"""Collection of garbage is off inside and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from planner.garbage import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ValueError), uncollected():
            assert not gc.isenabled()
            with uncollected():
                pass
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
