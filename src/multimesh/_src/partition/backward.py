"""Splits the backward of every stage into B and W, for schedules that run them apart (S3).

    layer1_bwd(dy, y, x, w, acc) -> dx, acc'      B(dy, y, w) -> dx, dz
      dz = dy * (1 - y * y)                  ->     dz = dy * (1 - y * y) ; dx = dz @ w.T
      dx = dz @ w.T ; dw = x.T @ dz               W(dz, x, acc) -> acc'
      acc' = acc + dw                               dw = x.T @ dz ; acc' = acc + dw

B is what the values that leave the stage need, and what the operands of contractions need; W is
the rest, accumulations included. Dataflow alone would leave the first trained stage without a B,
because nothing leaves it: the operands of its weight gradients keep the chain of activation
gradients in B. A remat region is opened first, since its recomputation serves both halves. A stage
whose contractions stand inside another kind of inner program (a scan) keeps its BW whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from multimesh._src.ir.flat import Var
from multimesh._src.ir.program import Kind, TaskNode
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.remat import open_remat

# Programs that are one operation for us: what is inside cannot be split.
_KERNELS = frozenset(("pallas_call", "custom_partitioning", "ffi_call", "shard_map"))
CONTRACTIONS = _KERNELS | frozenset(
    ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
)


@dataclass(slots=True)
class Numbers:
    """Gives new variables and task numbers."""

    avals: dict[Var, Any]
    next_task: int

    def var(self, aval: Any) -> Var:
        """Returns a new variable."""
        var = len(self.avals)
        self.avals[var] = aval
        return var

    def task(self) -> int:
        """Returns a new task number."""
        self.next_task += 1
        return self.next_task - 1


@dataclass(frozen=True, slots=True)
class Split:
    """The tasks of a loop after splitting.

    Attributes:
        tasks: All tasks, in dataflow order.
        whole: Names of backward tasks that could not be split.
    """

    tasks: tuple[TaskNode, ...]
    whole: tuple[str, ...]


def split_backward(tasks: Sequence[TaskNode], numbers: Numbers) -> Split:
    """Splits the backward tasks of a microbatch loop, stage by stage.

    Args:
        tasks: The loop's tasks with their stages, in dataflow order.
        numbers: Where new variables and numbers come from.
    """
    opened = _read_through(
        [replace(t, body=open_remat(t.body)) if t.kind == "BW" else t for t in tasks]
    )
    whole = {task.stage for task in opened if task.kind == "BW" and _hides_contraction(task.body)}
    splitter = _Splitter(numbers, opened, whole)
    splitter.run()
    parts = [part for task in opened for part in splitter.parts.get(task.index, [task])]
    kept = tuple(task.name for task in opened if task.kind == "BW" and task.stage in whole)
    return Split(_in_dataflow_order(parts), kept)


def _hides_contraction(body: ClosedJaxpr) -> bool:
    """Whether a contraction stands inside an inner jaxpr."""
    opaque = (eqn for eqn in body.eqns if eqn.primitive.name not in _KERNELS)
    inner = (j for eqn in opaque for j in jaxprs.sub_jaxprs(eqn.params))
    return any(eqn.primitive.name in CONTRACTIONS for j in inner for eqn in jaxprs.all_eqns(j))


# --- before ---------------------------------------------------------------------------------------


def _read_through(tasks: Sequence[TaskNode]) -> list[TaskNode]:
    """Lets tasks read the inputs that others hand on: a sum alone would be no reason to wait."""
    source: dict[Var, Var] = {}
    found: list[TaskNode] = []
    for task in tasks:
        task = _with_sources(task, source) if source.keys() & set(task.inputs) else task
        inputs = dict(zip(task.body.invars, task.inputs, strict=True))
        for var, atom in zip(task.outputs, task.body.outvars, strict=True):
            if not jaxprs.is_literal(atom) and atom in inputs:
                source[var] = inputs[atom]
        found.append(task)
    return found


def _with_sources(task: TaskNode, source: Mapping[Var, Var]) -> TaskNode:
    body = jaxprs.open_jaxpr(task.body)
    invar_of: dict[Var, Any] = {}
    env: dict[Any, Any] = {}
    for var, invar in zip(task.inputs, body.invars, strict=True):
        env[invar] = invar_of.setdefault(source.get(var, var), invar)
    eqns = jaxprs.fresh_eqns(body.eqns, env)
    outvars = [atom if jaxprs.is_literal(atom) else env[atom] for atom in body.outvars]
    read = jaxprs.new_closed_jaxpr(list(invar_of.values()), outvars, eqns)
    return replace(task, body=read, inputs=tuple(invar_of))


# --- splitting ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Splitter:
    """Splits from the last backward task to the first, so that later needs are known."""

    numbers: Numbers
    tasks: list[TaskNode]
    whole: set[int]
    parts: dict[int, list[TaskNode]] = field(default_factory=dict)

    def run(self) -> None:
        wanted_by_b: set[Var] = set()
        for task in reversed(self.tasks):
            if task.kind != "BW" or task.stage < 0 or task.stage in self.whole:
                wanted_by_b.update(task.inputs)
                continue
            leaving = self._leaving(task) | (wanted_by_b & set(task.outputs))
            parts = self._split(task, leaving)
            self.parts[task.index] = parts
            wanted_by_b.update(v for part in parts if part.kind == "B" for v in part.inputs)

    def _leaving(self, task: TaskNode) -> set[Var]:
        readers = [
            other
            for other in self.tasks
            if other.index != task.index and (other.kind != "BW" or other.stage != task.stage)
        ]
        return {var for other in readers for var in other.inputs} & set(task.outputs)

    def _split(self, task: TaskNode, leaving: set[Var]) -> list[TaskNode]:
        body = jaxprs.open_jaxpr(task.body)
        results = dict(zip(task.outputs, body.outvars, strict=True))
        early, late = _halves(body.eqns, [results[var] for var in leaving])
        if not early or not late:
            kind: Kind = "B" if early else "W"
            return [replace(task, kind=kind)]
        made = {var for eqn in early for var in eqn.outvars}
        reads = [a for eqn in late for a in eqn.invars if not jaxprs.is_literal(a)]
        late_results = [v for v in task.outputs if results[v] not in made]
        crossing = [a for a in dict.fromkeys(reads) if a in made]
        var_of: dict[Any, Var] = dict(zip(body.invars, task.inputs, strict=True))
        for var, atom in results.items():
            if not jaxprs.is_literal(atom):
                var_of.setdefault(atom, var)
        for atom in crossing:
            if atom not in var_of:
                var_of[atom] = self.numbers.var(atom.aval)
        early_results = [v for v in task.outputs if results[v] in made]
        early_atoms = [results[v] for v in early_results]
        extra = [atom for atom in crossing if atom not in early_atoms]
        first = self._part(
            task, "B", early, [*early_results, *(var_of[a] for a in extra)],
            [*early_atoms, *extra], var_of,
        )  # fmt: skip
        second = self._part(
            task, "W", late, late_results, [results[v] for v in late_results], var_of
        )
        return [first, second]

    def _part(
        self,
        task: TaskNode,
        kind: Kind,
        eqns: Sequence[Any],
        outputs: Sequence[Var],
        atoms: Sequence[Any],
        var_of: Mapping[Any, Var],
    ) -> TaskNode:
        made = {var for eqn in eqns for var in eqn.outvars}
        reads = dict.fromkeys(
            atom for eqn in eqns for atom in eqn.invars if not jaxprs.is_literal(atom)
        )
        invars = [atom for atom in reads if atom not in made]
        index = task.index if kind == "B" else self.numbers.task()
        return replace(
            task,
            index=index,
            name=task.name + task.suffixes[kind == "W"],
            kind=kind,
            body=jaxprs.new_closed_jaxpr(invars, atoms, eqns),
            inputs=tuple(var_of[atom] for atom in invars),
            outputs=tuple(outputs),
        )


def _halves(eqns: Sequence[Any], leaving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The equations of B and of W, each in order."""
    needed = {atom for atom in leaving if not jaxprs.is_literal(atom)}
    early: list[Any] = []
    late: list[Any] = []
    for eqn in reversed(eqns):
        is_early = bool(eqn.effects) or any(var in needed for var in eqn.outvars)
        (early if is_early else late).append(eqn)
        if is_early or eqn.primitive.name in CONTRACTIONS:
            needed.update(atom for atom in eqn.invars if not jaxprs.is_literal(atom))
    return early[::-1], late[::-1]


def _in_dataflow_order(tasks: Sequence[TaskNode]) -> tuple[TaskNode, ...]:
    """F and B tasks as they were, every W as soon as what it reads is made."""
    maker = {var: task.index for task in tasks for var in task.outputs}
    done = {-1}  # stands for what no task makes
    ordered: list[TaskNode] = []
    waiting = list(tasks)
    while waiting:
        task = next(t for t in waiting if all(maker.get(v, -1) in done for v in t.inputs))
        waiting.remove(task)
        done.add(task.index)
        ordered.append(task)
    return tuple(ordered)
