"""Name stacks: the scopes and transformations that an equation was traced under.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. `NameStack.stack` is a tuple of `Scope(name)` and
`Transform(name)`, outermost first. Without it the text of the stack is parsed; without
`current_name_stack` the scopes that are open around a call are not seen, without `user_frame`
errors name no lines.

JAX empties the stack where it traces the body of an inner jit, scan or remat. While
`remember_outer_stacks` is open, the stacks that were put aside so are kept. This watches
`SetNameStackContextManager`; without it only the scopes inside the innermost body are seen.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from multimesh._src.jax_compat import private

try:
    from jax._src.source_info_util import Transform, current, current_name_stack, user_frame
except ImportError:  # unknown newer JAX
    Transform = current = current_name_stack = user_frame = None

_setter: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src.source_info_util import SetNameStackContextManager as _setter

_LOCK = threading.RLock()
_methods: list[Any] = []  # the two methods of `_setter`, while they are watched
_users = 0


class _Outer(threading.local):
    """The stacks that JAX put aside in this thread, outermost first; None: nobody looks."""

    stacks: list[Any] | None = None


_outer = _Outer()


@dataclass(frozen=True, slots=True)
class Component:
    """One entry of a name stack: a scope that the user opened, or a transformation (`jvp`)."""

    name: str
    is_transform: bool


def components(name_stack: Any) -> tuple[Component, ...]:
    """Returns the entries of a name stack, outermost first."""
    stack = getattr(name_stack, "stack", None)
    if stack is None or Transform is None:
        return parse_components(str(name_stack))
    return tuple(Component(entry.name, isinstance(entry, Transform)) for entry in stack)


def parse_components(text: str) -> tuple[Component, ...]:
    """Reads the text form of a name stack, as `transpose(jvp(layer0))/attention`.

    A transformation wraps the first scope inside it, so it stands before that scope.
    """
    found: list[Component] = []
    for part in filter(None, text.split("/")):
        while part.endswith(")") and "(" in part:
            transform, part = part[:-1].split("(", 1)
            found.append(Component(transform, is_transform=True))
        if part:
            found.append(Component(part, is_transform=False))
    return tuple(found)


def ambient_name_stack() -> Any:
    """Returns the name stack that is open here, or None where JAX does not tell."""
    return None if current_name_stack is None else current_name_stack()


def open_name_stacks() -> tuple[Any, ...]:
    """Returns the stacks put aside since `remember_outer_stacks`, and the one that is open here."""
    return (*(_outer.stacks or ()), ambient_name_stack())


@contextlib.contextmanager
def remember_outer_stacks() -> Iterator[None]:
    """Within it, in this thread, `open_name_stacks` sees stacks that JAX puts aside."""
    before = _outer.stacks
    _watch()
    _outer.stacks = []
    try:
        yield
    finally:
        _outer.stacks = before
        _unwatch()


def _watch() -> None:
    global _users
    with _LOCK:
        _users += 1
        if _users == 1 and _setter is not None:
            _methods[:] = (_setter.__enter__, _setter.__exit__)
            _setter.__enter__, _setter.__exit__ = _enter, _exit


def _unwatch() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0 and _setter is not None:
            _setter.__enter__, _setter.__exit__ = _methods


def _enter(setter: Any) -> Any:
    if _outer.stacks is not None and not components(setter.name_stack):
        _outer.stacks.append(ambient_name_stack())
    return _methods[0](setter)


def _exit(setter: Any, *error: Any) -> Any:
    if _outer.stacks and not components(setter.name_stack):
        _outer.stacks.pop()
    return _methods[1](setter, *error)


def current_line() -> str:
    """Returns the user's `file:line` that runs now, or `""` where unknown."""
    frame = None if current is None or user_frame is None else user_frame(current().traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


def source_line(eqn: Any) -> str:
    """Returns the user's `file:line` that an equation comes from, or `""` where unknown."""
    frame = None if user_frame is None else user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"
