"""The source of a stage: one class a distinct segment, and ``Stage`` that calls them.

Names inside a segment class are its own (``x`` comes in, tensors are called after their operators), so that equal segments
have equal text and share one class. Consecutive calls of one class with the same arguments become a loop.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.ir.graph import MODULE, Graph, Node
from planner.ir.layout import Pair
from planner.ir.mesh import MICRO
from planner.ir.program import PREAMBLE, SOURCE_NAMES, SegmentSpec
from planner.lower.source import LINE, conversion_comment, expression
from planner.saved import select

RESERVED = SOURCE_NAMES | frozenset((*keyword.kwlist, *keyword.softkwlist))
SITES_A_SEGMENT = 1000


@dataclass(frozen=True)
class SegmentText:
    """One segment: ``reads`` come in as arguments, ``attributes`` are its weights, ``returns`` leave it."""

    number: int
    label: str
    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    returns: tuple[str, ...]
    attributes: Mapping[str, str]
    recompute: str


@dataclass(frozen=True)
class StageText:
    """All that the source of a stage is made of. ``receives``/``sends``: tensors and the conversion on tp they need."""

    index: int
    count: int
    first: int
    configuration: str
    preamble: tuple[Node, ...]
    prologue: tuple[Node, ...]
    counts: tuple[Node, ...]
    segments: tuple[SegmentText, ...]
    receives: tuple[tuple[str, str], ...]
    sends: tuple[tuple[str, str], ...]
    loss: str
    writes: tuple[tuple[str, str], ...]
    attributes: Mapping[str, str]
    graph: Graph
    micro_batches: int | tuple[int, ...]


@dataclass
class _Scope:
    """Names of tensors in one function."""

    names: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def bind(self, value: str, wanted: str) -> str:
        name, n = wanted, 1
        while name in self.taken or name in RESERVED:
            name, n = f"{wanted}_{n}", n + 1
        self.taken.add(name)
        self.names[value] = name
        return name

    def __call__(self, value: str) -> str:
        return self.names[value]


@dataclass(frozen=True)
class _Class:
    """A segment's class: its parameters stand for ``reads`` in order; ``random``: it also takes rng and site."""

    name: str
    body: str
    random: bool
    takes_rng: bool


def stage_source(stage: StageText) -> tuple[str, tuple[SegmentSpec, ...]]:
    """The module text, and the class that runs each segment."""
    classes: dict[str, _Class] = {}
    labels: dict[str, list[str]] = {}
    chosen: list[_Class] = []
    for segment in stage.segments:
        body, random, takes_rng = _segment_body(segment, stage)
        if body not in classes:
            name = _class_name(segment.label, {c.name for c in classes.values()})
            classes[body] = _Class(name, body, random, takes_rng)
        labels.setdefault(classes[body].name, []).append(segment.label)
        chosen.append(classes[body])
    position = f"stage {stage.index} of {stage.count}" if stage.count > 1 else "the whole model"
    parts = [f'"""{position[0].upper()}{position[1:]}: {stage.configuration}."""\n\n{PREAMBLE}']
    for made in classes.values():
        parts.append(f"class {made.name}(Segment):\n{_docstring(labels[made.name])}{made.body}")
    parts.append(_stage_class(stage, chosen))
    specs = tuple(
        SegmentSpec(made.name, segment.label, segment.recompute)
        for made, segment in zip(chosen, stage.segments, strict=True)
    )
    return "\n\n".join(parts), specs


def _docstring(labels: list[str]) -> str:
    text = labels[0] if len(labels) == 1 else f"{labels[0]} … {labels[-1]} ({len(labels)} times)"
    return f'    """{text}"""\n\n'


def _class_name(label: str, taken: set[str]) -> str:
    """'model.layers.0' -> 'Layers', 'lm_head' -> 'LmHead'."""
    parts = [p for p in label.replace(" + ", ".").split(".") if p and not p.isdigit()]
    base = "".join(word.capitalize() for word in (parts[-1] if parts else "block").split("_")) or "Block"
    base = base if base.isidentifier() and base not in RESERVED else f"{base}Block"
    name, n = base, 2
    while name in taken:
        name, n = f"{base}{n}", n + 1
    return name


