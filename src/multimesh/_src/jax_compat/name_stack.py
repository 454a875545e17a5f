"""Name stacks: the scopes and transformations that an equation was traced under.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. `NameStack.stack` is a tuple of `Scope(name)` and
`Transform(name)`, outermost first. Without it the text of the stack is parsed; without
`current_name_stack` the scopes that are open around a call are not seen, without `user_frames`
errors and reports name no lines.

JAX empties the stack where it traces the body of an inner jit, scan or remat. While
`remember_outer_stacks` is open, the stacks that were put aside so are kept; on demand it also tells
when a scope is opened. This watches `SetNameStackContextManager` and
`ExtendNameStackContextManager`; without them only the scopes inside the innermost body are seen.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimesh._src.jax_compat import private

try:
    from jax._src.source_info_util import (
        Transform,
        current,
        current_name_stack,
        user_frame,
        user_frames,
    )
except ImportError:  # unknown newer JAX
    Transform = current = current_name_stack = user_frame = user_frames = None

_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](flax|optax|equinox|haiku|chex)[/\\]")
_OURS = str(Path(__file__).parents[1])

_setter: Any = None
_extender: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import source_info_util

        _setter = source_info_util.SetNameStackContextManager
        _extender = source_info_util.ExtendNameStackContextManager

_LOCK = threading.RLock()
_originals: list[tuple[Any, Any, Any]] = []  # watched classes with their own two methods
_users = 0


class _Watch(threading.local):
    """What this thread watches.

    Attributes:
        outer: The stacks that JAX put aside, outermost first; None: nobody looks.
        in_scope: Gives a context to open inside each scope that is opened, or None.
        open: The contexts that it gave, for the scopes that are open.
    """

    outer: list[Any] | None = None
    in_scope: Callable[[], AbstractContextManager[Any]] | None = None
    open: tuple[AbstractContextManager[Any], ...] = ()


_watch = _Watch()


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
    return (*(_watch.outer or ()), ambient_name_stack())


@contextlib.contextmanager
def remember_outer_stacks(
    in_scope: Callable[[], AbstractContextManager[Any]] | None = None,
) -> Iterator[None]:
    """Within it, in this thread, `open_name_stacks` sees stacks that JAX puts aside.

    Args:
        in_scope: Gives a context that stays open while a scope is; called when it is opened.
    """
    before = _watch.outer, _watch.in_scope, _watch.open
    _patch()
    _watch.outer, _watch.in_scope, _watch.open = [], in_scope, ()
    try:
        yield
    finally:
        _watch.outer, _watch.in_scope, _watch.open = before
        _unpatch()


def _patch() -> None:
    global _users
    with _LOCK:
        _users += 1
        if _users > 1 or _extender is None:
            return
        _originals[:] = ((cls, cls.__enter__, cls.__exit__) for cls in (_setter, _extender))
        _setter.__enter__, _setter.__exit__ = _enter_set, _exit_set
        _extender.__enter__, _extender.__exit__ = _enter_scope, _exit_scope


def _unpatch() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0 and _extender is not None:
            for cls, enter, leave in _originals:
                cls.__enter__, cls.__exit__ = enter, leave


def _enter_set(setter: Any) -> Any:
    if _watch.outer is not None and not components(setter.name_stack):
        _watch.outer.append(ambient_name_stack())
    return _originals[0][1](setter)


def _exit_set(setter: Any, *error: Any) -> Any:
    if _watch.outer and not components(setter.name_stack):
        _watch.outer.pop()
    return _originals[0][2](setter, *error)


def _enter_scope(scope: Any) -> Any:
    result = _originals[1][1](scope)
    if _watch.in_scope is not None:
        context = _watch.in_scope()
        context.__enter__()
        _watch.open = (*_watch.open, context)
    return result


def _exit_scope(scope: Any, *error: Any) -> Any:
    if _watch.open:
        *rest, context = _watch.open
        _watch.open = tuple(rest)
        context.__exit__(None, None, None)
    return _originals[1][2](scope, *error)


def current_line() -> str:
    """Returns the user's `file:line` that runs now, or `""` where unknown."""
    frame = None if current is None or user_frame is None else user_frame(current().traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


def source_line(eqn: Any) -> str:
    """Returns the user's `file:line` that an equation comes from, or `""` where unknown.

    It is the innermost line outside of JAX, this package and the libraries that models are written
    with; a line of such a library only where there is no other.
    """
    if user_frames is None:
        return ""
    first = None
    for frame in user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_OURS) and not _LIBRARIES.search(frame.file_name):
            return f"{frame.file_name}:{frame.start_line}"
        first = first or frame
    return "" if first is None else f"{first.file_name}:{first.start_line}"


def line_of_error(error: BaseException) -> str:
    """Returns the user's `file:line` that an exception was raised under, or `""`."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in ("jax", "multimesh", "contextlib"):
            found = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
