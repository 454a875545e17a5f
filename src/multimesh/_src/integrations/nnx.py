"""Flax NNX: a named scope around every module, as Linen has it by itself.

with nnx.scopes():
    train_step(model, batch)      # model.layers[3].attention(x) runs in layers_3/attention
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from flax import nnx

from multimesh._src.jax_compat.module_calls import around_calls

Path: TypeAlias = tuple[Any, ...]


@contextlib.contextmanager
def scopes() -> Iterator[None]:
    """Opens a named scope around every call of an NNX module, in this thread.

    The scope is where the module stands in the module that calls it: `attention` for
    `self.attention(x)`, `layers_3` for `self.layers[3](x)`. The outermost module, and modules that
    a transformation of NNX puts together anew (`nnx.scan`, `nnx.remat` of a function), have the
    name of their class. Only `__call__` is seen, no other methods. It also serves as a decorator.

    Functions that JAX has already traced elsewhere keep the scopes of that trace.
    """
    calls = _Calls()
    with around_calls(nnx.Module, calls.inside):
        yield


@dataclass(slots=True)
class _Calls:
    """The modules that are being called, outermost first."""

    open: list[tuple[Mapping[int, Path], Path]] = field(default_factory=list)

    @contextlib.contextmanager
    def inside(self, module: Any) -> Iterator[None]:
        """The scope of one call."""
        known, path = self.open[-1] if self.open else ({}, ())
        if id(module) in known:
            components = _components(known[id(module)], path)
            path = known[id(module)]
        else:
            # The map holds ids only: its modules live as long as the call.
            known = {id(inner): where for where, inner in nnx.iter_modules(module)}
            components, path = (type(module).__name__,), ()
        self.open.append((known, path))
        try:
            with contextlib.ExitStack() as stack:
                for component in components:
                    stack.enter_context(jax.named_scope(component))
                yield
        finally:
            self.open.pop()


def _components(path: Path, outer: Path) -> tuple[str, ...]:
    """The path of a module in the one that calls it; numbers belong to the name before them."""
    inner = path[len(outer) :] if path[: len(outer)] == outer else path
    components: list[str] = []
    for part in inner:
        if isinstance(part, int) and components:
            components[-1] += f"_{part}"
        else:
            components.append(str(part))
    return tuple(components)