# --- statements -------------------------------------------------------------------------------------------------------


def _statement(
    node: Node, scope: _Scope, micro_batches: int | tuple[int, ...], site: str, kept: str | None = None
) -> str:
    """``kept``: how selective recomputation keeps the result (planner.saved.select)."""
    if node.op == "convert" and node.args[1] == MICRO:
        _, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
        right = f'micro_slice({scope(node.operands[0])}, "{target.value}", rng, {micro_batches})'
        comment = "  # this micro-batch's share"
    else:
        right = expression(node, scope, site)
        comment = conversion_comment(node) if node.op == "convert" else ""
        call = _CALL.fullmatch(right) if kept is not None else None
        if call is not None:
            right = f"self.keep.{kept}({call[1]}, {call[2]})"
    left = ", ".join(scope.bind(value.name, _wanted(node, i)) for i, value in enumerate(node.outputs))
    if len(node.outputs) == 1 and node.base in TUPLES:
        left += ","
    line = f"{left} = {right}"
    if len(line) >= LINE - 8:
        return f"{left} = {_wrapped_module(right) if node.op == MODULE else _wrapped_call(right)}"
    return line + comment if len(line) + len(comment) < LINE else line


_CALL = re.compile(r"([\w.]+(?:\(.*\))?)\((.*)\)")


def _wrapped_call(text: str) -> str:
    """``f(a, b, ...)`` with its arguments on lines of their own."""
    call = _CALL.fullmatch(text)
    if call is None:
        return text
    inside = textwrap.wrap(call[2], LINE - 20, break_long_words=False)
    return f"{call[1]}(\n" + "".join(f"            {line}\n" for line in inside) + "        )"


def _wrapped_module(text: str) -> str:
    """``self.opaque(name, rng, site, [states])(...)`` with its states on lines of their own."""
    before, _, rest = text.partition("[")
    states, _, after = rest.partition("]")
    inside = textwrap.wrap(states + ",", LINE - 20) if states else []
    return f"{before}[\n" + "".join(f"            {line}\n" for line in inside) + f"        ]{after}"


def _wrapped(names: Sequence[str]) -> str:
    """Names with commas; in parentheses over several lines where they are many."""
    text = ", ".join(names)
    if len(text) < LINE - 40:
        return text
    inside = textwrap.wrap(text + ",", LINE - 20)
    return "(\n" + "".join(f"            {line}\n" for line in inside) + "        )"


TUPLES = frozenset({"split", "split_with_sizes", "chunk", "unbind"})


def _wanted(node: Node, index: int) -> str:
    if node.op == MODULE:
        return _result_name(node)
    base = {"view": "reshaped", "_to_copy": "cast", "__and__": "both", "scaled_dot_product_attention": "attention",
            "attention_with_dropout": "attention", "batch_norm_over": "normalised", "batch_norm": "normalised",
            "vocab_embedding": "embedding", "slice": "part", "split": "piece", "addmm": "linear",
            "cross_entropy_sum": "loss_sum", "vocab_cross_entropy": "loss_sum", "cross_entropy_count": "count",
            "pow": "power", "sum": "total"}.get(node.base)  # fmt: skip
    if node.op == "convert":
        base = {"R": "whole", "P": "partial", "S": "shard"}[str(node.args[2]).split("->")[1].strip()[0]]
    if base == "normalised" and index:
        base = ("new_mean", "new_var")[index - 1]
    if node.op.startswith("aten.addmm"):
        base = "linear"
    return base or node.base.rpartition(".")[2].strip("_")


def _result_name(node: Node) -> str:
    """What a module of the user's makes is called after it: 'block.0.router' -> 'router', 'block.0' -> 'block'."""
    parts = [part for part in str(node.args[0]).partition(":")[0].split(".") if part.isidentifier()]
    return parts[-1].lower() if parts and parts[-1] != "itself" else "out"


