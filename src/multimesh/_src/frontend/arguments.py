"""Static, donated and named arguments of a function, as `jax.jit` understands them.

    f(x, mode, *, state)   static_argnames="mode"   donate_argnums=(2,)
    f(x, "train", state=s)  ->  dynamic: args (x,), kwargs {"state": s}; static: (1, "train")

Positions and names are made complete from the signature once (`argument_spec`), so that a call
only splits its tuple.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax

from multimesh._src.errors import TraceError, message

Ints = int | Sequence[int] | None
Names = str | Iterable[str] | None


@dataclass(frozen=True, slots=True)
class ArgumentSpec:
    """Which arguments of a function are static or donated, by position and by name."""

    parameters: tuple[str, ...]  # names of the positional parameters, as far as known
    variadic: str  # name of `*args`, or ""
    static_nums: frozenset[int]
    static_names: frozenset[str]
    donate_nums: frozenset[int]
    donate_names: frozenset[str]

    @property
    def has_statics(self) -> bool:
        """Whether a call has to be split at all."""
        return bool(self.static_nums or self.static_names)


@dataclass(frozen=True, slots=True)
class Statics:
    """The static arguments of one call; equal calls compare equal and hash alike."""

    args: tuple[tuple[int, Hashable], ...] = ()
    kwargs: tuple[tuple[str, Hashable], ...] = ()


NO_STATICS = Statics()


def argument_spec(
    fun: Callable[..., Any],
    *,
    static_argnums: Ints = None,
    static_argnames: Names = None,
    donate_argnums: Ints = None,
    donate_argnames: Names = None,
) -> ArgumentSpec:
    """Reads the signature of `fun` and completes numbers by names and names by numbers.

    Raises:
        TraceError: A number or name that `fun` does not have, or an argument that is static and
            donated.
    """
    parameters, variadic, keywords = _parameters(fun)
    nums = (
        _as_tuple("static_argnums", Integral, static_argnums),
        _as_tuple("donate_argnums", Integral, donate_argnums),
    )
    names = (
        _as_tuple("static_argnames", str, static_argnames),
        _as_tuple("donate_argnames", str, donate_argnames),
    )
    count = len(parameters) if parameters is not None and not variadic else None
    completed = [
        _complete(function_name(fun), positions, given, parameters or (), count, keywords)
        for positions, given in zip(nums, names, strict=True)
    ]
    (static_nums, static_names), (donate_nums, donate_names) = completed
    both = (static_nums & donate_nums) or (static_names & donate_names)
    if both:
        raise TraceError(
            message(f"argument `{min(both)}` of `{function_name(fun)}` is both static and donated.")
        )
    return ArgumentSpec(
        parameters or (), variadic, static_nums, static_names, donate_nums, donate_names
    )


def function_name(fun: Callable[..., Any]) -> str:
    """Returns the name of a function, of what a partial calls, or of a callable object's type."""
    inner = fun.func if isinstance(fun, functools.partial) else fun
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def check_callable(fun: Any, what: str) -> None:
    """Raises a TraceError if `fun`, the argument of `what`, is no function."""
    if not callable(fun):
        raise TraceError(
            message(
                f"`{what}` takes a function, but got a `{type(fun).__name__}`.",
                ways=("give the function itself, uncalled.",),
            )
        )


def _as_tuple(option: str, kind: type, value: Any) -> tuple[Any, ...]:
    """The value of an option as a tuple of positions (Integral) or names (str)."""
    if value is None:
        return ()
    values = (value,) if isinstance(value, (Integral, str)) else tuple(value)
    for wrong in (v for v in values if not isinstance(v, kind) or isinstance(v, bool)):
        names = kind is str
        other = option.replace("names", "nums") if names else option.replace("nums", "names")
        raise TraceError(
            message(
                f"`{option}={value!r}`: `{wrong!r}` is no {'name' if names else 'position'} of an "
                "argument.",
                ways=(f"use `{other}=`.",),
            )
        )
    return values


