"""A program written by hand: embedding, two blocks, head; tied table, tensor parallel, counts, a cut between stages.

``hand_program`` emits what lowering would for a mesh; ``reference_loss`` is the same model on one device. Every kind of
state occurs: column and row weights, a norm whose gradient is partial on tp, a tied table (shared by two segments or by
two stages), a scalar, a frozen bias, a trainable weight of another dtype that nobody uses, a buffer written each
micro-batch.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from planner.ir.layout import Placement, R, S
from planner.ir.mesh import Mesh
from planner.ir.program import PREAMBLE, InputSpec, Program, SegmentSpec, StageProgram, StateSpec, TensorSpec

BATCH, LENGTH, VOCAB, WIDTH, INNER = 8, 3, 8, 4, 8
IGNORED = -100

CLASSES = """

class Embed(Segment):
    def forward(self, ids):
        return convert(vocab_parallel_embedding(ids, self.table, tp), tp, "P:R -> R:R")


class Block(Segment):
    def forward(self, x{rng}):
        whole = convert(x, tp, "R:R -> R:P")
        normed = F.layer_norm(whole, (4,), self.norm_weight, self.norm_bias)
        inner = F.gelu(F.linear(normed, self.up_weight, self.up_bias))
        down = F.linear(inner, self.down_weight, convert(self.down_bias, tp, "R:R -> P:R"))
        y = convert(down, tp, "P:R -> R:R") * self.scale{dropout}
        return x + y


class Head(Segment):
    def forward(self, x, labels, count):
        logits = F.linear(convert(x, tp, "R:R -> R:P"), self.table)
        total = vocab_parallel_cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), tp)
        return total / count


class Stage(StageModule):
"""

PROLOGUE = """\
    def prologue(self, labels):
        return (convert(cross_entropy_count(labels, 8, dtype=torch.float64), dp, "P:- -> R:-"),)

