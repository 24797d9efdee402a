"""Folding: of a run of equal segments the search needs two, the first and one that stands for all the others.

    fold(graph) -> Folded(graph, origin)     origin[i]: the segment of the folded graph that full segment i is priced as
    Folded.weights                           how many full segments each folded one stands for

The first of a run is fed by a different segment than the rest, so a conversion may differ there; from the second on all are
fed by an equal one. Weights that a segment shares with others must be those all of the run share: a block called again among
equal ones stays. So the work of the search grows with distinct segments, not with depth.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from planner.ir.graph import Graph, Node, Ref, map_refs
from planner.segments import segment_kinds, segment_nodes


@dataclass(frozen=True)
class Folded:
    graph: Graph
    origin: tuple[int, ...]

    @cached_property
    def weights(self) -> tuple[int, ...]:
        counts = Counter(self.origin)
        return tuple(counts[i] for i in range(len(counts)))

    def kinds(self, whole: Graph) -> tuple[int, ...]:
        """The kind each segment has in the ``whole`` chain that was folded."""
        kinds = dict(zip(self.origin, segment_kinds(whole), strict=True))
        return tuple(kinds[number] for number in sorted(kinds))


def fold(graph: Graph) -> Folded:
    """``graph`` (cut into segments) with runs of more than two equal, simply chained segments folded."""
    kinds, chain = segment_kinds(graph), segment_nodes(graph)
    alike = list(zip(kinds, _shared_weights(graph, chain), strict=True))
    leaving = [_leaving(graph, number, nodes) for number, nodes in enumerate(chain)]
    dropped: set[int] = set()
    origin_full: list[int] = list(range(len(chain)))
    renamed: dict[str, str] = {}
    start = 0
    while start < len(chain):
        end = start + 1
        while end < len(chain) and alike[end] == alike[start] and _chained(leaving, end - 1):
            end += 1
        if end - start > 2 and _chained(leaving, end - 1):
            kept = start + 1
            for number in range(start + 2, end):
                dropped.add(number)
                origin_full[number] = kept
            last_output, kept_output = leaving[end - 1], leaving[kept]
            renamed[last_output[0][0]] = kept_output[0][0]
        start = end
    if not dropped:
        return Folded(graph, tuple(origin_full))
    number_of = {old: new for new, old in enumerate(i for i in range(len(chain)) if i not in dropped)}
    nodes = tuple(_renumbered(node, number_of, renamed) for node in graph.nodes if node.segment not in dropped)
    used = {name for node in nodes for name in node.operands} | {buffer for buffer, _ in graph.writes}
    made = {value.name for node in nodes for value in node.outputs}
    folded = replace(
        graph,
        leaves=tuple(leaf for leaf in graph.leaves if leaf.name in used),
        nodes=nodes,
        loss=renamed.get(graph.loss, graph.loss),
        writes=tuple((buffer, value) for buffer, value in graph.writes if value in made),
    )
    return Folded(folded, tuple(number_of[number] for number in origin_full))


def _shared_weights(graph: Graph, chain: tuple[tuple[Node, ...], ...]) -> list[tuple[str, ...]]:
    """Of each segment the parameters that others use too, in the order it reads them."""
    readers: dict[str, set[int]] = {leaf.name: set() for leaf in graph.leaves if leaf.kind == "parameter"}
    read = [dict.fromkeys(x for node in nodes for x in node.operands if x in readers) for nodes in chain]
    for number, names in enumerate(read):
        for name in names:
            readers[name].add(number)
    return [tuple(name for name in names if len(readers[name]) > 1) for names in read]


def _leaving(graph: Graph, number: int, nodes: tuple[Node, ...]) -> list[tuple[str, set[int]]]:
    """The tensors that leave a segment, and the segments that read them."""
    found = []
    for node in nodes:
        for value in node.outputs:
            readers = {user.segment for user in graph.consumers[value.name]} - {number}
            if readers:
                found.append((value.name, readers))
    return found


def _chained(leaving: list[list[tuple[str, set[int]]]], number: int) -> bool:
    """Whether one tensor leaves a segment, for the next alone."""
    out = leaving[number]
    return len(out) == 1 and out[0][1] == {number + 1}


def _renumbered(node: Node, number_of: dict[int, int], renamed: dict[str, str]) -> Node:
    return replace(
        node,
        args=map_refs(node.args, lambda name: Ref(renamed.get(name, name))),
        kwargs=map_refs(node.kwargs, lambda name: Ref(renamed.get(name, name))),
        segment=number_of[node.segment] if node.segment >= 0 else node.segment,
    )
