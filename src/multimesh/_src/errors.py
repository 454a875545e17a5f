"""The errors that users see.

One base class, subclasses by phase, each also a `ValueError`, `TypeError` or `RuntimeError`, so
that code which catches the built-in classes keeps working. A message has up to four parts, built
by `message`: what is wrong, where, a window of the program or schedule, and ways out.
"""

from collections.abc import Sequence

MAX_PROBLEMS = 5


class MultiMeshError(Exception):
    """Base class of every error raised for a user's mistake."""


class InitError(MultiMeshError, RuntimeError):
    """`init` was called too late, twice with other values, or with impossible values."""


class ConfigError(MultiMeshError, ValueError):
    """A setting was given a value that it does not have."""


class MeshError(MultiMeshError, ValueError):
    """A mesh, a mesh slice or a device list that does not exist or does not fit."""


class MatchError(MultiMeshError, ValueError):
    """A matcher, a callback or a `Task` that cannot be used."""


class TraceError(MultiMeshError, TypeError):
    """The function cannot be traced with these arguments."""


class ShardingError(MultiMeshError, ValueError):
    """A logical or mesh sharding that does not fit its array."""


class MicrobatchError(MultiMeshError, ValueError):
    """A batch that cannot be cut into microbatches as asked."""


class PartitionError(MultiMeshError, ValueError):
    """The traced program cannot be cut into tasks as asked."""


class ScheduleError(MultiMeshError, ValueError):
    """A pipeline schedule that is unknown, malformed, illegal or does not fit the program."""


class ExecutionError(MultiMeshError, RuntimeError):
    """A compiled step cannot run: donated arguments, missing devices, an interrupted step."""


class NonFiniteError(ExecutionError, FloatingPointError):
    """Under `jax_debug_nans` or `jax_debug_infs` a task made a NaN or an infinity."""


class CheckpointError(MultiMeshError, ValueError):
    """A state that cannot be saved, or a checkpoint that does not fit what it is restored into."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""


class MissingPackageError(MultiMeshError, ImportError):
    """Something needs a package that is an optional extra and is not installed."""


class DebugError(MultiMeshError, RuntimeError):
    """`multimesh.jax.debug` has nothing to show, or lacks what it takes to show it."""


def message(
    what: str,
    *,
    where: str = "",
    window: str = "",
    ways: Sequence[str] = (),
) -> str:
    """Builds the text of an error from its four parts.

    Args:
        what: What is wrong, with names and both values in backticks.
        where: The task, scope and the user's `file:line`, as far as known.
        window: A few lines of the program or the schedule grid, with an arrow.
        ways: What to do about it, one sentence each; numbered when there are several.
    """
    parts = [what]
    ways = [way if way.endswith(".") else f"{way}." for way in ways]
    if where:
        parts.append(f"  at {where}")
    if window:
        parts.append("\n".join("    " + line for line in window.splitlines()))
    if len(ways) == 1:
        parts.append(f"To mend it: {ways[0]}")
    elif ways:
        numbered = "\n".join(f"  {i}. {way}" for i, way in enumerate(ways, 1))
        parts.append(f"To mend it, either:\n{numbered}")
    return "\n".join(parts)


def listed(problems: Sequence[str]) -> str:
    """Joins several problems of one kind, at most `MAX_PROBLEMS`, and counts the rest."""
    shown = "\n".join(problems[:MAX_PROBLEMS])
    hidden = len(problems) - MAX_PROBLEMS
    return shown if hidden <= 0 else f"{shown}\n... and {hidden} more"
