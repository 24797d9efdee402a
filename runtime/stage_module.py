"""Turns the source of a stage into a module that owns the stage's tensors.

The source (planner.ir.program) is compiled as it stands; the names ``tp``, ``dp`` and ``device`` are its only globals
set from outside. Each tensor is registered once, as a plain local tensor under the attribute name the source uses, on
its segment or, when several segments share it, on the stage; every further name is looked up at each access, so that
FSDP and ``to_empty`` may exchange the tensor. A segment that is recomputed keeps only its arguments between forward
and backward (torch.utils.checkpoint); selectively, also what its source calls by ``self.keep`` (runtime.keep).

Micro-batches of other sizes run other sources on the very same tensors: ``read_code`` reads one as ``Code``, whose classes
borrow the module and its segments, so that hooks on them (FSDP) stay where they are.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.errors import InvalidPlan
from planner.ir.program import StageProgram, StateSpec
from runtime.collectives import Axis
from runtime.keep import PLAIN, Keep, Kept
from runtime.opaque import OpaqueModule
from runtime.operators import seeded


class _Owner(nn.Module):
    """A module with further names for tensors, its own or another module's.

    ``shards``: attribute -> the part of that weight which this rank updates (runtime.shards).
    """

    shards: dict[str, nn.Parameter]

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_further_names"] = {}
        self.__dict__["shards"] = {}

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("_further_names", {}).get(name)
        return super().__getattr__(name) if found is None else getattr(*found)


class Segment(_Owner):
    """Base of the segment classes of a source: operators of one link of the chain of cuts.

    ``keep``: how the run of a micro-batch that goes on now keeps results.
    """

    keep: Keep

    def opaque(
        self,
        name: str,
        rng: torch.Tensor,
        site: int,
        states: Sequence[torch.Tensor],
        axes: Sequence[Axis] = (),
        autocast: torch.dtype | None = None,
    ) -> Callable[..., Any]:
        """The user's module called ``name`` here (ModuleSpec), as a function that draws as seeded for this place."""
        module: OpaqueModule = self.__dict__["opaque_modules"][name]

        def run(*args: Any, **kwargs: Any) -> Any:
            return seeded(module, rng, site, axes)(states, args, kwargs, autocast)

        return run


