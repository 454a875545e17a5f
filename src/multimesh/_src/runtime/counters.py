"""Process-wide counters of the work that a step should not repeat.

They count what we do, not what eager code of the user or JAX itself does, so that a test can say:
five steps are one trace, one compile and, after the first, no move of state.

    before = counters.snapshot()
    ...
    assert counters.since(before).compiles == 0
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Counts:
    """Values of the counters, or their growth between two points in time.

    Attributes:
        traces: User functions traced.
        lowerings: Programs lowered to StableHLO: bodies of tasks and layout changes.
        compiles: Programs compiled by XLA.
        moves: Values that went to another device, layout or memory, inside steps or as arguments.
        copies: Calls of the batched copy.
        argument_moves: Arguments that were JAX arrays but did not lie as the step takes them.
        argument_puts: Arguments that came from the host.
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    moves: int = 0
    copies: int = 0
    argument_moves: int = 0
    argument_puts: int = 0


_NAMES = tuple(field.name for field in fields(Counts))


class Counters:
    """The counters; add to its attributes, which are those of `Counts`."""

    __slots__ = _NAMES

    def __init__(self) -> None:
        for name in _NAMES:
            setattr(self, name, 0)


counters = Counters()


def snapshot() -> Counts:
    """Returns the counters as they are now."""
    return Counts(**{name: getattr(counters, name) for name in _NAMES})


def since(before: Counts) -> Counts:
    """Returns by how much the counters grew since `before` was taken."""
    return Counts(**{name: getattr(counters, name) - getattr(before, name) for name in _NAMES})
