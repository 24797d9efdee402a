"""The strategy of every operator on the tp axis: a 0/1 program, solved by HiGHS through OR-Tools MathOpt.

    minimise    sum_n,s  cost[n,s] x[n,s]  +  sum_v,f,t  conversion[v,f,t] e[v,f,t]

    one_strategy     sum_s x[n,s] = 1                                  every operator (and leaf) runs one strategy
    flows            sum_t q[c,f,t] = X[v,f]    for every source pair f  a consumer c of value v is fed from the pair v has
                     sum_f q[c,f,t] = X[c,t]    for every target pair t  ... into the pair c asks for
                     q[c,f,t] <= e[v,f,t]                               a conversion is paid once for all its consumers

    idle             what a GPU waits for its host (planner.solve.host_waits)
    hold             sum_v,f bytes[v,f] x[v,f] <= share of all weights       where they would not fit otherwise
    exposed          E_k >= moves_k - (1 - s) work_k                under ZeRO-3, of equal segments k: what of moving the weights
                     E_k >= s moves_k                               over dp operators and conversions do not hide
                                                                    (planner.states; E_k is added to the cost)

X[v,f] is the sum of x over the producer's strategies whose result has pair f; X[c,t] likewise over the consumer's operands.
Only x is integer: with these flows the relaxation has been integral on every transformer tried.

Operators of equal segments share their variable (``node_classes``), so the program grows with distinct layers, not with
depth; a term that stands for many equal ones carries their number. Costs are in microseconds: the solver's tolerances are
absolute. Ties are broken by memory, then by order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from planner.costing import Cost, Pricing, conversion_cost
from planner.ir.graph import Graph, Leaf, Node, Value
from planner.ir.layout import REPLICATED, WHOLE, Pair
from planner.layouts import Keep
from planner.segments import node_classes, segment_kinds
from planner.shard import SHARED, is_shared
from planner.sharding_rules import Strategy, rule_of, strategies
from planner.sharding_rules.cuts import find_cuts
from planner.solve.host_waits import HostWaits
from planner.solve.letter_prices import (
    MICROSECONDS_PER_S,
    gathering_s,
    operator_price,
    parameter_step_s,
    starting_s,
)
from planner.solve.letters import Letters, with_its_gradient
from planner.solve.linear_program import LinearProgram, Solution

# One byte held weighs as much as this many microseconds: only enough to decide between equal times.
TIE_US_PER_BYTE = 1e-12
# A trained weight is held with its gradient and two moments.
STATES_A_WEIGHT = 4
# How near the optimum a program is solved whose relaxation is seldom integral: weights limited, or moved under ZeRO-3.
HARD_GAP = 1e-5
# A variable of a relaxed program so near 0 or 1 is.
WHOLE_TO = 1e-6


def solve_letters(
    graph: Graph,
    pricing: Pricing,
    weights: Sequence[int] | None = None,
    keep: Keep | None = None,
    us_per_byte: float = 0.0,
    time_limit_s: float = 60.0,
    held: float = 1.0,
) -> Letters:
    """The cheapest strategies for ``graph`` (one micro-batch of one dp rank) on the tp axis of ``pricing.mesh``.

    ``weights``: how many equal segments each segment stands for (planner.fold); 1 each by default. ``keep(node,
    strategy)``: which strategies may be used; an operator left without one keeps all it has. ``us_per_byte``: a price on
    memory, in microseconds per byte a device holds of weights (with their gradients and optimizer state) and results.
    ``held``: the share of all weights that a device may hold at most; at least 1/k.
    """
    return LettersProgram(graph, pricing, weights, keep).solve(pricing, us_per_byte, held, time_limit_s)


class LettersProgram:
    """The program of a graph on a tp axis; built once, solved for several prices of weights and memory."""

    def __init__(
        self, graph: Graph, pricing: Pricing, weights: Sequence[int] | None = None, keep: Keep | None = None
    ) -> None:
        """As ``solve_letters``."""
        self.graph, self.pricing = graph, pricing
        self.weights = weights
        self.bytes: dict[int, float] = {}  # what a variable holds: results, or weights with their states
        self.parameters: list[tuple[list[int], Leaf, list[Pair], int]] = []
        self.k = pricing.mesh.degree("tp")
        self.program = LinearProgram()
        # Kind of segment -> what its variables cost, for one micro-batch.
        self.work: dict[Hashable, dict[int, float]] = {}
        self.waits = HostWaits(pricing.cluster.device)
        self.classes: dict[str, Hashable] = dict(node_classes(graph))
        self.kinds = segment_kinds(graph)
        self.representative: dict[Hashable, Node] = {}
        self.count: dict[Hashable, int] = {}
        for node in graph.nodes:
            key = self.classes[node.name]
            self.representative.setdefault(key, node)
            self.count[key] = self.count.get(key, 0) + self._weight(node.segment)
        self.options: dict[Hashable, tuple[Strategy, ...]] = {}
        self.x: dict[Hashable, list[int]] = {}
        self._operators(keep)
        self._leaves()
        self._conversions()
        self._loss()
        self.hold = self._hold()
        for kind, waits in self.waits.add_to(self.program).items():
            self.work[kind].update(dict.fromkeys(waits, 1.0))
        self.exposed = self._exposed()

    def _pay(self, costs: Mapping[int, Cost], count: int, segment: int) -> None:
        """Of each variable what ``count`` of it cost in a segment like ``segment``; at most one of them is 1."""
        kind = self.kinds[max(segment, 0)]
        work = self.work.setdefault(kind, {})
        for x, cost in costs.items():
            cost_us = count * cost.total_s * MICROSECONDS_PER_S
            self.program.price[x] += cost_us
            work[x] = work.get(x, 0.0) + cost_us
        self.waits.pay(kind, costs, count)

    def _weight(self, segment: int) -> int:
        return 1 if self.weights is None or segment < 0 else self.weights[segment]

    # --- variables and costs of operators -----------------------------------------------------------------------------

    def _operators(self, keep: Keep | None) -> None:
        values = self.graph.values
        representatives = list(self.representative.values())
        cuts = find_cuts(self.graph)
        for node in representatives:
            key = self.classes[node.name]
            found = strategies(rule_of(node, values), node, values, self.k, cuts[node.name])
            if node.segment == SHARED:
                found = tuple(s for s in found if s.name == "R")
            elif keep is not None:
                found = tuple(s for s in found if keep(node, s)) or found
            prices = [operator_price(node, s, self.graph, self.pricing) for s in found]
            variables = self._one_strategy(key, found)
            self._pay(dict(zip(variables, (cost for cost, _ in prices), strict=True)), self.count[key], node.segment)
            self.bytes.update((x, self.count[key] * held) for x, (_, held) in zip(variables, prices, strict=True))

    def _one_strategy(self, key: Hashable, found: tuple[Strategy, ...]) -> list[int]:
        variables = [self.program.variable(whole=True) for _ in found]
        self.program.row([(x, 1.0) for x in variables], lower=1.0, upper=1.0)
        self.options[key], self.x[key] = found, variables
        return variables

    # --- leaves: how parameters, buffers and inputs are stored --------------------------------------------------------

    def _leaves(self) -> None:
        """A leaf is an operator without operands whose strategies are the pairs its readers may ask for."""
        groups: dict[Hashable, list[Leaf]] = {}
        for leaf in self.graph.leaves:
            readers = self.graph.consumers[leaf.name]
            key: Hashable = (
                "leaf",
                tuple(sorted({(self.classes[n.name], n.operands.index(leaf.name)) for n in readers})),
            )
            if leaf.kind in ("input", "constant") or not readers:
                key = ("leaf", leaf.name)
            groups.setdefault(key, []).append(leaf)
            self.classes[leaf.name] = key
        for key, leaves in groups.items():
            leaf = leaves[0]
            pairs = self._leaf_pairs(leaf)
            options = tuple(Strategy(str(pair), (), (pair,)) for pair in pairs)
            count = sum(self._leaf_weight(x) for x in leaves)
            variables = self._one_strategy(key, options)
            if leaf.kind == "parameter":
                self.parameters.append((variables, leaf, pairs, count))
                for x, pair in zip(variables, pairs, strict=True):
                    self.bytes[x] = count * STATES_A_WEIGHT * self._local(leaf, pair).size_bytes

    def _local(self, leaf: Leaf, pair: Pair) -> Value:
        return replace(leaf.value, shape=pair.value.local_shape(leaf.value.shape, self.k))

    def _hold(self) -> int:
        """The row of the share of all weights that a device holds; its limit is set by ``solve``."""
        whole = sum(count * leaf.value.size_bytes for _, leaf, _, count in self.parameters)
        shares = [
            (x, count * leaf.value.size_bytes / whole / (self.k if pair.is_shard else 1))
            for variables, leaf, pairs, count in self.parameters
            for x, pair in zip(variables, pairs, strict=True)
        ]
        return self.program.row(shares)

    def _exposed(self) -> list[tuple[int, int]]:
        """Of each kind of segments the rows of what ZeRO-3 exposes, which hold from when ``solve`` says so, and their variable.

        Forward and backward together expose no less than what moves in both beyond the work of both.
        """
        overlaps = self.pricing.cluster.device.kind != "cpu"
        moves: dict[Hashable, dict[int, float]] = {}
        for variables, leaf, pairs, count in self.parameters:
            segments = {max(node.segment, 0) for node in self.graph.consumers[leaf.name]}
            if len(segments) == 1:  # one that several use stays whole on dp
                terms = moves.setdefault(self.kinds[min(segments)], {})
                for x, pair in zip(variables, pairs, strict=True):
                    moved_s = gathering_s(self._local(leaf, pair), leaf, self.pricing)
                    terms[x] = terms.get(x, 0.0) + count * moved_s * MICROSECONDS_PER_S
        rows = []
        slowdown = self.pricing.cluster.device.overlap_slowdown
        for kind, terms in moves.items():
            exposed = self.program.variable(math.inf)
            least = [(x, slowdown * moved_us) for x, moved_us in terms.items()]
            for x, work_us in self.work.get(kind, {}).items() if overlaps else ():
                terms[x] = terms.get(x, 0.0) - (1 - slowdown) * work_us
            rows.append((self.program.row([*terms.items(), (exposed, -1.0)]), exposed))
            if overlaps and slowdown:
                rows.append((self.program.row([*least, (exposed, -1.0)]), exposed))
        return rows

    def _leaf_weight(self, leaf: Leaf) -> int:
        """How many equal leaves it stands for: as many as the first segment that reads it."""
        return self._weight(min((node.segment for node in self.graph.consumers[leaf.name]), default=-1))

    def _leaf_pairs(self, leaf: Leaf) -> list[Pair]:
        whole = with_its_gradient(WHOLE, leaf.value)
        if leaf.kind in ("input", "constant"):
            return [whole]
        pairs = {whole}
        for node in self.graph.consumers[leaf.name]:
            if node.segment == SHARED:
                continue
            for strategy in self.options[self.classes[node.name]]:
                for name, pair in zip(node.operands, strategy.operands, strict=True):
                    if name == leaf.name and (pair.is_shard or pair == REPLICATED):
                        pairs.add(pair)
        return sorted(pairs, key=str)

    # --- conversions --------------------------------------------------------------------------------------------------

    def _conversions(self) -> None:
        groups = self._value_groups()
        for (producer, index, consumers), (value, count) in groups.items():
            self._flows(producer, index, consumers, value, count)

    def _value_groups(self) -> dict[tuple[Hashable, int, tuple[tuple[Hashable, int], ...]], tuple[Value, int]]:
        """(producer class, result, its consumers (class, operand) in one segment) -> a value of the group, their number."""
        found: dict[tuple[Hashable, int, tuple[tuple[Hashable, int], ...]], tuple[Value, int]] = {}
        producer_of = self.graph.producers
        for name, value in self.graph.values.items():
            producer = producer_of.get(name)
            key = self.classes[producer.name if producer is not None else name]
            index = [v.name for v in producer.outputs].index(name) if producer is not None else 0
            by_segment: dict[int, list[tuple[Hashable, int]]] = {}
            for node in self.graph.consumers[name]:
                places = [(self.classes[node.name], i) for i, operand in enumerate(node.operands) if operand == name]
                by_segment.setdefault(SHARED if is_shared(self.graph, name) else node.segment, []).extend(places)
            for segment, consumers in by_segment.items():
                group = (key, index, tuple(consumers))
                known = found.get(group)
                found[group] = (value, self._weight(segment) + (0 if known is None else known[1]))
        return found

    def _flows(
        self, producer: Hashable, index: int, consumers: tuple[tuple[Hashable, int], ...], value: Value, count: int
    ) -> None:
        sources = _by_pair(self.x[producer], [s.outputs[index] for s in self.options[producer]])
        segment = self.representative[consumers[0][0]].segment if consumers else 0
        paid: dict[tuple[Pair, Pair], int] = {}
        for consumer, operand in consumers:
            wanted = [with_its_gradient(s.operands[operand], value) for s in self.options[consumer]]
            targets = _by_pair(self.x[consumer], wanted)
            if len(sources) == 1 and len(targets) == 1:
                (source,), (target,) = sources, targets
                cost = self._conversion(value.size_bytes, source, target)
                if cost.total_s and (source, target) not in paid:
                    paid[source, target] = self.program.variable()
                    self._pay({paid[source, target]: cost}, count, segment)
                if cost.total_s:
                    self.program.lower[paid[source, target]] = 1.0
                continue
            flows: dict[tuple[Pair, Pair], int] = {}
            for source in sources:
                for target in targets:
                    flow = self.program.variable()
                    flows[source, target] = flow
                    cost = self._conversion(value.size_bytes, source, target)
                    if not cost.total_s:
                        continue
                    if len(consumers) == 1:
                        self._pay({flow: cost}, count, segment)
                        continue
                    if (source, target) not in paid:
                        paid[source, target] = self.program.variable()
                        self._pay({paid[source, target]: cost}, count, segment)
                    self.program.row([(flow, 1.0), (paid[source, target], -1.0)], upper=0.0)
            for source, variables in sources.items():
                self._equal([flows[source, target] for target in targets], variables)
            for target, variables in targets.items():
                self._equal([flows[source, target] for source in sources], variables)

    def _equal(self, left: Sequence[int], right: Sequence[int]) -> None:
        """sum left = sum right."""
        self.program.row([*((x, 1.0) for x in left), *((x, -1.0) for x in right)], lower=0.0, upper=0.0)

    def _conversion(self, whole: int, source: Pair, target: Pair) -> Cost:
        return conversion_cost(whole, source, target, "tp", self.pricing)

    # --- solving ------------------------------------------------------------------------------------------------------

    def solve(
        self,
        pricing: Pricing,
        us_per_byte: float = 0.0,
        held: float = 1.0,
        time_limit_s: float = 60.0,
        gathered: bool = False,
    ) -> Letters:
        """As ``solve_letters``. ``pricing``: that of the program, but for ZeRO stage and micro-batches.

        ``gathered``: count all that ZeRO-3 moves, as if nothing of it were hidden; the bounds then are none of the time.
        """
        price, extra_us = self._prices(pricing, us_per_byte, held)
        if gathered:
            for row, exposed in self.exposed:
                self.program.limit(row, math.inf)
                price[exposed] = 0.0
            for variables, leaf, pairs, count in self.parameters:
                for x, pair in zip(variables, pairs, strict=True):
                    price[x] += count * gathering_s(self._local(leaf, pair), leaf, pricing) * MICROSECONDS_PER_S
        is_hard = held < 1 or any(price[exposed] for _, exposed in self.exposed)
        return self._letters(self.program.solve(time_limit_s, HARD_GAP if is_hard else 1e-9, price), extra_us)

    def relax(self, pricing: Pricing, held: float = 1.0, time_limit_s: float = 60.0) -> tuple[float, Letters | None]:
        """A bound as ``Letters.least_s``, soon found: parts of strategies are allowed. And the letters where it has none."""
        price, extra_us = self._prices(pricing, 0.0, held)
        solution = self.program.solve(time_limit_s, price=price, relaxed=True)
        found = self._letters(solution, extra_us)
        chosen = (solution.values[x] for variables in self.x.values() for x in variables)
        return found.least_s, found if all(min(x, 1 - x) < WHOLE_TO for x in chosen) else None

    def _prices(self, pricing: Pricing, us_per_byte: float, held: float) -> tuple[list[float], float]:
        """The price of every variable, and the most that ties, and starting the reductions of each weight apart, add."""
        price = list(self.program.price)
        extra_us = 0.0
        for x, size in self.bytes.items():
            price[x] += (us_per_byte + TIE_US_PER_BYTE) * size
        for variables in self.x.values():
            extra_us += TIE_US_PER_BYTE * max((self.bytes.get(x, 0.0) for x in variables), default=0.0)
        starting_us = starting_s(pricing) / pricing.micro_batches * MICROSECONDS_PER_S
        for variables, leaf, pairs, count in self.parameters:
            extra_us += count * starting_us
            for x, pair in zip(variables, pairs, strict=True):
                step_s = parameter_step_s(self._local(leaf, pair), leaf, pair, pricing)
                price[x] += count * step_s / pricing.micro_batches * MICROSECONDS_PER_S
        self.program.limit(self.hold, held if held < 1 else math.inf)
        moves = pricing.zero == 3 and pricing.mesh.dp > 1
        for row, exposed in self.exposed:
            self.program.limit(row, 0.0 if moves else math.inf)
            price[exposed] = 1.0 if moves else 0.0
        return price, extra_us

    def _letters(self, solution: Solution, extra_us: float) -> Letters:
        picked: dict[Hashable, Strategy] = {}
        for key, variables in self.x.items():
            taken = [solution.values[x] for x in variables]
            picked[key] = self.options[key][taken.index(max(taken))]
        return Letters(
            {node.name: picked[self.classes[node.name]] for node in self.graph.nodes},
            {leaf.name: picked[self.classes[leaf.name]].outputs[0] for leaf in self.graph.leaves},
            solution.objective / MICROSECONDS_PER_S,
            solution.bound / MICROSECONDS_PER_S,
            max(0.0, solution.bound - extra_us) / MICROSECONDS_PER_S,
        )

    def _loss(self) -> None:
        """The loss is whole or a partial sum: R:R or P:R; anything else is converted to R:R."""
        producer = self.graph.producers[self.graph.loss]
        key = self.classes[producer.name]
        value = self.graph.values[self.graph.loss]
        for strategy, x in zip(self.options[key], self.x[key], strict=True):
            pair = strategy.outputs[[v.name for v in producer.outputs].index(self.graph.loss)]
            if pair.value.kind != "P" and pair != WHOLE:
                self._pay({x: self._conversion(value.size_bytes, pair, WHOLE)}, 1, producer.segment)
        for buffer, name in self.graph.writes:
            self._written(buffer, name)

    def _written(self, buffer: str, name: str) -> None:
        """A value stored back into a buffer has the buffer's placement: no conversion would survive the step."""
        producer = self.graph.producers[name]
        index = [v.name for v in producer.outputs].index(name)
        made = _by_pair(
            self.x[self.classes[producer.name]], [s.outputs[index] for s in self.options[self.classes[producer.name]]]
        )
        held = _by_pair(self.x[self.classes[buffer]], [s.outputs[0] for s in self.options[self.classes[buffer]]])
        for pair in sorted({*made, *held}, key=str):
            self._equal(made.get(pair, []), held.get(pair, []))


def _by_pair(variables: list[int], pairs: list[Pair]) -> dict[Pair, list[int]]:
    found: dict[Pair, list[int]] = {}
    for x, pair in zip(variables, pairs, strict=True):
        found.setdefault(pair, []).append(x)
    return found