class StageModule(_Owner):
    """Base of the class ``Stage`` of a source. ``held``: its tensors, in the order of the program."""

    segments: nn.ModuleList
    held: tuple[Held, ...]
    running: Code

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_writes"] = []

    def write(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Give ``buffer`` a new value once backward is done, which may still need the old one (recomputation does)."""
        self.__dict__["_writes"].append((buffer, value.detach()))

    def finish_writes(self, keep: bool = True) -> None:
        """Do what ``write`` was asked for, or (``keep=False``) forget it."""
        writes = self.__dict__["_writes"]
        if keep:
            for buffer, value in writes:
                buffer.copy_(value)
        writes.clear()

    def prologue(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This micro-batch's global counts; a source without counts has none."""
        return ()


@dataclass(frozen=True)
class Held:
    """Where a stage keeps the tensor of ``spec``: registered as ``attribute`` of ``module``.

    ``uses``: how many stages of this rank use it.
    """

    spec: StateSpec
    module: nn.Module
    attribute: str
    uses: int = 1

    @property
    def tensor(self) -> torch.Tensor:
        """The local tensor: a parameter or buffer; a DTensor on dp where FSDP shards it."""
        return cast(torch.Tensor, getattr(self.module, self.attribute))

    @property
    def updated(self) -> torch.Tensor:
        """What the optimizer updates, and where a step leaves the gradient: ``tensor``, or under ZeRO-1 and 2 its shard."""
        shard: torch.Tensor | None = self.module.__dict__["shards"].get(self.attribute)
        return self.tensor if shard is None else shard


class RankModule(nn.ModuleList):
    """The stages of one rank, in order. A state of several of them is one tensor, which the first one registers."""

    def __init__(self, stages: Sequence[StageModule]) -> None:
        super().__init__(stages)
        self.stages = tuple(stages)

    @property
    def held(self) -> tuple[Held, ...]:
        """The tensors of all stages, each once."""
        found: dict[str, Held] = {}
        for stage in self.stages:
            for h in stage.held:
                first = found.get(h.spec.target)
                found[h.spec.target] = h if first is None else replace(first, uses=first.uses + 1)
        return tuple(found.values())


def build_rank(
    stages: Sequence[StageProgram],
    axes: Mapping[str, Axis],
    device: torch.device,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> RankModule:
    """The modules of all ``stages`` of a rank, as ``build_stage`` makes them."""
    built: list[StageModule] = []
    for stage in stages:
        elsewhere = {h.spec.target: h for other in reversed(built) for h in other.held}
        built.append(build_stage(stage, axes, device, modules, elsewhere))
    return RankModule(built)


def build_stage(
    stage: StageProgram,
    axes: Mapping[str, Axis],
    device: torch.device,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
    elsewhere: Mapping[str, Held] = MappingProxyType({}),
) -> StageModule:
    """The module of ``stage``, its tensors still on the meta device (``runtime.state.fill`` gives them values).

    ``axes``: at least ``tp`` and ``dp``. ``device``: where the source creates tensors. ``modules``: those of the user's
    that the stage calls, by path. ``elsewhere``: tensors that other stages of this rank hold, by target; this one uses
    them. Raises InvalidPlan when the source does not define what the stage names, or a module
    is missing.
    """
    namespace = _run_source(stage, axes, device)
    module = _class(namespace, "Stage", StageModule, stage)()
    module.segments = nn.ModuleList(_class(namespace, spec.class_name, Segment, stage)() for spec in stage.segments)
    module.__dict__["held"] = tuple(
        _register(spec, module, i, axes["tp"], elsewhere.get(spec.target)) for i, spec in enumerate(stage.states)
    )
    module.__dict__["running"] = _code(namespace, stage, module, modules)
    for number, segment in enumerate(module.segments):
        segment.forward = functools.partial(_run_segment, module, segment, number)
    return module


@dataclass(frozen=True)
class Code:
    """A source read for ``module``: runs a micro-batch of the size it is for."""

    stage: StageProgram
    module: StageModule
    owner: type[StageModule]
    segments: tuple[type[Segment], ...]
    modules: Mapping[str, nn.Module]

    @functools.cached_property
    def opaque(self) -> tuple[Mapping[str, OpaqueModule], ...]:
        """Of each segment, the user's modules that it calls, by their names there."""
        found: tuple[dict[str, OpaqueModule], ...] = tuple({} for _ in self.segments)
        for called in self.stage.modules:
            found[called.segment][called.name] = OpaqueModule(called, self.modules[called.path])
        return found

    def __call__(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.module.__dict__["running"] = self
        result: tuple[torch.Tensor, ...] = self.owner.forward(self.module, *received, **inputs)
        return result

    def prologue(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.owner.prologue(self.module, **inputs)


def read_code(stage: StageProgram, axes: Mapping[str, Axis], device: torch.device, module: StageModule) -> Code:
    """``stage`` as code for ``module``. Raises InvalidPlan when it does not hold the same tensors in the same places."""
    mine = module.running.stage
    if stage.states != mine.states or len(stage.segments) != len(mine.segments):
        raise InvalidPlan(f"stage {stage.index} for another batch holds other tensors. Plan again for that batch.")
    return _code(_run_source(stage, axes, device), stage, module, module.running.modules)


def _code(
    namespace: Mapping[str, Any], stage: StageProgram, module: StageModule, modules: Mapping[str, nn.Module]
) -> Code:
    for called in stage.modules:
        if called.path not in modules:
            raise InvalidPlan(f"stage {stage.index} calls the module {called.path!r}, which this rank was not given")
    segments = tuple(_class(namespace, spec.class_name, Segment, stage) for spec in stage.segments)
    return Code(stage, module, _class(namespace, "Stage", StageModule, stage), segments, modules)


def _run_segment(module: StageModule, segment: Segment, number: int, *arguments: Any) -> Any:
    """Forward of a segment by the code that runs now; recomputation, later, repeats that of this call."""
    code = module.running

    def run(*received: Any) -> Any:
        segment.__dict__["opaque_modules"] = code.opaque[number]
        return code.segments[number].forward(segment, *received)

    word = code.stage.segments[number].recompute
    if word == "none":
        return run(*arguments)
    kept = Kept() if word == "selective" else None

    def keeping(*received: Any) -> Any:
        segment.__dict__["keep"] = kept.again() if kept is not None else PLAIN
        try:
            return run(*received)
        finally:
            segment.__dict__["keep"] = PLAIN  # what is kept lives no longer than the graph it is for

    return checkpoint(keeping, *arguments, use_reentrant=False, preserve_rng_state=False)


def _run_source(stage: StageProgram, axes: Mapping[str, Axis], device: torch.device) -> dict[str, Any]:
    """Executes the module text; tracebacks show its lines, under the first of them."""
    title = stage.source.partition("\n")[0].strip('"')
    filename = f"<stage {stage.index}: {title}>"
    linecache.cache[filename] = (len(stage.source), None, stage.source.splitlines(keepends=True), filename)
    name = f"stage_{stage.index}"
    namespace: dict[str, Any] = {"__name__": name, "tp": axes["tp"], "dp": axes["dp"], "device": device}
    exec(compile(stage.source, filename, "exec", dont_inherit=True), namespace)
    return namespace


def _class(namespace: Mapping[str, Any], name: str, base: type, stage: StageProgram) -> Any:
    made = namespace.get(name)
    if not isinstance(made, type) or not issubclass(made, base):
        raise InvalidPlan(
            f"the source of stage {stage.index} defines no class {name} ({base.__name__}). Lower the plan again."
        )
    return made


def _register(spec: StateSpec, stage: StageModule, number: int, tp: Axis, elsewhere: Held | None) -> Held:
    if elsewhere is not None:
        return _bind(spec, stage, elsewhere.module, elsewhere.attribute)
    module = stage if spec.segment is None else stage.segments[spec.segment]
    own = [name for segment, name in spec.attributes if segment == spec.segment]
    if not own and spec.segment is not None:
        raise InvalidPlan(
            f"{spec.target} has no attribute in segment {spec.segment}, which owns it. Lower the plan again."
        )
    attribute = own[0] if own else f"shared_{number}"
    shape = spec.placement.local_shape(spec.shape, tp.size)
    tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    if spec.is_buffer:
        module.register_buffer(attribute, tensor)
    else:
        module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=spec.trainable))
    return _bind(spec, stage, module, attribute)


def _bind(spec: StateSpec, stage: StageModule, module: nn.Module, attribute: str) -> Held:
    """Let the users of ``spec`` on ``stage`` find its tensor under their names."""
    for segment, name in spec.attributes:
        user = stage if segment is None else stage.segments[segment]
        if (user, name) != (module, attribute):
            user.__dict__["_further_names"][name] = (module, attribute)
    return Held(spec, module, attribute)
