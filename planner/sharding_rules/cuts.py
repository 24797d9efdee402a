"""Where dims can be cut inside: the cut points of merged dims, spread over the graph.

A view (b s) -> b s lets its dim be cut behind b. Any operator on that tensor may then be cut there too: its letter for
the dim offers S(d, outer). Each tensor dim holds a set of outers; each operator passes them on between the dims that
hold the same letter, until nothing changes (a fixpoint: sets only grow and outers divide the dim's size).

    outer of the letter in a dim  p        cut y inside the letter  <->  outer p * y of the dim
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from planner.ir.graph import Graph, Node
from planner.sharding_rules import rule_of
from planner.sharding_rules.rule import Rule

LetterCuts = Mapping[str, frozenset[int]]
MOST_CUTS = 8


def find_cuts(graph: Graph, rules: Mapping[str, Rule] | None = None) -> Mapping[str, LetterCuts]:
    """For each node (by name): letter -> the cut points inside it. A letter without inner cuts is absent."""
    rules = rules if rules is not None else {node.name: rule_of(node, graph.values) for node in graph.nodes}
    outers: dict[tuple[str, int], set[int]] = {}
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in (*node.operands, *(value.name for value in node.outputs)):
            users.setdefault(name, []).append(node)
    found: dict[str, dict[str, set[int]]] = {node.name: {} for node in graph.nodes}
    queue = deque(graph.nodes)
    waiting = {node.name for node in graph.nodes}
    while queue:
        node = queue.popleft()
        waiting.discard(node.name)
        for name in _spread(node, rules[node.name], outers, found[node.name]):
            for user in users[name]:
                if user.name not in waiting and user is not node:
                    waiting.add(user.name)
                    queue.append(user)
    return {name: {letter: frozenset(c) for letter, c in letters.items() if c} for name, letters in found.items()}


def _spread(node: Node, rule: Rule, outers: dict[tuple[str, int], set[int]], letters: dict[str, set[int]]) -> list[str]:
    """Pass cut points through one operator; the tensors that gained one."""
    tensors = [*zip(node.operands, rule.operands, strict=True)]
    tensors += [(value.name, dims) for value, dims in zip(node.outputs, rule.outputs, strict=True)]
    places = []  # (tensor, dim, letter, outer)
    for name, dims in tensors:
        for d, dim in enumerate(dims):
            outer = 1
            for letter in dim:
                places.append((name, d, letter, outer))
                outer *= rule.sizes[letter]
    changed = []
    for name, d, letter, outer in places:
        cuts = letters.setdefault(letter, set())
        size = rule.sizes[letter]
        for point in outers.get((name, d), ()):
            inside, rest = divmod(point, outer)
            if rest == 0 and 1 < inside < size and size % inside == 0 and len(cuts) < MOST_CUTS:
                cuts.add(inside)
    for name, d, letter, outer in places:
        known = outers.setdefault((name, d), set())
        before = len(known)
        if outer > 1:
            known.add(outer)
        if len(known) < MOST_CUTS:
            known.update(outer * cut for cut in letters[letter])
        if len(known) != before:
            changed.append(name)
    return changed
