"""The chain of cuts: where a graph can be split between stages, and which links of the chain are equal.

    cut_into_segments(graph) -> graph with ``node.segment`` set, nodes in segment order
    segment_kinds(graph)     -> for each segment a number, equal for equal segments
    node_classes(graph)      -> for each node (kind, position): nodes of one class share their strategy

The *main* part of a graph is what depends on weights. The rest (masks, positions, rotary tables: made from inputs and
constants alone) has segment -1 and is made again in every stage that reads it; left in the chain, it would hide every
cut.

A cut is a dominator of the loss in the main part: every path from the inputs to the loss passes through it, so one
tensor separates before from after (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm;
networkx.immediate_dominators). What is made from weights alone (1 + weight in a norm) is on no such path: it is made in
the first segment that reads it. Cuts inside an element of a module list are dropped (a transformer layer is one
segment), as are those that leave a segment without weights. Where skips hide the dominators, segments are cut further,
between modules: several tensors cross there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import networkx as nx

from planner.ir.graph import MODULE, Argument, Graph, Leaf, Node, Ref
from planner.ir.plan import SegmentInfo
from planner.shard import SHARED


def main_nodes(graph: Graph) -> frozenset[str]:
    """Names of the nodes that depend on a parameter, write a buffer, or are random."""
    main = {leaf.name for leaf in graph.leaves if leaf.kind == "parameter"}
    written = {value for _, value in graph.writes}
    found = set()
    for node in graph.nodes:
        writes = any(value.name in written for value in node.outputs)
        if node.is_random or writes or any(name in main for name in node.operands):
            found.add(node.name)
            main.update(value.name for value in node.outputs)
    return frozenset(found)


def cut_into_segments(graph: Graph) -> Graph:
    main = main_nodes(graph)
    segment_of = _refine(graph, _assign(graph, main, _cuts(graph, main)))
    _follow(graph, main, segment_of)
    nodes = [replace(node, segment=segment_of.get(node.name, SHARED)) for node in graph.nodes]
    nodes.sort(key=lambda node: node.segment)
    return replace(graph, nodes=tuple(nodes))


def _cuts(graph: Graph, main: frozenset[str]) -> list[str]:
    """Names of the nodes after which the chain is cut, in order; the last is the loss's."""
    loss = graph.producers[graph.loss].name
    fed = main & _fed(graph)
    path = fed if loss in fed else main
    dag = nx.DiGraph()
    for node in graph.nodes:
        if node.name not in path:
            continue
        sources = {graph.producers[x].name for x in node.operands if x in graph.producers} & path
        dag.add_node(node.name)
        if not sources:
            dag.add_edge("", node.name)
        dag.add_edges_from((source, node.name) for source in sources)
    dominators = nx.immediate_dominators(dag, "")
    chain = [loss]
    while dominators.get(chain[-1]) not in (None, ""):
        chain.append(dominators[chain[-1]])
    chain.reverse()
    by_name = {node.name: node for node in graph.nodes}
    return _merge(graph, main, [n for n in chain if n == loss or _separates(by_name[n], graph, main)])


def _fed(graph: Graph) -> set[str]:
    """Names of the nodes that depend on an input of the model."""
    reached = {leaf.name for leaf in graph.leaves if leaf.kind == "input"}
    found = set()
    for node in graph.nodes:
        if any(name in reached for name in node.operands):
            found.add(node.name)
            reached.update(value.name for value in node.outputs)
    return found


def _separates(node: Node, graph: Graph, main: frozenset[str]) -> bool:
    """Whether one tensor of the node leaves it, neither inside an element of a module list nor inside one module."""
    readers = [[n for n in graph.consumers[value.name] if n.name in main] for value in node.outputs]
    if sum(bool(found) for found in readers) != 1 or not node.output.differentiable:
        return False
    return _between([node.module, *(n.module for found in readers for n in found)])


def _common_path(paths: list[str]) -> list[str]:
    parts = [path.split(".") if path else [] for path in paths]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return common


