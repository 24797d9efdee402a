"""Which nodes, inputs, weights and counts belong to which stage, and the stage's source.

    lower(graph, plan)      split the batch, recall the strategies, split over tp, then one StageProgram a stage

Between stages tensors travel whole on tp (R:R). Values made from inputs alone are made again in every stage that reads
them. Sums over micro-batches (token counts) are made by ``Stage.prologue`` before the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from planner.batch import BatchSplit, Piece, split_batch
from planner.chain_costs import crossing
from planner.errors import BadInput, InvalidPlan
from planner.ir.graph import MODULE, Graph, Leaf, Node, Ref
from planner.ir.layout import COMMUNICATING, PARTIAL, REPLICATED, WHOLE, Pair
from planner.ir.mesh import MICRO, deal
from planner.ir.plan import Plan
from planner.ir.program import (
    SOURCE_ATTRIBUTES,
    InputSpec,
    ModuleSpec,
    Program,
    SmallerPiece,
    StageProgram,
    StateSpec,
    TensorSpec,
)
from planner.layouts import check_on_dp, recall
from planner.lower.text import SegmentText, StageText, stage_source
from planner.segments import cut_into_segments, segment_label, segment_nodes
from planner.shard import Sharded, conversion_moves, shard


def lower(graph: Graph, plan: Plan, other_batch: bool = False) -> Program:
    """The program of ``plan`` for ``graph`` (as traced, whole); ``other_batch``: the same model with another batch size.

    Raises InvalidPlan when the plan is for another graph or names a strategy an operator does not have; BadInput when the
    batch is too small for the plan.
    """
    if graph.digest != plan.graph_digest and not other_batch:
        raise InvalidPlan(
            "the plan is for another model, batch shape or loss than this one (their graphs differ). "
            "Make a plan for this model with 'planner plan'."
        )
    mesh = plan.mesh
    split = split_batch(cut_into_segments(graph), mesh.dp, plan.micro_batches)
    if not other_batch:
        check_on_dp(split.graph, plan.layouts, split.dp, mesh.dp)
    loss_is_partial_on_tp = False
    planned_rows = -(-plan.global_batch // (mesh.dp * plan.micro_batches))
    programs: list[tuple[StageProgram, ...]] = []
    on_tp: list[dict[str, str]] = []
    for piece in split.pieces:
        other = other_batch or piece is not split.pieces[0]
        scale = Fraction(piece.rows, planned_rows) if other else None
        chosen, leaves = recall(piece.graph, plan.layouts, mesh.tp, scale)
        on_tp.append({name: strategy.letter or strategy.name for name, strategy in chosen.items()})
        sharded = shard(piece.graph, "tp", mesh.tp, chosen, leaves)
        local = sharded.graph if len(split.pieces) == 1 else _with_whole_loss(sharded)
        loss_is_partial_on_tp = mesh.tp > 1 and sharded.loss.value.kind == "P" and local is sharded.graph
        lowering = _Lowering(graph, local, sharded.pairs, leaves, plan, piece if len(split.pieces) > 1 else None)
        programs.append(tuple(lowering.stage(i) for i in range(len(plan.stages))))
    same_states = all(a.states == b.states for stages in programs for a, b in zip(stages, programs[0], strict=True))
    if not same_states or not _meet_on_dp(split, on_tp):
        raise BadInput(
            f"a batch of {graph.batch_size} makes data-parallel shards and micro-batches of unequal size, which tp would cut "
            f"in different ways; use a batch divisible by {mesh.dp * plan.micro_batches} (dp {mesh.dp} x mb "
            f"{plan.micro_batches})"
        )
    cut = {leaf.name for leaf in split.graph.leaves_of("input") if leaf.batched}
    return Program(
        mesh=mesh,
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
        zero=plan.zero,
        inputs=tuple(
            InputSpec(leaf.name, leaf.target, leaf.value.shape, leaf.value.dtype, leaf.name in cut, leaf.batched)
            for leaf in graph.leaves_of("input")
        ),
        stages=programs[0],
        loss_is_partial_on_dp=split.loss_is_partial_on_dp,
        loss_is_partial_on_tp=loss_is_partial_on_tp,
        seed=plan.seed,
        batch_size=graph.batch_size,
        library_operators=_of_libraries(graph),
        smaller=tuple(
            SmallerPiece(piece.rank_rows, piece.rows, stages)
            for piece, stages in zip(split.pieces[1:], programs[1:], strict=True)
        ),
    )


def _of_libraries(graph: Graph) -> tuple[str, ...]:
    """The operators that are not torch's own."""
    return tuple(sorted({n.op for n in graph.nodes if n.op.count(".") == 2 and not n.op.startswith("aten.")}))


