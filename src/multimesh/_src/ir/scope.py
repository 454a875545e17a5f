"""Scopes: where in the user's program an equation stands (R2)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an equation stands.

    `path` holds the names, outermost first; `transposes` counts the transpositions around it;
    `markers` are our own scopes (`multimesh:<kind>:<id>`), outermost first.
    """

    path: tuple[str, ...] = ()
    transposes: int = 0
    markers: tuple[str, ...] = ()
    # A wrapper stands before the first name: when joined, a repetition may begin there.
    wrapped: bool = field(default=False, compare=False, repr=False)

    @property
    def backprop(self) -> bool:
        """Whether the equation belongs to a backward pass."""
        return self.transposes > 0

    def join(self, inner: "Scope") -> "Scope":
        """Returns the scope of an equation with scope `inner` inside an equation of this scope."""
        if inner == _EMPTY:
            return self
        repeated = repetition(self.path, inner.path) if inner.wrapped else 0
        return Scope(
            path=self.path + inner.path[repeated:],
            transposes=self.transposes + inner.transposes,
            markers=tuple(dict.fromkeys(self.markers + inner.markers)),
            wrapped=self.wrapped or (inner.wrapped and not self.path),
        )

    def __str__(self) -> str:
        return "/".join(self.path)


_EMPTY = Scope()


def repetition(before: tuple[str, ...], after: tuple[str, ...]) -> int:
    """Returns the length of the longest end of `before` that `after` begins with."""
    longest = min(len(before), len(after))
    return next((n for n in range(longest, 0, -1) if before[-n:] == after[:n]), 0)
