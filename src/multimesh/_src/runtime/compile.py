"""Compiles the executables of a plan.

Bodies are traced and lowered one after the other in the calling thread, on the Auto mesh of their
submesh and away from any mesh that the user has set, and compiled by XLA in threads. Results come
out on the shardings of their slots, which may carry Explicit axis types. Executables that agree in
body (by identity), layouts, donation and submesh are compiled once.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from multimesh._src.collector import paused_collector
from multimesh._src.errors import ExecutionError, message
from multimesh._src.ir.constraint import with_mesh
from multimesh._src.ir.plan import Executable, Run, Slot
from multimesh._src.jax_compat.avals import no_ambient_mesh
from multimesh._src.jax_compat.compiled import FlatCall, flat_call, local_settings
from multimesh._src.jax_compat.shardy import shardy_enabled
from multimesh._src.runtime.buffers import BufferedPlan
from multimesh._src.runtime.counters import counters
from multimesh._src.runtime.donation import Pairs, runs_of


@dataclass(frozen=True, slots=True)
class CompiledExecutable:
    """A compiled executable.

    Attributes:
        name: Its name.
        compiled: What JAX compiled.
        in_dtypes: The types of its arguments' elements.
        call: The cheap call: a sequence of arguments to the sequence of results.
        order: The compiled program's i-th result is result `order[i]` of the executable: results
            that take over an argument's buffer come first, because JAX pairs in that order.
    """

    name: str
    compiled: jax.stages.Compiled
    in_dtypes: tuple[Any, ...]
    call: FlatCall
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    """An executable with all that decides its compilation."""

    executable: Executable
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    donations: Pairs

    def key(self) -> Any:
        body = id(self.executable.body)
        return (body, self.in_shardings, self.out_shardings, self.donations)

    def order(self) -> tuple[int, ...]:
        taking = dict.fromkeys(result for _, result in self.donations)
        others = (k for k in range(len(self.out_shardings)) if k not in taking)
        return (*taking, *others)


def compile_executables(
    buffered: BufferedPlan, done: dict[Any, CompiledExecutable] | None = None
) -> tuple[CompiledExecutable | None, ...]:
    """Compiles every executable that some step runs; None stands for the others.

    Args:
        buffered: The plan.
        done: What is compiled already, for several plans of one program; grows.

    Raises:
        ExecutionError: XLA cannot compile one of them; the cause is chained.
    """
    programs = _programs(buffered)
    done = {} if done is None else done
    wanted = {program.key(): program for program in programs if program is not None}
    distinct = {key: program for key, program in wanted.items() if key not in done}
    with paused_collector(), shardy_enabled(), no_ambient_mesh():
        lowered = {key: _lower(program) for key, program in distinct.items()}
    compiled = _compile_all({key: (distinct[key].executable.name, lowered[key]) for key in lowered})
    counters.compiles += len(compiled)
    done.update((key, _finish(distinct[key], compiled[key])) for key in distinct)
    return tuple(None if program is None else done[program.key()] for program in programs)


def stablehlo(buffered: BufferedPlan) -> tuple[tuple[str, str], ...]:
    """Returns name and StableHLO of every distinct executable that some step runs."""
    programs = {p.key(): p for p in _programs(buffered) if p is not None}
    with shardy_enabled(), no_ambient_mesh():
        return tuple((p.executable.name, _lower(p).as_text()) for p in programs.values())


def _programs(buffered: BufferedPlan) -> list[_Program | None]:
    plan = buffered.plan
    programs: list[_Program | None] = [None] * len(plan.executables)

    def shardings(slots: Sequence[Slot]) -> tuple[NamedSharding, ...]:
        return tuple(plan.slots[slot].sharding for slot in slots)

    for _, run in runs_of(plan):
        known = programs[run.executable]
        if known is None:
            programs[run.executable] = _program(buffered, run, shardings)
        else:
            # one program per executable: all its runs agree
            assert known.out_shardings == shardings(run.outputs), run
    return programs


def _program(
    buffered: BufferedPlan,
    run: Run,
    shardings: Callable[[Sequence[Slot]], tuple[NamedSharding, ...]],
) -> _Program:
    executable = buffered.plan.executables[run.executable]
    mesh = executable.submesh.auto_mesh
    in_shardings = tuple(
        NamedSharding(mesh, spec, memory_kind=given.memory_kind)
        for spec, given in zip(executable.in_specs, shardings(run.inputs), strict=True)
    )
    donations = buffered.donations[run.executable]
    return _Program(executable, in_shardings, shardings(run.outputs), donations)


def _lower(program: _Program) -> jax.stages.Lowered:
    executable, order = program.executable, program.order()
    evaluate = with_mesh(executable.body, executable.submesh.auto_mesh)

    def body(*args: Any) -> list[Any]:
        results = evaluate(*args)
        return [results[k] for k in order]

    return lower_flat(
        body,
        executable.name,
        executable.body.in_avals,
        program.in_shardings,
        [program.out_shardings[k] for k in order],
        tuple(argument for argument, _ in program.donations),
    )


def lower_flat(
    function: Callable[..., Any],
    name: str,
    avals: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    donated: tuple[int, ...] = (),
) -> jax.stages.Lowered:
    """Lowers a function of flat arguments, keeping all of them; `name` names the program."""
    function.__name__ = function.__qualname__ = name
    counters.lowerings += 1
    return jax.jit(
        function,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        donate_argnums=donated,
        keep_unused=True,
    ).lower(*map(_abstract, avals))


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _finish(program: _Program, compiled: jax.stages.Compiled) -> CompiledExecutable:
    dtypes = tuple(aval.dtype for aval in program.executable.body.in_avals)
    call = flat_call(compiled, dtypes)
    return CompiledExecutable(program.executable.name, compiled, dtypes, call, program.order())


# --- threads -------------------------------------------------------------------------------------


def _compile_all(
    lowered: Mapping[Any, tuple[str, jax.stages.Lowered]],
) -> Mapping[Any, jax.stages.Compiled]:
    """Compiles in threads; XLA works outside Python's lock."""
    if len(lowered) < 2:
        return {key: _compile(name, program) for key, (name, program) in lowered.items()}
    num_threads = min(len(lowered), os.cpu_count() or 1)
    pool = ThreadPoolExecutor(num_threads, "multimesh-compile", initializer=local_settings())
    try:
        futures = {
            pool.submit(_compile, name, program): key for key, (name, program) in lowered.items()
        }
        with _progress(len(futures)) as advance:
            for _ in map(_done, as_completed(futures)):
                advance()
        return {key: future.result() for future, key in futures.items()}
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _done(future: "Future[Any]") -> Any:
    return future.result()


def _compile(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        with shardy_enabled():
            compiled = lowered.compile()
    except Exception as error:
        raise ExecutionError(
            message(
                f"XLA could not compile the task `{name}`: {error}",
                ways=("read the chained error; `MULTIMESH_DUMP` writes the program of each task.",),
            )
        ) from error
    return compiled


def _progress(total: int) -> AbstractContextManager[Callable[[], None]]:
    """Returns a context that gives a function to call after each compiled program."""
    return _Bar(total) if sys.stderr.isatty() else nullcontext(lambda: None)


class _Bar:
    """A progress bar on the terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("compiling tasks", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
