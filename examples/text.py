"""Real text without a download: Python's own language reference, which every Python ships for ``help()``.

Characters are the tokens: newline and the printable ASCII characters, 96 in all; anything else reads as '?'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(CHARACTERS)


def encode(text: str) -> Tensor:
    """One token a character, as a long tensor [len(text)]."""
    number = {character: index for index, character in enumerate(CHARACTERS)}
    return torch.tensor([number.get(character, number["?"]) for character in text])


def decode(tokens: Tensor) -> str:
    return "".join(CHARACTERS[index] for index in tokens.tolist())


def load(validation_share: float = 0.1) -> tuple[Tensor, Tensor]:
    """The text as (training tokens, validation tokens); the validation part is the end of the text."""
    tokens = encode("\n\n".join(topics[name] for name in sorted(topics)))
    cut = round(len(tokens) * (1 - validation_share))
    return tokens[:cut], tokens[cut:]


def batches(tokens: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random excerpts as (inputs, targets), both [batch, length]; the targets are one character further on.

    The same seed gives the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
        excerpts = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
        yield excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()
