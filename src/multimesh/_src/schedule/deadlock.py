"""Why a schedule does not run to its end.

Stages that are numbered against the dataflow, actions out of order, or ranks that wait in a circle.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from multimesh._src.errors import MAX_PROBLEMS, listed, message
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.engine import Trace
from multimesh._src.schedule.expand import Expanded
from multimesh._src.schedule.graph import OutsideTask, Part
from multimesh._src.schedule.window import window

_ROWS = "let every action stand after all that it needs, in the rows of all ranks"
_MADE = (
    "use `multimesh.jax.schedules.before(lambda a, b: False)`, which orders the actions by what "
    "they need"
)
_NUMBERS = (
    "number the stages in the order of the forward pass (`Task(stage=)`)",
    "leave `Task.stage` out: the stages are then found in that order",
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an instance stands: row, position (-1 outside the ranks) and part of a pair."""

    row: int
    position: int
    part: int = 0


def explain_deadlock(expanded: Expanded, trace: Trace) -> str:
    """The error of a schedule that got stuck, given how far it came."""
    return _Explainer(expanded, trace).explain()


class _Explainer:
    def __init__(self, expanded: Expanded, trace: Trace) -> None:
        self.expanded = expanded
        self.graph = expanded.graph
        self.trace = trace
        self.m = expanded.num_microbatches
        self.places = _places(expanded)
        # Per node what it needs: (source node, distance); and all it needs of its own microbatch.
        self.needs: list[list[tuple[int, int]]] = [[] for _ in self.graph.nodes]
        for edge in self.graph.edges:
            source, target = self.graph.index[edge.source], self.graph.index[edge.target]
            self.needs[target].append((source, edge.distance))
        self.above: dict[int, frozenset[int]] = {}

    def explain(self) -> str:
        name = self.expanded.schedule.name
        by_hand = name == "custom"
        turned = [] if by_hand else list(self.turned())
        if turned:
            what = "wants stages that are numbered in the order of the forward pass, but"
            return message(f"Schedule `{name}` {what}\n{listed(turned)}", ways=_NUMBERS)
        swapped = list(self.swapped())
        if swapped:
            lines, first = [text for text, _ in swapped], swapped[0][1]
            what = listed(lines)
        else:
            lines, first = self.circle()
            what = "\n".join(["The schedule deadlocks:", *lines])
        grid = window(self.expanded.schedule, self.graph, first.row, first.position)
        return message(what, window=grid, ways=[_ROWS if by_hand else _MADE])

    def turned(self) -> Iterator[str]:
        """Stages that feed one of a lower number: of a higher one where values flow backward."""
        for node, target in enumerate(self.graph.nodes):
            for source in self.parts_above(node):
                if not isinstance(target, Part) or source.kind is not target.kind:
                    continue
                first, last = source.stage, target.stage
                if first < last if target.kind is not Kind.F else first > last:
                    backward = "" if target.kind is Kind.F else " in the backward pass"
                    yield f"  {self.stage(first)} feeds {self.stage(last)}{backward}"

    def stage(self, number: int) -> str:
        return f"stage `{number}` (on {self.graph.label(self.graph.placement[number])})"

    def parts_above(self, node: int) -> list[Part]:
        """The actions of the same microbatch that a node needs directly or by outside tasks."""
        found: list[Part] = []
        seen: set[int] = set()
        todo = [node]
        while todo:
            direct = {n for n, distance in self.needs[todo.pop()] if distance == 0} - seen
            seen |= direct
            for number in sorted(direct):
                source = self.graph.nodes[number]
                if isinstance(source, Part):
                    found.append(source)
                else:
                    todo.append(number)
        return found

    def swapped(self) -> Iterator[tuple[str, _Place]]:
        """Actions that stand before something of their own row that they need, over any path."""
        ran, places = self.trace.ran, self.places
        stuck = [n for n, event in enumerate(ran) if event < 0 and places[n].position >= 0]
        count = 0
        for instance in sorted(stuck, key=lambda n: (places[n].position, places[n].row, n)):
            here = places[instance]
            for need in self.needs_in_row(instance, here.row):
                there = places[need]
                if there.position < here.position or there == here:
                    continue
                count += 1
                yield self.swap_text(instance, need), here
            if count > MAX_PROBLEMS:
                return

    def needs_in_row(self, instance: int, row: int) -> list[int]:
        """What it needs of a row: of its own microbatch over any path, of others directly."""
        node, i = divmod(instance, self.m)
        found = [n * self.m + i for n in sorted(self.all_above(node))]
        found += [n * self.m + i - d for n, d in self.needs[node] if 0 < d <= i]
        return [n for n in found if self.places[n].row == row and self.trace.ran[n] < 0]

    def all_above(self, node: int) -> frozenset[int]:
        """All nodes of the same microbatch that a node needs, directly or through others."""
        if node not in self.above:
            seen: set[int] = set()
            todo = [node]
            while todo:
                direct = [n for n, distance in self.needs[todo.pop()] if distance == 0]
                todo += [n for n in direct if n not in seen]
                seen.update(direct)
            self.above[node] = frozenset(seen)
        return self.above[node]

    def swap_text(self, instance: int, need: int) -> str:
        first, second = self.text(instance), self.text(need)
        here = self.places[instance]
        if here.position == self.places[need].position:
            entry = self.expanded.schedule.rows[here.row][here.position]
            return f"{first} needs {second}, so the pair `{entry}` cannot overlap them."
        return f"{first} runs before {second} on {self.graph.label(here.row)}, but needs it."

    def circle(self) -> tuple[list[str], _Place]:
        """Follows from a stuck rank what it waits for, until a rank comes again."""
        rows = self.expanded.rows
        rank = next(r for r, row in enumerate(rows) if self.trace.reached[r] < len(row.units))
        lines: dict[int, tuple[str, _Place]] = {}
        while rank not in lines:
            position = self.trace.reached[rank]
            entry = self.expanded.schedule.rows[rank][position]
            need = self.blocker(rank, position)
            there = self.graph.label(self.places[need].row)
            lines[rank] = (
                f"  {self.graph.label(rank)} waits in `{entry}` for {self.text(need)}, "
                f"which stands later on {there}",
                _Place(rank, position),
            )
            rank = self.places[need].row
        circle = list(lines.values())[list(lines).index(rank) :]
        return [text for text, _ in circle], circle[0][1]

    def blocker(self, rank: int, position: int) -> int:
        """The first instance on a rank that an entry waits for, maybe through outside tasks."""
        row = self.expanded.rows[rank]
        parts = [(row.units[position], row.microbatches[position])]
        parts += filter(None, [row.seconds.get(position)])
        todo = [n * self.m + i for unit, i in parts for n in self.expanded.units[unit].nodes]
        seen = set(todo)
        while todo:
            node, i = divmod(todo.pop(0), self.m)
            needs = [n * self.m + i - d for n, d in self.needs[node] if i >= d]
            for need in (n for n in needs if self.trace.ran[n] < 0 and n not in seen):
                if self.places[need].position >= 0:
                    return need
                seen.add(need)
                todo.append(need)
        raise AssertionError(f"entry {position} of rank {rank} waits for nothing")

    def text(self, instance: int) -> str:
        node, i = divmod(instance, self.m)
        found = self.graph.nodes[node]
        return f"`{found}:{i}`" if isinstance(found, OutsideTask) else f"`{found}{i}`"


def _places(expanded: Expanded) -> dict[int, _Place]:
    m = expanded.num_microbatches
    places: dict[int, _Place] = {}
    for rank, row in enumerate(expanded.rows):
        for position, first in enumerate(zip(row.units, row.microbatches, strict=True)):
            parts = (first, *filter(None, [row.seconds.get(position)]))
            for part, (unit, i) in enumerate(parts):
                for node in expanded.units[unit].nodes:
                    places[node * m + i] = _Place(rank, position, part)
    for unit, task in zip(expanded.outside, expanded.graph.outside, strict=True):
        for i in range(m):
            places[expanded.units[unit].nodes[0] * m + i] = _Place(task.row, -1)
    return places
