"""Python's garbage collector, held while large programs are built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Within it Python looks for no garbage in cycles.

    Cutting and lowering a program makes a hundred thousand long-lived objects and hardly a cycle.
    The collector would walk through all of them, and through what JAX keeps, again and again: it
    took more than half of the time. It is left alone where the user has switched it off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