def _segment_body(segment: SegmentText, stage: StageText) -> tuple[str, bool, bool]:
    scope = _Scope()
    graph = stage.graph
    arguments = []
    main = 0
    for name in segment.reads:
        leaf = graph.leaf_by_name.get(name)
        if leaf is not None:
            wanted = name
        elif name in graph.producers and graph.producers[name].segment >= 0:
            wanted = "x" if main == 0 else f"x{main}"
            main += 1
        else:
            wanted = _wanted(graph.producers[name], 0)
        arguments.append(scope.bind(name, wanted))
    random = any(node.is_random for node in segment.nodes)
    takes_rng = random or any(node.op == "convert" and node.args[1] == MICRO for node in segment.nodes)
    arguments += ["rng"] if takes_rng else []
    arguments += ["site"] if random else []
    for name, attribute in segment.attributes.items():
        scope.names[name] = f"self.{attribute}"
    kept = select(graph, segment.nodes) if segment.recompute == "selective" else {}
    lines = []
    place = 0
    module = segment.label
    for node in segment.nodes:
        site = f"site + {place}" if place else "site"
        place += node.is_random
        if node.module != module and node.op != "convert":
            module = node.module
            inside = module[len(segment.label) + 1 :] if module.startswith(segment.label + ".") else ""
            if inside:
                lines.append(f"# {inside}")
        lines.append(_statement(node, scope, stage.micro_batches, site, kept.get(node.name)))
    lines.append("return " + _wrapped([scope(name) for name in segment.returns]))
    body = "".join(f"        {line}\n" for line in lines)
    return f"    def forward(self, {', '.join(arguments)}):\n{body}", random, takes_rng


# --- the stage --------------------------------------------------------------------------------------------------------


def _stage_class(stage: StageText, chosen: list[_Class]) -> str:
    lines = ["class Stage(StageModule):"]
    if stage.counts:
        lines += _prologue(stage)
    scope = _Scope()
    for name, attribute in stage.attributes.items():
        scope.names[name] = f"self.{attribute}"
    keywords = _keywords(stage, scope)
    main = [scope.bind(name, "x" if i == 0 else f"x{i}") for i, (name, _) in enumerate(stage.receives)]
    body: list[str] = []
    for name, text in stage.receives:
        if text:
            body.append(f'{scope(name)} = convert({scope(name)}, tp, "{text}")')
    for node in stage.preamble:
        body.append(_statement(node, scope, stage.micro_batches, "0"))
    body += _calls(stage, chosen, scope)
    for buffer, value in stage.writes:
        body.append(f"self.write({scope(buffer)}, {scope(value)})  # after backward")
    body.append(_return(stage, scope))
    uses_rng = any("rng" in line for line in body)
    named = keywords + (["rng"] if uses_rng else [])
    head = ", ".join(["self", *main, *(["*", *named] if named else [])])
    lines.append(f"    def forward({head}):")
    lines += [f"        {line}" if line else "" for line in body]
    return "\n".join(lines) + "\n"


def _keywords(stage: StageText, scope: _Scope) -> list[str]:
    """Inputs and counts, by name."""
    nodes = [*stage.preamble, *(node for segment in stage.segments for node in segment.nodes)]
    used = {name for node in nodes for name in node.operands}
    names = [leaf.name for leaf in stage.graph.leaves_of("input") if leaf.name in used]
    names += [node.name for node in stage.counts]
    for name in names:
        scope.names[name] = name
        scope.taken.add(name)
    return names


def _prologue(stage: StageText) -> list[str]:
    scope = _Scope()
    for name, attribute in stage.attributes.items():
        scope.names[name] = f"self.{attribute}"
    used = {name for node in (*stage.prologue, *stage.counts) for name in node.operands}
    inputs = [leaf.name for leaf in stage.graph.leaves_of("input") if leaf.name in used]
    for name in inputs:
        scope.names[name] = name
        scope.taken.add(name)
    body = [f"        {_statement(node, scope, stage.micro_batches, '0')}" for node in stage.prologue]
    returned = "".join(f"{scope(node.operands[0])}, " for node in stage.counts).strip()
    inputs += ["rng"] if any("rng" in line for line in body) else []
    head = f"    def prologue({', '.join(['self', *inputs])}):"
    return [head, *body, f"        return ({returned})", ""]


