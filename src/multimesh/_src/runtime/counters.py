"""Process-wide counters of the work that a step should not repeat.

They count what we do, not what eager code of the user or JAX itself does, so that a test can say:
five steps are one trace, one compile and, after the first, no move of state.

    before = counters.snapshot()
    ...
    assert counters.since(before).compiles == 0
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class Counters:
    """Counters, or how much they grew between two points in time.

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


counters = Counters()
"""The counters of this process; add to its attributes."""


def snapshot() -> Counters:
    """Returns the counters as they are now."""
    return replace(counters)


def since(before: Counters) -> Counters:
    """Returns by how much the counters grew since `before` was taken."""
    names = [field.name for field in fields(Counters)]
    return Counters(*(getattr(counters, name) - getattr(before, name) for name in names))


@contextmanager
def counting() -> Iterator[Counters]:
    """Counts what is traced, compiled and moved inside a `with` block, in all threads.

    The counters are filled when the block ends.

    Example:
        >>> import jax.numpy as jnp
        >>> double = mjit(lambda x: x * 2)
        >>> with counting() as first:
        ...     result = double(jnp.ones(2))
        >>> with counting() as second:
        ...     result = double(result)
        >>> first.traces, second.traces
        (1, 0)
    """
    before, grown = snapshot(), Counters()
    try:
        yield grown
    finally:
        after = since(before)
        for field in fields(Counters):
            setattr(grown, field.name, getattr(after, field.name))
