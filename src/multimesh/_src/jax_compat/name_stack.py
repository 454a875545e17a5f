"""Name stacks: the scopes and transformations that an equation was traced under.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. `NameStack.stack` is a tuple of `Scope(name)` and
`Transform(name)`, outermost first. Without it the text of the stack is parsed; without
`current_name_stack` the scopes that are open around a call are not seen, without `user_frames`
errors and reports name no lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from jax._src.source_info_util import Transform, current_name_stack, user_frames
except ImportError:  # unknown newer JAX
    Transform = current_name_stack = user_frames = None

_LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\](flax|optax|equinox|haiku|chex)[/\\]")
_OURS = str(Path(__file__).parents[1])


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
