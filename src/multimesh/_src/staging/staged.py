"""Staged objects: a function traced, lowered (cut into tasks and scheduled) and compiled.

    mjit(step).trace(state, batch) -> Traced .lower() -> Lowered .compile() -> Compiled

They mirror `jax.stages`. What is plain JAX (R15) hides behind the same objects.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, Sharding

from multimesh._src.errors import TraceError, message
from multimesh._src.frontend.arguments import ArgumentSpec, split_statics
from multimesh._src.frontend.tracing import TracedFunction, plain_aval
from multimesh._src.ir.plan import Plan
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.partition.text import print_program
from multimesh._src.report.make import make_report
from multimesh._src.report.program import ProgramReport
from multimesh._src.runtime.compiled_plan import CompiledPlan, compile_plan
from multimesh._src.staging.matched import findings
from multimesh._src.staging.variants import user_sharding


class AbstractBackend(Protocol):
    """What stands behind a compiled function: a plan of ours, or plain JAX."""

    def call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the step on flat arguments."""
        ...

    def text(self) -> str:
        """The compiled programs as text."""
        ...

    def input_shardings(self) -> tuple[Sharding | None, ...]:
        """Per flat argument where it is taken; None where it is not used."""
        ...

    def output_shardings(self) -> tuple[Sharding, ...]:
        """Per flat result where it comes out."""
        ...

    def cost_analysis(self) -> Any:
        """XLA's estimates for one call."""
        ...

    def memory_analysis(self) -> Any:
        """XLA's memory sizes."""
        ...


@dataclass(frozen=True, slots=True)
class PlanBackend:
    """A compiled plan."""

    plan: Plan
    compiled: CompiledPlan
    num_arguments: int

    def call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return self.compiled.call(leaves)

    def text(self) -> str:
        programs = self.compiled.executables.items()
        return "\n".join(f"# {name}\n{program.as_text()}" for name, program in programs)

    def input_shardings(self) -> tuple[Sharding | None, ...]:
        return input_shardings(self.plan, self.num_arguments)

    def output_shardings(self) -> tuple[Sharding, ...]:
        return self.compiled.output_shardings

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()


def input_shardings(plan: Plan, num_arguments: int) -> tuple[NamedSharding | None, ...]:
    """Returns for each flat argument where the step takes it, as the user holds it."""
    found: list[NamedSharding | None] = [None] * num_arguments
    for entry in plan.inputs:
        sharding = user_sharding(plan, entry)
        # not all blocks of a stack are used, and further forms come last
        if sharding is not None and found[entry.argument] is None:
            found[entry.argument] = sharding
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PlainBackend:
    """What plain `jax.jit` compiled."""

    compiled: jax.stages.Compiled
    run: Callable[[Sequence[Any]], Sequence[Any]]

    def call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return self.run(leaves)

    def text(self) -> str:
        return self.compiled.as_text() or ""

    def input_shardings(self) -> tuple[Sharding | None, ...]:
        return tuple(jax.tree.leaves(self.compiled.input_shardings, is_leaf=lambda x: x is None))

    def output_shardings(self) -> tuple[Sharding, ...]:
        return tuple(jax.tree.leaves(self.compiled.output_shardings))

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()


@dataclass(frozen=True, slots=True)
class PiecesBackend:
    """One program for each device set of the results (`staging.initial`)."""

    pieces: tuple[tuple[jax.stages.Compiled, tuple[int, ...]], ...]
    shardings: tuple[NamedSharding, ...]
    num_arguments: int

    def call(self, leaves: Sequence[Any]) -> Sequence[Any]:
        results: list[Any] = [None] * len(self.shardings)
        for compiled, group in self.pieces:
            places = jax.tree.leaves(compiled.input_shardings)
            made = compiled(*jax.device_put(list(leaves), places))
            for i, array in zip(group, made, strict=True):
                results[i] = array
        return results

    def text(self) -> str:
        return "\n".join(compiled.as_text() or "" for compiled, _ in self.pieces)

    def input_shardings(self) -> tuple[Sharding | None, ...]:
        return (None,) * self.num_arguments

    def output_shardings(self) -> tuple[Sharding, ...]:
        return self.shardings

    def cost_analysis(self) -> Any:
        return [compiled.cost_analysis() for compiled, _ in self.pieces]

    def memory_analysis(self) -> Any:
        return [compiled.memory_analysis() for compiled, _ in self.pieces]