def _meet_on_dp(split: BatchSplit, on_tp: list[dict[str, str]]) -> bool:
    """Whether ranks that exchange tensors on dp cut them alike on tp. ``on_tp``: of each piece, what each operator does."""
    if all(names == on_tp[0] for names in on_tp):
        return True
    return not any(
        "dp" in dict(node.kwargs).get("axes", ()) if node.op != "convert" else _communicates_on_dp(node)
        for node in split.graph.nodes
        if not node.is_random
    )


def _communicates_on_dp(node: Node) -> bool:
    axis, forward, backward = conversion_moves(node)
    return axis == "dp" and bool(node.output.shape) and (forward in COMMUNICATING or backward in COMMUNICATING)


def _with_whole_loss(sharded: Sharded) -> Graph:
    """The graph with its loss whole on tp: pieces of one batch, which may run other strategies, have to agree on that."""
    graph = sharded.graph
    if sharded.loss.value.kind != "P":
        return graph
    producer = graph.producers[graph.loss]
    whole = replace(graph.values[graph.loss], name=f"{graph.loss}_whole")
    node = Node(
        "convert", (Ref(graph.loss), "tp", f"{PARTIAL} -> {WHOLE}"), (whole,), (), producer.module, producer.segment
    )
    nodes = sorted((*graph.nodes, node), key=lambda node: node.segment)
    return replace(graph, nodes=tuple(nodes), loss=whole.name)


@dataclass(frozen=True)
class _Crossing:
    """A tensor that leaves a segment or stage: its name in the graph and its pair on tp where it was made."""

    name: str
    pair: Pair