def _assign(graph: Graph, main: frozenset[str], chain: list[str]) -> dict[str, int]:
    """The segment of each main node that the loss needs: the first cut it is an ancestor of."""
    by_name = {node.name: node for node in graph.nodes}
    segment_of: dict[str, int] = {}
    for index, cut in enumerate(chain):
        stack = [cut]
        while stack:
            name = stack.pop()
            if name in segment_of or name not in main:
                continue
            segment_of[name] = index
            stack.extend(graph.producers[x].name for x in by_name[name].operands if x in graph.producers)
    return segment_of


def _follow(graph: Graph, main: frozenset[str], segment_of: dict[str, int]) -> None:
    """Main nodes the loss does not need (buffer writes) join the operator they follow."""
    for node in graph.nodes:
        if node.name in main and node.name not in segment_of:
            earlier = [segment_of.get(graph.producers[x].name, 0) for x in node.operands if x in graph.producers]
            segment_of[node.name] = max(earlier, default=0)


def _refine(graph: Graph, segment_of: Mapping[str, int]) -> dict[str, int]:
    """Segments in which several modules with weights follow one another are cut between these, in the order they run.

    A skip connection, an encoder's result that every decoder layer reads or a loss over all layers hides the cuts that
    one tensor crosses. Of the places between two modules with weights, that with the fewest bytes to send is taken.
    """
    parts: list[list[Node]] = [[] for _ in range(1 + max(segment_of.values(), default=0))]
    for node in graph.nodes:
        if node.name in segment_of:
            parts[segment_of[node.name]].append(node)
    fed, parameters = _fed(graph), {leaf.name for leaf in graph.leaves if leaf.kind == "parameter"}
    weighted = {n.name for n in graph.nodes if n.name in fed and any(x in parameters for x in n.operands)}
    refined: dict[str, int] = {}
    for part in parts:
        first = 1 + max(refined.values(), default=-1)
        ends = _places(graph, part, weighted)
        for number, (start, end) in enumerate(zip([0, *ends], [*ends, len(part)], strict=True)):
            refined.update((node.name, first + number) for node in part[start:end])
    return refined


def _places(graph: Graph, part: list[Node], weighted: set[str]) -> list[int]:
    """Where to cut ``part``, nodes in the order they run: the number of nodes before each cut."""
    units = [_unit(node.module) for node in part if node.name in weighted]
    if len(set(units)) < 2:
        return []
    last = {name: place for place, node in enumerate(part) for name in node.operands}
    inside = {node.name for node in part}
    for node in part:
        for value in node.outputs:
            if value.name == graph.loss or any(n.name not in inside for n in graph.consumers[value.name]):
                last[value.name] = len(part)
    open_bytes = seen = 0
    closing: dict[int, int] = {}
    best: dict[int, tuple[int, int]] = {}
    for place, node in enumerate(part[:-1]):
        seen += node.name in weighted
        open_bytes -= closing.pop(place, 0)
        for value in node.outputs:
            if last.get(value.name, -1) > place:
                open_bytes += value.size_bytes
                closing[last[value.name]] = closing.get(last[value.name], 0) + value.size_bytes
        if 0 < seen < len(units) and units[seen - 1] != units[seen] and _between([node.module, part[place + 1].module]):
            best[seen] = min(best.get(seen, (open_bytes, place + 1)), (open_bytes, place + 1))
    return [place for _, place in sorted(best.values(), key=lambda found: found[1])]


def _unit(path: str) -> str:
    """The element of the outermost module list that ``path`` is in; without one, all of ``path``."""
    parts = path.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: end + 1])


def _between(paths: list[str]) -> bool:
    """Whether a place between operators of these modules is neither in an element of a module list nor in one module."""
    modules = sorted(set(paths))
    return not any(part.isdigit() for part in _common_path(modules)) and (len(modules) > 1 or modules == [""])


def _merge(graph: Graph, main: frozenset[str], chain: list[str]) -> list[str]:
    """Drop cuts so that every segment holds a parameter: a segment without one joins the one before it."""
    segment_of = _assign(graph, main, chain)
    parameters = {leaf.name for leaf in graph.leaves if leaf.kind == "parameter"}
    has = [False] * len(chain)
    for node in graph.nodes:
        if node.name in segment_of and any(name in parameters for name in node.operands):
            has[segment_of[node.name]] = True
    kept: list[str] = []
    for index, cut in enumerate(chain):
        if has[index] or not kept:
            kept.append(cut)
        else:
            kept[-1] = cut
    if len(kept) > 1 and not has[0]:
        kept.pop(0)
    return kept


