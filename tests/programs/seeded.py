"""Choices from a seed, the same on every machine."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Seeded:
    """A `spec.Source` whose choices follow from `seed`."""

    def __init__(self, seed: int):
        self._random = random.Random(f"program {seed}")

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[self.integer(0, len(options) - 1)]

    def integer(self, low: int, high: int) -> int:
        """An integer of `low..high`, both included."""
        return low + int(self._random.random() * (high - low + 1))