def _calls(stage: StageText, chosen: list[_Class], scope: _Scope) -> list[str]:
    """Calls of the segments, runs of equal calls as loops."""
    lines: list[str] = []
    i = 0
    while i < len(stage.segments):
        run = _run_length(stage, chosen, i)
        segment, made = stage.segments[i], chosen[i]
        if run > 2:
            stand_in = replace(segment, returns=stage.segments[i + run - 1].returns)
            (entering,) = _main_reads(segment, stage)
            current = scope(entering)
            number = f"(i + {stage.first})" if stage.first else "i"
            arguments = _arguments(segment, made, scope, f"{number} * {SITES_A_SEGMENT}")
            lines.append(f"for i in range({i}, {i + run}):  # {segment.label} … {stage.segments[i + run - 1].label}")
            lines.append(f"    {current} = self.segments[i]({arguments})")
            scope.names[stand_in.returns[0]] = current
            i += run
            continue
        arguments = _arguments(segment, made, scope, str(segment.number * SITES_A_SEGMENT))
        left = []
        for position, name in enumerate(segment.returns):
            reads = _main_reads(segment, stage)
            reuse = position == 0 and len(reads) == 1 and name != stage.loss and not _read_later(reads[0], i, stage)
            if reuse and scope(reads[0]) not in left:
                scope.names[name] = scope(reads[0])
            else:
                scope.bind(name, "loss" if name == stage.loss else "x")
            left.append(scope(name))
        lines.append(f"{_wrapped(left)} = self.segments[{i}]({arguments})  # {segment.label}")
        i += 1
    return lines


def _run_length(stage: StageText, chosen: list[_Class], start: int) -> int:
    """How many segments from ``start`` are one class in a row, each fed by the one before and by nothing else."""
    length = 1
    first = stage.segments[start]
    if len(first.returns) != 1 or len(_main_reads(first, stage)) != 1:
        return 1
    while start + length < len(stage.segments):
        before, here = stage.segments[start + length - 1], stage.segments[start + length]
        same_side = _side_reads(here, stage) == _side_reads(first, stage)
        chained = _main_reads(here, stage) == list(before.returns) and len(here.returns) == 1
        held = _read_later(before.returns[0], start + length, stage)
        if chosen[start + length] is not chosen[start] or not same_side or not chained or held:
            break
        length += 1
    return length if not _read_later(_main_reads(first, stage)[0], start, stage) else 1


def _main_reads(segment: SegmentText, stage: StageText) -> list[str]:
    producers = stage.graph.producers
    return [name for name in segment.reads if name in producers and producers[name].segment >= 0]


def _side_reads(segment: SegmentText, stage: StageText) -> list[str]:
    main = set(_main_reads(segment, stage))
    return [name for name in segment.reads if name not in main]


def _read_later(name: str, position: int, stage: StageText) -> bool:
    """Whether a tensor is used behind segment ``position`` of the stage."""
    later = any(name in segment.reads for segment in stage.segments[position + 1 :])
    return later or name in {sent for sent, _ in stage.sends} or name in {value for _, value in stage.writes}


def _arguments(segment: SegmentText, made: _Class, scope: _Scope, site: str) -> str:
    parts = [scope(name) for name in segment.reads]
    parts += ["rng"] if made.takes_rng else []
    parts += [site] if made.random else []
    return ", ".join(parts)


def _return(stage: StageText, scope: _Scope) -> str:
    if stage.loss:
        return f"return ({scope(stage.loss)},)"
    parts = [f'convert({scope(name)}, tp, "{text}")' if text else scope(name) for name, text in stage.sends]
    return f"return ({', '.join(parts)},)"


__all__ = ["SegmentText", "StageText", "stage_source"]