@dataclass(frozen=True, slots=True)
class CallTypes:
    """The types that a staged function was made for."""

    spec: ArgumentSpec
    in_tree: Any  # of (dynamic args, dynamic kwargs)
    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]

    def leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flattens the arguments of a call and checks them against the types.

        Raises:
            TraceError: Another tree, shape or dtype than the function was compiled for.
        """
        args, kwargs = (args, kwargs) if not self.spec.has_statics else self._dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            raise TraceError(
                message(
                    f"a compiled function was called with arguments of tree `{tree}`, but was "
                    f"compiled for `{self.in_tree}`."
                )
            )
        for name, leaf, aval in zip(self.names, leaves, self.avals, strict=True):
            given = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else plain_aval(leaf)
            same = given.shape == aval.shape and (
                given.dtype == aval.dtype or plain_aval(leaf).dtype == aval.dtype
            )
            if not same:
                raise TraceError(
                    message(
                        f"argument `{name}` is `{given.dtype}{list(given.shape)}`, but the "
                        f"function was compiled for `{aval.dtype}{list(aval.shape)}`.",
                        ways=("call the `mjit` function itself, which compiles again.",),
                    )
                )
        return leaves

    def _dynamic(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As in JAX, static arguments are not given again.
        num_args = jax.tree_util.treedef_children(self.in_tree)[0].num_nodes
        if len(args) <= num_args and not set(kwargs) & self.spec.static_names:
            return args, dict(kwargs)
        dynamic, keywords, _ = split_statics(self.spec, args, kwargs)
        return dynamic, keywords


class Traced:
    """A traced function, ready to be lowered."""

    def __init__(self, traced: TracedFunction, types: CallTypes, lower: Callable[[], "Lowered"]):
        self._traced, self._types, self._lower = traced, types, lower

    @property
    def fun_name(self) -> str:
        """Name of the function."""
        return self._traced.name

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The whole program, before it is cut."""
        return self._traced.jaxpr

    @property
    def in_tree(self) -> Any:
        """Tree of (args, kwargs)."""
        return self._types.in_tree

    @property
    def out_tree(self) -> Any:
        """Tree of the results."""
        return self._traced.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, as a pytree."""
        return out_info(self._traced)

    @property
    def says_where(self) -> bool:
        """Whether something in the program says where it runs: a task, or a place by hand."""
        return findings(self._traced).matched

    def lower(self) -> "Lowered":
        """Cuts the program into tasks and schedules them."""
        return self._lower()

    def explain(self) -> ProgramReport | str:
        """What becomes of the function when it is lowered, to be printed."""
        return self.lower().explain()


def out_info(traced: TracedFunction) -> Any:
    """Returns shapes and dtypes of the results, as a pytree."""
    flat = [result.aval for result in traced.results]
    return jax.tree.unflatten(traced.out_tree, flat)


class Lowered:
    """A function cut into tasks, or one without tasks."""

    def __init__(
        self,
        traced: TracedFunction,
        types: CallTypes,
        partitioned: Partitioned | None,
        otherwise: Callable[[], AbstractBackend] | None,
        why: str = "",
    ):
        """`why` says, of a function that is not partitioned, why it is not."""
        self._traced, self._types = traced, types
        self._partitioned, self._otherwise, self._why = partitioned, otherwise, why

    @functools.cached_property
    def program(self) -> ProgramReport | None:
        """Tasks, reshards and arguments of the program; None where it has no tasks."""
        if self._partitioned is None:
            return None
        return make_report(self._partitioned.traced, self._partitioned)

    @property
    def schedule(self) -> Any:
        """The simulated schedule of the first microbatch loop; None where there is none."""
        schedules = {} if self._partitioned is None else self._partitioned.schedules
        return schedules[min(schedules)] if schedules else None

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, as a pytree."""
        return out_info(self._traced)

    @property
    def in_tree(self) -> Any:
        """Tree of (args, kwargs)."""
        return self._types.in_tree

    @property
    def out_tree(self) -> Any:
        """Tree of the results."""
        return self._traced.out_tree

    def as_text(self) -> str:
        """The program of tasks; without tasks the jaxpr."""
        if self._partitioned is None:
            return str(self._traced.jaxpr)
        return print_program(self._partitioned.program)

    def explain(self) -> ProgramReport | str:
        """What became of the function, to be printed; of plain JAX a text that says why it is."""
        return self._why if self.program is None else self.program

    def compile(self) -> "Compiled":
        """Compiles all tasks."""
        if self._partitioned is None:
            assert self._otherwise is not None
            return Compiled(self, self._otherwise())
        plan = self._partitioned.plan
        compiled = compile_plan(plan, name=self._traced.name, partitioned=self._partitioned)
        return Compiled(self, PlanBackend(plan, compiled, len(self._traced.arguments)))


class Compiled:
    """A compiled function. It takes arguments of the types that it was compiled for, anywhere."""

    def __init__(self, lowered: Lowered, backend: AbstractBackend):
        self._lowered, self._backend = lowered, backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; arguments that lie elsewhere are moved."""
        leaves = self._lowered._types.leaves_of(args, kwargs)
        return jax.tree.unflatten(self.out_tree, self._backend.call(leaves))

    @property
    def backend(self) -> AbstractBackend:
        """What stands behind it."""
        return self._backend

    @property
    def in_tree(self) -> Any:
        """Tree of (args, kwargs)."""
        return self._lowered.in_tree

    @property
    def out_tree(self) -> Any:
        """Tree of the results."""
        return self._lowered.out_tree

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the results, as a pytree."""
        return self._lowered.out_info

    @property
    def program(self) -> ProgramReport | None:
        """Tasks, reshards and arguments of the program; None where it has no tasks."""
        return self._lowered.program

    @property
    def schedule(self) -> Any:
        """The simulated schedule of the first microbatch loop; None where there is none."""
        return self._lowered.schedule

    @property
    def in_avals(self) -> Any:
        """Types of the arguments, as the pytree (args, kwargs)."""
        return jax.tree.unflatten(self.in_tree, self._lowered._types.avals)

    @property
    def input_shardings(self) -> Any:
        """Where the arguments are taken, as the pytree (args, kwargs); None: not used."""
        return jax.tree.unflatten(self.in_tree, self._backend.input_shardings())

    @property
    def output_shardings(self) -> Any:
        """Where the results come out, as a pytree."""
        return jax.tree.unflatten(self.out_tree, self._backend.output_shardings())

    def as_text(self) -> str:
        """The compiled programs of all tasks as text."""
        return self._backend.text()

    def explain(self) -> ProgramReport | str:
        """What became of the function, to be printed; of plain JAX a text that says why it is."""
        return self._lowered.explain()

    def cost_analysis(self) -> Any:
        """XLA's estimates for one call; of each task on one device, summed over its runs."""
        return self._backend.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's memory sizes, summed over the distinct programs."""
        return self._backend.memory_analysis()