def _parameters(fun: Callable[..., Any]) -> tuple[tuple[str, ...] | None, str, bool]:
    """Returns positional parameters (None if unknown), the name of `*args`, any `**kwargs`."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # builtins
        return None, "args", True
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    variadic = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    return (
        tuple(positional),
        (variadic or [""])[0],
        any(p.kind in (p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters),
    )


def _complete(
    function: str,
    nums: tuple[int, ...],
    names: tuple[str, ...],
    parameters: tuple[str, ...],
    count: int | None,
    keywords: bool,
) -> tuple[frozenset[int], frozenset[str]]:
    if count is not None:
        wrong: list[Any] = [n for n in nums if not -count <= n < count]
        wrong += [n for n in names if n not in parameters and not keywords]
        if wrong:
            raise TraceError(
                message(
                    f"`{function}` has no argument `{wrong[0]}`; its arguments are "
                    + ", ".join(f"`{p}`" for p in parameters)
                    + "."
                )
            )
        nums = tuple(n % count for n in nums)
    inferred = {parameters[n] for n in nums if 0 <= n < len(parameters)}
    at = {parameters.index(name) for name in names if name in parameters}
    return frozenset(nums) | at, frozenset(names) | inferred


def split_statics(
    spec: ArgumentSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
    """Splits a call into dynamic arguments, dynamic keyword arguments and statics."""
    if not spec.has_statics:
        return args, dict(kwargs), NO_STATICS
    nums = {n % len(args) if n < 0 and args else n for n in spec.static_nums}
    statics = Statics(
        tuple((i, _hashable(arg, i)) for i, arg in enumerate(args) if i in nums),
        tuple((k, _hashable(kwargs[k], k)) for k in sorted(kwargs) if k in spec.static_names),
    )
    dynamic = tuple(arg for i, arg in enumerate(args) if i not in nums)
    return dynamic, {k: v for k, v in kwargs.items() if k not in spec.static_names}, statics


def _hashable(value: Any, at: int | str) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise TraceError(
            message(
                f"static argument `{at}` of type `{type(value).__name__}` is not hashable.",
                ways=("pass a hashable value", "do not name the argument as static"),
            )
        ) from None
    return value


def join_statics(args: Sequence[Any], statics: Statics) -> tuple[Any, ...]:
    """Puts the static positional arguments back among the dynamic ones."""
    joined = list(args)
    for i, value in statics.args:
        joined.insert(i, value)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class NamedArgument:
    """One dynamic argument of a call: its name, its value and whether it is donated."""

    name: str
    value: Any
    donated: bool


def named_arguments(
    spec: ArgumentSpec, args: Sequence[Any], kwargs: Mapping[str, Any], statics: Statics
) -> tuple[NamedArgument, ...]:
    """Returns the dynamic arguments in the order in which `(args, kwargs)` flattens."""
    taken = {i for i, _ in statics.args}
    total = len(args) + len(taken)
    positions = [i for i in range(total) if i not in taken]
    positional = tuple(
        NamedArgument(_position_name(spec, i), arg, i in spec.donate_nums)
        for i, arg in zip(positions, args, strict=True)
    )
    return positional + tuple(
        NamedArgument(k, kwargs[k], k in spec.donate_names) for k in sorted(kwargs)
    )


def _position_name(spec: ArgumentSpec, i: int) -> str:
    if i < len(spec.parameters):
        return spec.parameters[i]
    return f"{spec.variadic or 'args'}[{i - len(spec.parameters)}]"


def leaf_names(argument: NamedArgument) -> tuple[str, ...]:
    """Returns the user's name of every leaf, as `state['params'][0]`."""
    paths = jax.tree_util.tree_leaves_with_path(argument.value)
    return tuple(argument.name + jax.tree_util.keystr(path) for path, _ in paths)
