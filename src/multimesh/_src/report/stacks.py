"""The table of stacks: who keeps which layers of a stacked parameter, and what moves in a call."""

from collections.abc import Sequence

from multimesh._src.partition.stacks.facts import StackFacts
from multimesh._src.report.tables import Table, amount

_NOTE = (
    "rows: dim 0 of one array, kept by the submeshes that read them. Rows that another submesh "
    "reads move once a call, and their gradients move back: "
)
_WAYS = {
    True: "let one submesh after the other have its layers (`interleave=1`, as many for each), or "
    "keep one array for each layer.",
    False: "choose a number of layers that divides, or keep one array for each layer.",
}


def stacks_table(stacks: Sequence[StackFacts]) -> Table:
    """Returns the table; a note says what to do about rows that move."""
    rows = tuple(
        (
            stack.name,
            tuple(f"{_rows(range(a, b))} {label}" for a, b, label in stack.homes),
            tuple(f"{_rows(r)} {home} -> {user}" for home, user, r in stack.moved) or "-",
            amount(stack.moved_bytes, "B"),
            stack.why or "-",
        )
        for stack in stacks
    )
    columns = ("stack", "rows live on", "rows that move", ">bytes", "why together")
    moving = [stack for stack in stacks if stack.moved]
    note = _NOTE + _WAYS[all(not stack.why for stack in moving)] if moving else ""
    return Table("Stacks", columns, rows, note=note)


def _rows(rows: Sequence[int]) -> str:
    """Rows as `0-3`, `2-3,6-7`."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and row == parts[-1][1] + 1:
            parts[-1][1] = row
        else:
            parts.append([row, row])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
