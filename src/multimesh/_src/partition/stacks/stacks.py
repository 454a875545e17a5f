"""The pass: families of stacks are found, given blocks, and the program is rewritten on them.

    step(w: f32[4,8,8], x) -> w'      ->      step(w[0:2], w[2:4], x) -> w'[0:2], w'[2:4]

Which rows lie where is decided before anything else is placed, by the tasks that read them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from jax.sharding import Mesh, NamedSharding

from multimesh._src.frontend.tracing import Argument, Result, TracedFunction
from multimesh._src.ir.flat import FlatProgram, Lit, Loop, Operand, Var, all_equations
from multimesh._src.ir.plan import Block
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.given import is_global, placed_arguments
from multimesh._src.partition.inline import Builder, last_serial
from multimesh._src.partition.seeds import Seeds, find_seeds
from multimesh._src.partition.stacks.blocks import Blocks, choose_blocks, fine_bounds, slice_of
from multimesh._src.partition.stacks.boundary import (
    number_parts,
    plan_blocks,
    split_argument,
    split_result,
)
from multimesh._src.partition.stacks.facts import StackFacts, facts_of
from multimesh._src.partition.stacks.find import Families, find_families
from multimesh._src.partition.stacks.parts import PartMaker, Rows
from multimesh._src.partition.stacks.split import StackSplitter


@dataclass(frozen=True, slots=True)
class Stacks:
    """A program on blocks, and the function as if the caller had passed blocks.

    Attributes:
        program: The flat program.
        traced: The function, with an argument and a result for each block.
        batches: How batches are stored, by position.
        pinned: Submesh of the equations that must run there, by serial.
        light: Serials of equations that tasks may clone.
        placed: Submesh of the arguments that are blocks.
        arguments: For each argument which block it is, if it is one.
        results: The same for results.
        facts: What is to be said of the arguments whose rows are read.
    """

    program: FlatProgram
    traced: TracedFunction
    batches: Mapping[int, Batch]
    pinned: Mapping[int, int]
    light: frozenset[int]
    placed: Mapping[Var, int]
    arguments: tuple[Block | None, ...]
    results: tuple[Block | None, ...]
    facts: tuple[StackFacts, ...] = ()


def split_stacks(
    program: FlatProgram, traced: TracedFunction, seeds: Seeds, batches: Mapping[int, Batch]
) -> Stacks:
    """Splits the stacks among the arguments into blocks.

    Args:
        program: The flat program, its loops simplified.
        traced: The function.
        seeds: Numbers the submeshes.
        batches: How batches are stored, by position; they are no stacks.
    """
    none = (None,) * len(traced.arguments), (None,) * len(traced.results)
    same = Stacks(program, traced, batches, {}, frozenset(), {}, *none)
    candidates = _candidates(program, traced, batches)
    if not candidates and not any(isinstance(step, Loop) for step in program.steps):
        return same
    seeded = find_seeds(program, seeds)[1]
    placed_arguments(program, traced, seeds)  # numbers their submeshes
    alike = _successors(program, traced)
    families = find_families(program, frozenset(candidates), alike, seeded, _small(traced))
    blocks = _blocks_of_families(families, candidates, traced, seeds)
    if not blocks:
        return same
    return _Split(program, traced, seeds, batches, families, blocks).run()


def _small(traced: TracedFunction) -> int:
    """Arrays of at most so many elements live wherever they are used (R7)."""
    return max(1, traced.settings.replicate_parameters_smaller_than_num_elements)


def _successors(program: FlatProgram, traced: TracedFunction) -> list[tuple[Var, Var]]:
    """Arguments, and the results that take their place."""
    pairs: list[tuple[Var, Var]] = []
    for operand, result in zip(program.results, traced.results, strict=True):
        if result.successor_of is not None and not isinstance(operand, Lit):
            argument = program.arguments[result.successor_of]
            if program.avals[argument].shape == program.avals[operand].shape:
                pairs.append((argument, operand))
    return pairs


def _candidates(
    program: FlatProgram, traced: TracedFunction, batches: Mapping[int, Batch]
) -> dict[Var, str]:
    """The arguments that may be stacks, and the axis over which the first dim lies, or ""."""
    small = _small(traced)
    reads = any(equation.primitive == "slice" for equation in all_equations(program.steps))
    found: dict[Var, str] = {}
    for position, (var, argument) in enumerate(
        zip(program.arguments, traced.arguments, strict=True)
    ):
        if position in batches or argument.aval.ndim == 0 or argument.aval.size <= small:
            continue
        axis = _axis_of(argument, traced)
        if axis or reads:
            found[var] = axis
    return found


def _axis_of(argument: Argument, traced: TracedFunction) -> str:
    placement, whole = argument.placement, traced.global_mesh
    if placement is None or whole is None or not len(placement.spec):
        return ""
    if not isinstance(placement.mesh, Mesh) or not is_global(placement.mesh, traced):
        return ""
    first = placement.spec[0]
    axis = first[0] if isinstance(first, tuple) and first else first
    return axis if isinstance(axis, str) and whole.shape.get(axis, 1) > 1 else ""


def _blocks_of_families(
    families: Families, candidates: Mapping[Var, str], traced: TracedFunction, seeds: Seeds
) -> dict[int, Blocks]:
    """The blocks of the families that are split, or whose rows are cut where they lie."""
    whole = traced.global_mesh
    slices = (slice_of(submesh.mesh, whole) for submesh in seeds.submeshes if not submesh.rotation)
    sliced = {place[0] for place in slices if place is not None}
    blocks: dict[int, Blocks] = {}
    for number, family in families.families.items():
        axes = {candidates.get(var, "") for var in family.arguments} & sliced
        axis = next(iter(axes)) if len(axes) == 1 else ""
        chosen = choose_blocks(family, seeds, whole, axis)
        if chosen is not None:
            blocks[number] = chosen
    return blocks


@dataclass(frozen=True, slots=True)
class _Split:
    """One run of the pass."""

    program: FlatProgram
    traced: TracedFunction
    seeds: Seeds
    batches: Mapping[int, Batch]
    families: Families
    blocks: Mapping[int, Blocks]

    def run(self) -> Stacks:
        program, traced = self.program, self.traced
        splitter = self._splitter()
        own = [
            None if position in self.batches else self._blocks_of(var, argument.aval.size)
            for position, (var, argument) in enumerate(self._arguments())
        ]
        parts = number_parts(own)
        arguments: list[Var] = []
        placed: dict[Var, int] = {}
        for (var, _), blocks in zip(self._arguments(), own, strict=True):
            arguments += self._argument(var, blocks, splitter, placed)
        splitter.steps(program.steps)
        wanted = [self._blocks_of_result(v, r) for v, r in self._results()]
        results: list[Operand] = []
        for (operand, _), blocks in zip(self._results(), wanted, strict=True):
            if blocks is None or isinstance(operand, Lit):
                results.append(splitter.value(operand))
            else:
                results += splitter.in_blocks(operand)
        submeshes = self.seeds.submeshes
        return Stacks(
            program=replace(
                program,
                avals=splitter.maker.builder.avals,
                arguments=tuple(arguments),
                constants=splitter.maker.builder.constants,
                steps=tuple(splitter.maker.builder.steps),
                results=tuple(results),
            ),
            traced=replace(
                traced,
                arguments=tuple(
                    new
                    for (_, argument), blocks in zip(self._arguments(), own, strict=True)
                    for new in split_argument(argument, blocks, submeshes)
                ),
                results=tuple(
                    new
                    for (_, result), blocks in zip(self._results(), wanted, strict=True)
                    for new in split_result(result, blocks, parts)
                ),
            ),
            batches={parts[position].first: batch for position, batch in self.batches.items()},
            pinned=splitter.maker.pinned,
            light=frozenset(splitter.maker.light),
            placed=placed,
            arguments=plan_blocks(parts),
            results=plan_blocks(number_parts(wanted)),
            facts=tuple(self._facts()),
        )

    def _arguments(self) -> list[tuple[Var, Argument]]:
        return list(zip(self.program.arguments, self.traced.arguments, strict=True))

    def _results(self) -> list[tuple[Operand, Result]]:
        return list(zip(self.program.results, self.traced.results, strict=True))

    def _facts(self) -> Iterator[StackFacts]:
        """What is to be said of each argument whose rows are read."""
        for var, argument in self._arguments():
            number = self.families.of.get(var, -1)
            if number not in self.blocks or not self.blocks[number].submeshes:
                continue
            aval, family = argument.aval, self.families.families[number]
            row = aval.size // aval.shape[0] * aval.dtype.itemsize
            reads = [read for read in family.reads if read.origin == var]
            if reads:
                yield facts_of(argument.name, row, reads, self.blocks[number], self.seeds)

    def _splitter(self) -> StackSplitter:
        blocks = {v: self.blocks[f] for v, f in self.families.of.items() if f in self.blocks}
        fine = {
            number: fine_bounds(self.families.families[number], own, self.program.avals)
            for number, own in self.blocks.items()
        }
        builder = Builder(
            self.seeds,
            avals=dict(self.program.avals),
            constants=dict(self.program.constants),
            num_steps=last_serial(self.program.steps) + 1,
        )
        reads = (read for family in self.families.families.values() for read in family.reads)
        return StackSplitter(
            maker=PartMaker(builder),
            blocks=blocks,
            fine={v: fine[f] for v, f in self.families.of.items() if f in fine},
            users={read.equation.serial: read.users for read in reads},
        )

    def _argument(
        self, var: Var, blocks: Blocks | None, splitter: StackSplitter, placed: dict[Var, int]
    ) -> list[Var]:
        """The variables for an argument's blocks."""
        if var not in splitter.blocks:
            return [var]
        if blocks is None:
            one = splitter.blocks[var]
            if not one.are_several:
                splitter.env[var] = Rows(one.bounds, (var,), False)
                placed.update((var, submesh) for submesh in one.submeshes)
            return [var]
        aval = self.program.avals[var]
        ends = pairwise(blocks.bounds)
        new = [
            splitter.maker.builder.new(aval.update(shape=(stop - start, *aval.shape[1:])))
            for start, stop in ends
        ]
        splitter.env[var] = Rows(blocks.bounds, tuple(new), False)
        placed.update(zip(new, blocks.submeshes, strict=True))
        return new

    def _blocks_of(self, operand: Operand, size: int) -> Blocks | None:
        """The blocks in which an argument or a result is kept; small ones stay whole (R7)."""
        if isinstance(operand, Lit) or size <= _small(self.traced):
            return None
        blocks = self.blocks.get(self.families.of.get(operand, -1))
        return blocks if blocks is not None and blocks.are_several else None

    def _blocks_of_result(self, operand: Operand, result: Result) -> Blocks | None:
        """A result that is wanted on one submesh is put together there."""
        sharding = result.sharding
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and not is_global(mesh, self.traced):
            return None
        return self._blocks_of(operand, result.aval.size)
