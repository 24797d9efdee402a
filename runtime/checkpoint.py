"""Checkpoints by torch.distributed.checkpoint: whole tensors under their original names, for any number of ranks.

On disk: every parameter and buffer under its name in the original model (and its further names there), and what the
optimizer remembers of it as ``optimizer.<state>.<name>``. So a checkpoint loads into another plan, or the plain module.

Saving, the ranks of a stage assemble one tensor at a time and take turns keeping one to write. Loading, each rank reads
the tensors of its stage in portions and keeps its own part of each. A checkpoint is written beside its place and then
renamed, so an interrupted save leaves the old one.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from planner.errors import BadInput
from planner.ir.program import Program, StateSpec
from runtime.collectives import Axis
from runtime.optimizer import StageOptimizer
from runtime.stage_module import Held
from runtime.state import assemble, load_local, owned

PORTION_BYTES = 512 * 2**20
PREFIX = "optimizer."


def _key(state: str, target: str) -> str:
    return f"{PREFIX}{state}.{target}"


def _whole_tensors(
    held: tuple[Held, ...], optimizer: StageOptimizer | None, axes: Mapping[str, Axis]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(names on disk, whole tensor) of this stage; the same order on all its ranks, which assemble together."""
    mine = owned(held, axes["pp"])
    for h in mine:
        yield (h.spec.target, *h.spec.aliases), assemble(h.tensor, h.spec, axes)
    specs = {h.spec.target: h for h in mine}
    for target, state, value in optimizer.entries() if optimizer is not None else ():
        if target in specs:
            like = value.shape == specs[target].tensor.shape and value.dim() > 0
            yield (_key(state, target),), assemble(value, specs[target].spec, axes) if like else value


def save_checkpoint(
    path: str | Path, held: tuple[Held, ...], optimizer: StageOptimizer | None, axes: Mapping[str, Axis]
) -> None:
    """Write a checkpoint folder. Collective over all ranks; replaces the one at ``path`` only when complete.

    Raises BadInput when ``path`` is something other than a folder.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise BadInput(f"{path} is a file; a checkpoint is a folder. Choose another path.")
    beside, previous = path.with_name(path.name + ".writing"), path.with_name(path.name + ".previous")
    writer, writers = axes["dp"].index * axes["tp"].size + axes["tp"].index, axes["dp"].size * axes["tp"].size
    share: dict[str, torch.Tensor] = {}
    for i, (names, whole) in enumerate(_whole_tensors(held, optimizer, axes)):
        if i % writers == writer:
            kept = whole.detach().to("cpu", copy=True)
            share.update(dict.fromkeys(names, kept))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(beside, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    _barrier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(share, checkpoint_id=beside, no_dist=not dist.is_initialized())
    _barrier()
    if first:
        shutil.rmtree(previous, ignore_errors=True)
        if path.exists():
            path.rename(previous)
        beside.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    _barrier()


def check_checkpoint(path: str | Path, program: Program) -> None:
    """Raises BadInput when ``path`` is no complete checkpoint of the model of ``program``. Not collective."""
    stored = _stored(path)
    for spec in (spec for stage in program.stages for spec in stage.states):
        _check_stored(path, stored, spec)


def _stored(path: str | Path) -> Mapping[str, Any]:
    try:
        return dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise BadInput(f"{path} is not a complete checkpoint: {error}. Choose a folder that save() wrote.") from None


def _check_stored(path: str | Path, stored: Mapping[str, Any], spec: StateSpec) -> None:
    described = stored.get(spec.target)
    if described is None:
        raise BadInput(f"the checkpoint {path} holds no {spec.target}: it is of another model.")
    if not isinstance(described, TensorStorageMetadata) or tuple(described.size) != spec.shape:
        raise BadInput(
            f"{spec.target} in the checkpoint {path} has another shape than in the plan: it is of another model."
        )


def load_checkpoint(
    path: str | Path, held: tuple[Held, ...], optimizer: StageOptimizer | None, axes: Mapping[str, Axis]
) -> None:
    """Read weights, buffers and, where there is an optimizer, what it remembered. Only the end is collective.

    Raises BadInput when ``path`` is no checkpoint, or one of another model.
    """
    stored = _stored(path)
    wanted: list[tuple[str, Held, str | None]] = []
    for h in held:
        _check_stored(path, stored, h.spec)
        wanted.append((h.spec.target, h, None))
        if optimizer is not None and id(h.updated) in optimizer.names:
            ending = f".{h.spec.target}"
            for key in sorted(k for k in stored if k.startswith(PREFIX) and k.endswith(ending)):
                state = key[len(PREFIX) : -len(ending)]
                if "." not in state:
                    wanted.append((key, h, state))
    entries: list[tuple[str, str, torch.Tensor]] = []
    for portion in _portions(wanted, stored):
        wholes = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key, _, _ in portion}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wholes, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        for key, h, remembered in portion:
            if remembered is None:
                load_local(h.tensor, h.spec, wholes[key], axes)
            else:
                entries.append((h.spec.target, remembered, _local_like(h.updated, h.spec, wholes[key], axes)))
    if optimizer is not None:
        optimizer.load(entries)
    _barrier()


def _local_like(tensor: torch.Tensor, spec: StateSpec, whole: torch.Tensor, axes: Mapping[str, Axis]) -> torch.Tensor:
    """This rank's part of an optimizer state, held as its parameter ``tensor`` is; a scalar stays as it is."""
    if whole.dim() == 0 or tuple(whole.shape) != spec.shape:
        return whole
    local = torch.zeros_like(tensor, dtype=whole.dtype, requires_grad=False)
    load_local(local, spec, whole, axes)
    return local


def _portions(
    wanted: list[tuple[str, Held, str | None]], stored: Mapping[str, object]
) -> Iterator[list[tuple[str, Held, str | None]]]:
    portion: list[tuple[str, Held, str | None]] = []
    filled = 0
    for item in wanted:
        described = stored[item[0]]
        if not isinstance(described, TensorStorageMetadata):
            raise BadInput(f"{item[0]} in the checkpoint is no tensor.")
        size_bytes = described.size.numel() * described.properties.dtype.itemsize
        if portion and filled + size_bytes > PORTION_BYTES:
            yield portion
            portion, filled = [], 0
        portion.append(item)
        filled += size_bytes
    if portion:
        yield portion


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