class _Lowering:
    def __init__(
        self,
        whole: Graph,
        local: Graph,
        pairs: Mapping[str, Pair],
        leaves: Mapping[str, Pair],
        plan: Plan,
        piece: Piece | None = None,
    ) -> None:
        """``piece``: which one ``local`` is for, where they differ."""
        self.whole, self.local, self.plan, self.piece = whole, local, plan, piece
        self.pairs, self.leaves = pairs, leaves
        self.chain = segment_nodes(local)
        self.shared = [node for node in local.nodes if node.segment < 0]
        self.count_nodes = {
            node.name: node for node in local.nodes if node.op == "convert" and node.args[1] == MICRO and _is_sum(node)
        }
        self.stages_of = self._stages_of_states()

    def stage(self, index: int) -> StageProgram:
        first, end = self.plan.stages[index]
        last = index == len(self.plan.stages) - 1
        receives = self._cut(first - 1) if first else ()
        sends = self._cut(end - 1) if not last else ()
        segments = [node for nodes in self.chain[first:end] for node in nodes]
        wanted = {name for node in segments for name in node.operands} | {c.name for c in sends}
        wanted |= {value for _, value in self.local.writes if self._stage_of_value(value) == index}
        if last:
            wanted.add(self.local.loss)
        preamble = [
            node for node in _needed(self.shared, wanted, stop=self.count_nodes) if node.name not in self.count_nodes
        ]
        counts = self._counts([*preamble, *segments], wanted)
        prologue = _needed(self.shared, {name for node in counts for name in node.operands}, stop={})
        states, attributes = self._states(index, preamble, prologue)
        text = StageText(
            index=index,
            count=len(self.plan.stages),
            first=first,
            configuration=self.plan.configuration
            + (f", micro-batches of {self.piece.rows} rows" if self.piece is not None else ""),
            preamble=tuple(preamble),
            prologue=tuple(prologue),
            counts=tuple(counts),
            segments=tuple(self._segment(i, attributes) for i in range(first, end)),
            receives=tuple((c.name, _back(c.pair)) for c in receives),
            sends=tuple((c.name, _out(c.pair)) for c in sends),
            loss=self.local.loss if last else "",
            writes=tuple((b, v) for b, v in self.local.writes if self._stage_of_value(v) == index),
            attributes={name: attribute for (owner, name), attribute in attributes.items() if owner is None},
            graph=self.local,
            micro_batches=self._dealt(),
        )
        source, classes = stage_source(text)
        modules = tuple(spec for i in range(first, end) for spec in self._modules(i)[1])
        used = {name for node in (*preamble, *segments) for name in node.operands}
        inputs = [leaf.name for leaf in self.local.leaves_of("input") if leaf.name in used]
        before, forward = source.split("class Stage(StageModule)")[1].split("    def forward(")
        inputs += ["rng"] if "rng" in forward else []
        counted = [
            leaf.name
            for leaf in self.local.leaves_of("input")
            if any(leaf.name in n.operands for n in (*prologue, *counts))
        ]
        return StageProgram(
            index=index,
            source=source,
            segments=classes,
            states=states,
            receives=tuple(self._spec(c) for c in receives),
            sends=tuple(self._spec(c) for c in sends) if not last else (self._spec(_Crossing(self.local.loss, WHOLE)),),
            inputs=tuple(inputs),
            prologue_inputs=(*counted, *(["rng"] if "rng" in before else [])),
            counts=tuple(TensorSpec(n.name, n.output.shape, n.output.dtype, False) for n in counts),
            modules=tuple(replace(spec, segment=spec.segment - first) for spec in modules),
        )

    def _dealt(self) -> int | tuple[int, ...]:
        """The number of micro-batches, or the rows of each where they differ."""
        count = self.plan.micro_batches
        rows = deal(self.piece.rank_rows, count) if self.piece is not None else (1,) * count
        return count if len(set(rows)) == 1 else rows

    # --- tensors between stages ---------------------------------------------------------------------------------------

    def _cut(self, number: int) -> tuple[_Crossing, ...]:
        found = []
        for value in crossing(self.local, number):
            if value.name not in self.pairs:
                raise InvalidPlan(f"tensor {value.name} cannot travel between stages; cut the model elsewhere")
            found.append(_Crossing(value.name, self.pairs[value.name]))
        return tuple(found)

    def _spec(self, crossing_: _Crossing) -> TensorSpec:
        value = self.local.values[crossing_.name]
        shape = list(value.shape)
        placement = crossing_.pair.value
        if placement.kind == "S":
            shape[placement.dim] *= self.plan.mesh.tp
        return TensorSpec(value.name, tuple(shape), value.dtype, value.differentiable)

    def _stage_of_value(self, name: str) -> int:
        segment = max(self.local.producers[name].segment, 0)
        return next(i for i, (first, end) in enumerate(self.plan.stages) if first <= segment < end)

    def _counts(self, nodes: Iterable[Node], wanted: set[str]) -> list[Node]:
        used = {name for node in nodes for name in node.operands} | wanted
        return [node for name, node in self.count_nodes.items() if name in used]

    # --- segments and their weights -----------------------------------------------------------------------------------

    def _modules(self, number: int) -> tuple[tuple[Node, ...], tuple[ModuleSpec, ...]]:
        """The nodes of a segment with modules called by names of the segment's own, and what these stand for."""
        label = segment_label(self.local, self.chain[number])
        nodes: list[Node] = []
        specs: dict[str, ModuleSpec] = {}
        for node in self.chain[number]:
            if node.op == MODULE:
                path = str(node.args[0])
                base = "itself" if path == label else path.removeprefix(label + ".")
                name = next(n for i in count(1) if (n := base if i == 1 else f"{base}:{i}") not in specs)
                options = dict(node.kwargs)
                results = tuple(TensorSpec(v.name, v.shape, v.dtype, v.differentiable) for v in node.outputs)
                specs[name] = ModuleSpec(
                    name,
                    path,
                    number,
                    results,
                    options.get("plain", ""),
                    options.get("written", ()),
                    options.get("kept", ()),
                )
                node = replace(node, args=(name, *node.args[1:]))
            nodes.append(node)
        return tuple(nodes), tuple(specs.values())

    def _segment(self, number: int, attributes: dict[tuple[int | None, str], str]) -> SegmentText:
        nodes, _ = self._modules(number)
        own = {value.name for node in nodes for value in node.outputs}
        read = dict.fromkeys(name for node in nodes for name in node.operands if name not in own)
        owned = {leaf for leaf in read if (number, leaf) in attributes}
        leaving = {value for _, value in self.local.writes} | {self.local.loss}
        returns = [
            value.name
            for node in nodes
            for value in node.outputs
            if value.name in leaving or any(user.segment != number for user in self.local.consumers[value.name])
        ]
        return SegmentText(
            number=number,
            label=segment_label(self.local, nodes),
            nodes=nodes,
            reads=tuple(name for name in read if name not in owned),
            returns=tuple(returns),
            attributes={name: attributes[number, name] for name in owned},
            recompute=self.plan.recompute[number],
        )

    def _stages_of_states(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> the stages that hold it."""
        found: dict[str, set[int]] = {}
        states = {leaf.name for leaf in self.local.leaves if leaf.kind != "input"}
        for index, (first, end) in enumerate(self.plan.stages):
            segments = [node for nodes in self.chain[first:end] for node in nodes]
            wanted = {name for node in segments for name in node.operands}
            for node in (*segments, *_needed(self.shared, wanted, stop={})):
                for name in set(node.operands) & states:
                    found.setdefault(name, set()).add(index)
        for buffer, value in self.local.writes:
            found.setdefault(buffer, set()).add(self._stage_of_value(value))
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def _states(
        self, index: int, preamble: list[Node], prologue: list[Node]
    ) -> tuple[tuple[StateSpec, ...], dict[tuple[int | None, str], str]]:
        """The stage's tensors, and the attribute each has: (segment number or None for the stage, leaf) -> name."""
        first, end = self.plan.stages[index]
        written = {buffer for buffer, value in self.local.writes if self._stage_of_value(value) == index}
        specs: list[StateSpec] = []
        attributes: dict[tuple[int | None, str], str] = {}
        for leaf in self.whole.leaves:
            if leaf.kind == "input" or index not in self.stages_of.get(leaf.name, ()):
                continue
            users = [n for n in range(first, end) if any(leaf.name in node.operands for node in self.chain[n])]
            on_stage = leaf.name in written or any(leaf.name in n.operands for n in (*preamble, *prologue))
            for number in users:
                label = segment_label(self.local, self.chain[number])
                attributes[number, leaf.name] = _attribute(leaf, label)
            if on_stage:
                attributes[None, leaf.name] = _attribute(leaf, "")
            owner = users[0] - first if len(users) == 1 and (leaf.kind == "parameter" or not on_stage) else None
            names: list[tuple[int | None, str]] = [(number - first, attributes[number, leaf.name]) for number in users]
            if on_stage:
                names.append((None, attributes[None, leaf.name]))
            specs.append(self._state(leaf, owner, tuple(names)))
        return tuple(specs), attributes

    def _state(self, leaf: Leaf, owner: int | None, names: tuple[tuple[int | None, str], ...]) -> StateSpec:
        pair = self.leaves[leaf.name]
        return StateSpec(
            target=leaf.target,
            shape=leaf.value.shape,
            dtype=leaf.value.dtype,
            trainable=leaf.trainable,
            is_buffer=leaf.kind != "parameter",
            placement=pair.value,
            segment=owner,
            attributes=names,
            sum_over_tp=leaf.trainable and pair == REPLICATED and self.plan.mesh.tp > 1,
            tied_stages=self.stages_of[leaf.name],
            aliases=leaf.aliases,
        )


def _is_sum(node: Node) -> bool:
    source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
    return source.value.kind == "P" and target.value.kind == "R"


def _out(pair: Pair) -> str:
    """The conversion a tensor needs before it is sent: to whole on tp. '' when it is whole."""
    whole = WHOLE if pair.gradient is not None else WHOLE.without_gradient()
    return "" if pair == whole else f"{pair} -> {whole}"


def _back(pair: Pair) -> str:
    whole = WHOLE if pair.gradient is not None else WHOLE.without_gradient()
    return "" if pair == whole else f"{whole} -> {pair}"


def _attribute(leaf: Leaf, label: str) -> str:
    """'model.layers.0.self_attn.q_proj.weight' in segment 'model.layers.0' -> 'self_attn_q_proj_weight'."""
    target = leaf.target
    if label and target.startswith(label + "."):
        target = target[len(label) + 1 :]
    name = "".join(c if c.isalnum() else "_" for c in target)
    return f"w_{name}" if name[0].isdigit() or name in SOURCE_ATTRIBUTES else name


def _needed(nodes: Iterable[Node], wanted: set[str], stop: Iterable[str]) -> list[Node]:
    """Those of ``nodes`` that make a wanted tensor, in order; what makes the operands of a node in ``stop`` is not."""
    needed, stopping = set(wanted), set(stop)
    found = []
    for node in reversed(list(nodes)):
        if any(value.name in needed for value in node.outputs):
            found.append(node)
            if node.name not in stopping:
                needed.update(node.operands)
    return found[::-1]
