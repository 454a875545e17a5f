"""Calls of module objects, seen by others: `__call__` of many classes is wrapped for a time.

Checked on flax 0.12. Uses no private name: `__call__` is looked up on classes, so wrapping it on
one object would not be seen.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Around: TypeAlias = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Gets a module and returns the context in which it is called."""

_LOCK = threading.RLock()
_wrapped: dict[type, Callable[..., Any]] = {}  # classes with their own `__call__`
_users = 0


class _Thread(threading.local):
    around: Around | None = None


_thread = _Thread()


@contextlib.contextmanager
def around_calls(base: type, around: Around) -> Iterator[None]:
    """Within it, in this thread, objects of classes under `base` are called inside `around`.

    Classes that are defined inside the block are not seen.
    """
    global _users
    with _LOCK:
        _users += 1
        for kind in _subclasses(base):
            if "__call__" in vars(kind) and kind not in _wrapped:
                _wrapped[kind] = vars(kind)["__call__"]
                kind.__call__ = _with_context(_wrapped[kind])
    before = _thread.around
    _thread.around = around
    try:
        yield
    finally:
        _thread.around = before
        with _LOCK:
            _users -= 1
            if _users == 0:
                for kind, call in _wrapped.items():
                    kind.__call__ = call
                _wrapped.clear()


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _with_context(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.around is None:
            return call(self, *args, **kwargs)
        with _thread.around(self):
            return call(self, *args, **kwargs)

    return called
