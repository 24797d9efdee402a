"""What runs a training step around its operators, as data: how a framework keeps, reduces and updates weights.

The default is this project's runtime. Others are described to price what they ran, so that predictions can be held
against published measurements (benchmarks.published); files in ``costmodels/software``, each number with its source:

    name = "..."
    launch_s = 20e-6
    [matmul_share]
    H100 = 0.8
    [sources]
    launch_s = "..."
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from importlib import resources


@dataclass(frozen=True)
class Software:
    """0 stands for what follows from the dtype of a weight and the optimizer.

    ``launch_s``: least seconds between the starts of two operators, where that is more than the device's own
    ``kernel_launch_s``. ``overlaps_reduction``: gradients are reduced over dp while backward goes on, not after.
    Bytes of one element: ``weight_bytes``, ``gradient_bytes``, ``optimizer_bytes`` as held all step long;
    ``reduced_bytes`` as its gradient travels; ``update_bytes`` moved by the optimizer. ``update_launches``: operators of
    the update, for each weight tensor; 0: one a segment.
    ``loss_in_place``: cross-entropy overwrites its logits. ``gradients_in_place``: products add to the gradients of weights
    themselves. ``frees_exchanged``: what stages exchange takes memory only on its way. ``frees_put_off``: when zero-bubble
    puts off gradients of weights, only the operands of their products stay, no more than the activations were.
    ``workspace_bytes``: what libraries keep on a GPU of a process, of the memory torch counts. ``bucket_bytes``: of gradients
    that travel together. ``attention_share``: what its attention kernel reaches of the
    device's ``attention_efficiency``; ``matmul_share``: (what a device's name begins with, what its libraries' matrix
    products reach of the device's ``matmul_efficiency``), 1 on other devices.
    """

    name: str = "meshwright"
    launch_s: float = 0.0
    overlaps_reduction: bool = True
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    reduced_bytes: int = 0
    update_bytes: int = 0
    update_launches: int = 0
    loss_in_place: bool = False
    gradients_in_place: bool = False
    frees_exchanged: bool = False
    frees_put_off: bool = False
    workspace_bytes: int = 0
    bucket_bytes: int = 25 * 2**20
    attention_share: float = 1.0
    matmul_share: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and value < 0 or f.name == "launch_s" and value < 0:
                raise ValueError(f"software {self.name}: {f.name} is {value}; it must be 0 or more")
        for what, share in (("attention_share", self.attention_share), *self.matmul_share):
            if not 0 < share <= 1:
                raise ValueError(f"software {self.name}: {what} is {share}; it must be above 0 and at most 1")

    def matmul_share_on(self, device: str) -> float:
        """Of the device of that name."""
        return next((share for begin, share in self.matmul_share if device.startswith(begin)), 1.0)


OURS = Software()


def software_names() -> tuple[str, ...]:
    """The names ``load_software`` knows, sorted; the first is this project's own."""
    folder = resources.files(__package__).joinpath("software")
    names = sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))
    return (OURS.name, *names)


def load_software(name: str) -> Software:
    """The description of that name. Raises ValueError for another."""
    if name == OURS.name:
        return OURS
    if name not in software_names():
        raise ValueError(f"there is no software {name!r}; the cost model knows {', '.join(software_names())}")
    text = resources.files(__package__).joinpath("software", f"{name}.toml").read_text(encoding="utf-8")
    data = {key: value for key, value in tomllib.loads(text).items() if key != "sources"}
    return Software(**data | {"matmul_share": tuple(data.get("matmul_share", {}).items())})