"""

SHAPES: dict[str, tuple[tuple[int, ...], Placement, bool, bool]] = {
    "norm_weight": ((WIDTH,), R, True, True),  # shape, placement on tp, trainable, gradient partial on tp
    "norm_bias": ((WIDTH,), R, True, True),
    "up_weight": ((INNER, WIDTH), S(0), True, False),
    "up_bias": ((INNER,), S(0), True, False),
    "down_weight": ((WIDTH, INNER), S(1), True, False),
    "down_bias": ((WIDTH,), R, False, False),
    "scale": ((), R, True, False),
    "unused": ((2, 2), R, True, False),
}


def hand_program(
    mesh: Mesh,
    micro_batches: int = 2,
    zero: int = 0,
    schedule: str = "gpipe",
    recompute: str = "none",
    dropout: float = 0.0,
) -> Program:
    """The program for ``mesh`` of at most two stages."""
    chain = ["Embed", "Block", "Block", "Head"]
    cut = [chain] if mesh.pp == 1 else [chain[:2], chain[2:]]
    classes = CLASSES.format(
        rng=", rng, site" if dropout else "",
        dropout=f"\n        y = dropout(y, {dropout}, rng, site)" if dropout else "",
    )
    first_block, stages = 0, []
    rows = BATCH // mesh.dp // micro_batches
    hidden = TensorSpec("x", (rows, LENGTH, WIDTH), "float64", True)
    for index, names in enumerate(cut):
        first, last = index == 0, index == len(cut) - 1
        forward, number = [], first_block
        for i, name in enumerate(names):
            if name == "Embed":
                forward.append(f"x = self.segments[{i}](ids)")
            elif name == "Block":
                forward.append(f"x = self.segments[{i}](x{f', rng, {number}' if dropout else ''})")
                number += 1
            else:
                forward.append(f"loss = self.segments[{i}](x, labels, count)")
        forward.append("self.seen.copy_(self.seen + 1)")
        inputs = (("ids",) if first else ()) + (("labels",) if last else ()) + (("rng",) if dropout else ())
        keywords = [*inputs, *(["count"] if last else [])]
        head = f"    def forward(self{'' if first else ', x'}, *, {', '.join(keywords)}):\n"
        body = "".join(f"        {line}\n" for line in [*forward, "return (loss,)" if last else "return (x,)"])
        stages.append(
            StageProgram(
                index=index,
                source=PREAMBLE + classes + (PROLOGUE if last else "") + head + body,
                segments=tuple(SegmentSpec(name, name.lower(), recompute) for name in names),
                states=_states(index, names, first_block, tied=len(cut) == 2),
                receives=() if first else (hidden,),
                sends=(TensorSpec("loss", (), "float64", True),) if last else (hidden,),
                inputs=inputs,
                prologue_inputs=("labels",) if last else (),
                counts=(TensorSpec("count", (), "float64", False),) if last else (),
            )
        )
        first_block = number
    inputs = tuple(InputSpec(n, f"[0][{i}]", (BATCH, LENGTH), "int64", True) for i, n in enumerate(("ids", "labels")))
    return Program(mesh, micro_batches, schedule, zero, inputs, tuple(stages), seed=3)


def _states(stage: int, names: list[str], block: int, tied: bool) -> tuple[StateSpec, ...]:
    users = [i for i, name in enumerate(names) if name != "Block"]
    owner = users[0] if tied else None
    table = StateSpec(
        "embed.weight", (VOCAB, WIDTH), "float64", True, placement=S(0), segment=owner,
        attributes=tuple((i, "table") for i in users), tied_stages=(0, 1) if tied else (0,), aliases=("head.weight",),
    )  # fmt: skip
    states = [table]
    for i, name in enumerate(names):
        if name == "Block":
            for attribute, (shape, placement, trainable, partial) in SHAPES.items():
                target = f"blocks.{block}.{attribute}"
                dtype = "float32" if attribute == "unused" else "float64"
                states.append(
                    StateSpec(
                        target, shape, dtype, trainable, False, placement, i, ((i, attribute),), partial, (stage,)
                    )
                )
            block += 1
    seen = StateSpec(f"seen{stage}", (), "int64", False, True, R, None, ((None, "seen"),), False, (stage,))
    return (*states, seen)


def initial_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (VOCAB, WIDTH)}
    shapes |= {f"blocks.{i}.{name}": spec[0] for i in range(2) for name, spec in SHAPES.items()}
    state = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    state = {name: value.float() if name.endswith("unused") else value for name, value in state.items()}
    return state | {f"seen{stage}": torch.zeros((), dtype=torch.int64) for stage in range(2)}


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    """Unequal numbers of ignored labels in each shard; the first micro-batch of the first shard has none left."""
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels[0] = IGNORED
    labels[3, 1:] = IGNORED
    return {"ids": ids, "labels": labels}


def reference_parameters() -> dict[str, torch.nn.Parameter]:
    """The trainable and frozen parameters on one device."""
    frozen = {name for name, spec in SHAPES.items() if not spec[2]}
    return {
        name: torch.nn.Parameter(value.clone(), requires_grad=name.rpartition(".")[2] not in frozen)
        for name, value in initial_state().items()
        if value.is_floating_point()
    }


def reference_loss(parameters: dict[str, torch.nn.Parameter], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    x = F.embedding(inputs["ids"], parameters["embed.weight"])
    for i in range(2):
        p = {name: parameters[f"blocks.{i}.{name}"] for name in SHAPES}
        inner = F.gelu(
            F.linear(F.layer_norm(x, (WIDTH,), p["norm_weight"], p["norm_bias"]), p["up_weight"], p["up_bias"])
        )
        x = x + F.linear(inner, p["down_weight"], p["down_bias"]) * p["scale"]
    logits = F.linear(x, parameters["embed.weight"])
    return F.cross_entropy(logits.reshape(-1, VOCAB), inputs["labels"].reshape(-1))