def segment_count(graph: Graph) -> int:
    return 1 + max((node.segment for node in graph.nodes), default=0)


def segment_nodes(graph: Graph) -> tuple[tuple[Node, ...], ...]:
    """The main nodes of each segment, in order."""
    found: list[list[Node]] = [[] for _ in range(segment_count(graph))]
    for node in graph.nodes:
        if node.segment >= 0:
            found[node.segment].append(node)
    return tuple(tuple(nodes) for nodes in found)


def segment_kinds(graph: Graph) -> tuple[int, ...]:
    """Segments are equal when they run the same operators on the same shapes, wired in the same way."""
    numbers: dict[object, int] = {}
    kinds = []
    for nodes in segment_nodes(graph):
        key = segment_structure(graph, nodes)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return tuple(kinds)


def segment_structure(graph: Graph, nodes: tuple[Node, ...]) -> object:
    """A segment as a hashable term: own tensors by position, tensors from outside by what they are."""
    place: dict[str, object] = {}
    outside: dict[str, int] = {}

    def refer(name: str) -> object:
        if name in place:
            return place[name]
        value = graph.values[name]
        leaf: Leaf | None = graph.leaf_by_name.get(name)
        number = outside.setdefault(name, len(outside))
        what = (leaf.kind, leaf.trainable, leaf.batched) if leaf else graph.producers[name].segment < 0
        return ("outside", number, what, value.shape, value.dtype, value.differentiable)

    def term(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return refer(argument.name)
        if isinstance(argument, tuple):
            return ("tuple", *map(term, argument))
        return (type(argument).__name__, repr(argument))

    lines = []
    for i, node in enumerate(nodes):
        given = node.args[1:] if node.op == MODULE else node.args  # a module by what it is called with, not by its path
        arguments = (term(given), node.rule, tuple((k, term(v)) for k, v in node.kwargs))
        lines.append((node.op, arguments, tuple((v.shape, v.dtype, v.differentiable) for v in node.outputs)))
        place.update((value.name, ("own", i, j)) for j, value in enumerate(node.outputs))
    inside = {value.name for node in nodes for value in node.outputs}
    number = nodes[0].segment if nodes else 0
    left = tuple(
        place[name]
        for name in sorted(inside, key=lambda n: repr(place[n]))
        if name == graph.loss or any(user.segment != number for user in graph.consumers[name])
    )
    return tuple(lines), left


def node_classes(graph: Graph) -> Mapping[str, tuple[int, int]]:
    """Node name -> (kind of its segment, position in it). Shared nodes: (-1, own number)."""
    kinds = segment_kinds(graph)
    classes: dict[str, tuple[int, int]] = {}
    counts = [0] * len(kinds)
    shared = 0
    for node in graph.nodes:
        if node.segment < 0:
            classes[node.name] = (SHARED, shared)
            shared += 1
        else:
            classes[node.name] = (kinds[node.segment], counts[node.segment])
            counts[node.segment] += 1
    return classes


def segment_label(graph: Graph, nodes: tuple[Node, ...]) -> str:
    """The module path a person knows a segment by: the deepest path common to its weighted operators."""
    parameters = {leaf.name for leaf in graph.leaves if leaf.kind == "parameter"}
    weighted = [node.module for node in nodes if any(name in parameters for name in node.operands)]
    common = _common_path(weighted or [node.module for node in nodes])
    if common:
        return ".".join(common)
    tops = dict.fromkeys(path.split(".")[0] for path in weighted if path)
    return " + ".join(tops) or "model"


def segment_infos(graph: Graph) -> tuple[SegmentInfo, ...]:
    """What a plan says of every segment."""
    values = {leaf.name: leaf.value.numel for leaf in graph.leaves if leaf.kind == "parameter"}
    infos = []
    for kind, nodes in zip(segment_kinds(graph), segment_nodes(graph), strict=True):
        read = {name for node in nodes for name in node.operands}
        parameters = sum(values[name] for name in read if name in values)
        infos.append(SegmentInfo(kind, segment_label(graph, nodes), len(nodes), parameters))
    return tuple(infos)
