"""From a plan's table of strategies to a strategy for every operator of a graph, and back.

A plan names an operator or weight once for all equal segments; what is made from inputs alone runs whole on tp and has
no row. ``record`` writes that table, ``recall`` reads it against a graph and refuses what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction

from planner.batch import BatchSplit
from planner.errors import InvalidPlan
from planner.ir.graph import Graph, Node
from planner.ir.layout import Pair
from planner.ir.plan import OperatorLayout
from planner.segments import node_classes
from planner.shard import SHARED
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts

# Whether an operator may run by a strategy.
Keep = Callable[[Node, Strategy], bool]
LEAF = "leaf"
# A weight on the dp axis: whole, its gradient a partial sum; ZeRO is the plan's own field.
STORED = "R:P"
# An operator that cutting the batch itself has added, such as a conversion.
MADE = "made"


def leaf_classes(graph: Graph) -> dict[str, Hashable]:
    """Leaf name -> what it is known by: the classes of its readers and the operand it is; equal segments share it."""
    classes = node_classes(graph)
    found: dict[str, Hashable] = {}
    for leaf in graph.leaves:
        readers = graph.consumers[leaf.name]
        if leaf.kind in ("input", "constant") or not readers:
            found[leaf.name] = (LEAF, leaf.name)
        else:
            found[leaf.name] = (LEAF, tuple(sorted({(classes[n.name], n.operands.index(leaf.name)) for n in readers})))
    return found


def record(
    graph: Graph,
    over_dp: Mapping[str, Strategy],
    over_tp: Mapping[str, Strategy],
    leaves: Mapping[str, Pair],
    dp: int,
    tp: int,
    kinds: Sequence[int],
) -> tuple[OperatorLayout, ...]:
    """The table of a plan: each class of operators and of weights once, in the order of the graph.

    ``kinds``: the kind each segment has in the plan. Cutting the batch may make equal segments differ.
    """
    classes = node_classes(graph)
    rows: dict[Hashable, OperatorLayout] = {}
    for node in graph.nodes:
        key = classes[node.name]
        if key in rows or node.segment == SHARED:
            continue
        on_dp, on_tp = over_dp.get(node.name), over_tp[node.name]
        kind = kinds[node.segment]
        rows[key] = OperatorLayout(
            node.name,
            node.op,
            node.module,
            kind,
            (on_dp.name if on_dp is not None else MADE) if dp > 1 else "",
            on_tp.name if tp > 1 else "",
            str(on_tp.outputs[0]) if tp > 1 else "",
        )
    by_leaf = leaf_classes(graph)
    for leaf in graph.leaves:
        leaf_key = by_leaf[leaf.name]
        readers = [node.segment for node in graph.consumers[leaf.name]]
        if leaf.kind in ("parameter", "buffer") and leaf_key not in rows and tp > 1 and readers:
            text = str(leaves[leaf.name])
            rows[leaf_key] = OperatorLayout(
                leaf.name, leaf.kind, leaf.target, kinds[max(*readers, 0)], STORED if dp > 1 else "", text, text
            )
    return tuple(rows.values())


def check_on_dp(graph: Graph, layouts: tuple[OperatorLayout, ...], over_dp: Mapping[str, Strategy], dp: int) -> None:
    """Raise InvalidPlan when the table says other than ``over_dp``, which follows from the graph, what dp does."""
    by_name = {row.name: row for row in layouts}
    for node in graph.nodes if dp > 1 else ():
        row = by_name.get(node.name)
        on_dp = over_dp[node.name].name if node.name in over_dp else MADE
        if row is not None and row.dp != on_dp:
            raise InvalidPlan(
                f"the plan gives operator {node.name} ({node.op}) the strategy {row.dp!r} on dp; cutting the batch gives it "
                f"{on_dp!r}. Undo the edit, or make the plan again with 'planner plan'."
            )


def recall(
    graph: Graph, layouts: tuple[OperatorLayout, ...], tp: int, rows: Fraction | None = None
) -> tuple[dict[str, Strategy], dict[str, Pair]]:
    """Strategies on the tp axis by node name, and the pairs of leaves by leaf name. Raises InvalidPlan.

    ``rows``: where ``graph`` has other sizes than the one the plan was made for, its rows over those. A strategy those sizes
    do not allow then gives way to running the operator whole.
    """
    classes, values = node_classes(graph), graph.values
    by_name = {row.name: row for row in layouts}
    names: dict[Hashable, str] = {}
    for node in graph.nodes:
        if node.name in by_name:
            names.setdefault(classes[node.name], by_name[node.name].tp)
    cuts = find_cuts(graph)
    chosen: dict[str, Strategy] = {}
    for node in graph.nodes:
        name = names.get(classes[node.name]) if tp > 1 and node.segment != SHARED else "R"
        options = strategies(rule_of(node, values), node, values, tp if tp > 1 else 2**62, cuts[node.name])
        match = [s for s in options if s.name == name]
        if not match and rows is not None:
            match = [s for s in options if s.name == scaled(name or "R", rows)] or [s for s in options if s.name == "R"]
        if not match:
            raise InvalidPlan(
                f"the plan gives operator {node.name} ({node.op}) the strategy {name!r}; on {tp} devices it has "
                f"{', '.join(s.name for s in options)}. Make the plan again with 'planner plan'."
            )
        chosen[node.name] = match[0]
    by_leaf = leaf_classes(graph)
    pairs: dict[Hashable, Pair] = {}
    for leaf in graph.leaves:
        if leaf.name in by_name and by_name[leaf.name].op == leaf.kind:
            pairs.setdefault(by_leaf[leaf.name], _pair(by_name[leaf.name]))
    whole = Pair.parse("R:R")
    stored = {
        leaf.name: pairs.get(by_leaf[leaf.name], whole if leaf.value.differentiable else whole.without_gradient())
        for leaf in graph.leaves
    }
    return chosen, stored


def strategy_names(graph: Graph, tp: int) -> dict[str, frozenset[str]]:
    """Of each operator, the strategies it has on tp."""
    cuts, values = find_cuts(graph), graph.values
    return {
        node.name: frozenset(s.name for s in strategies(rule_of(node, values), node, values, tp, cuts[node.name]))
        for node in graph.nodes
    }


def kept_in_all_pieces(split: BatchSplit, tp: int, keep: Keep | None) -> Keep | None:
    """``keep``, without strategies on tp that smaller pieces of an unevenly cut batch do not have."""
    first, *others = split.pieces
    if not others:
        return keep
    offered = [(strategy_names(piece.graph, tp), Fraction(piece.rows, first.rows)) for piece in others]

    def kept(node: Node, strategy: Strategy) -> bool:
        everywhere = all(
            strategy.name in names[node.name] or scaled(strategy.name, rows) in names[node.name]
            for names, rows in offered
        )
        return everywhere and (keep is None or keep(node, strategy))

    return kept


def scaled(name: str, rows: Fraction) -> str:
    """A cut behind the batch of a merged dim, ``n@4``, for another number of rows."""
    letter, _, cut = name.partition("@")
    inside = int(cut or 1) * rows
    return letter if inside == 1 else f"{letter}@{inside}"


def _pair(row: OperatorLayout) -> Pair:
    try:
        return Pair.parse(row.tp)
    except ValueError as error:
        raise InvalidPlan(f"layout of {row.name}: {error}. Make the plan again with 'planner plan'.") from None
