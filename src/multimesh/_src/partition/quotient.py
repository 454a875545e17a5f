"""A directed acyclic graph that grows: nodes and who must run before whom."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Quotient:
    """Nodes are numbered from 0. Per node, the set of nodes that it must run before, as bits."""

    ahead: list[int] = field(default_factory=list)

    def add(self) -> int:
        """Returns a new node."""
        self.ahead.append(0)
        return len(self.ahead) - 1

    def reaches(self, node: int, other: int) -> bool:
        """Whether `node` must run before `other`."""
        return bool(self.ahead[node] >> other & 1)

    def may_merge(self, node: int, other: int) -> bool:
        """Whether the two may be one: no third node has to run between them."""

        def between(first: int, last: int) -> bool:
            return any(
                self.ahead[first] >> middle & 1 and ahead >> last & 1
                for middle, ahead in enumerate(self.ahead)
            )

        return not between(node, other) and not between(other, node)

    def merge(self, node: int, other: int) -> None:
        """Makes `other` part of `node`; the caller has checked that they may be one."""
        both = 1 << node | 1 << other
        after = (self.ahead[node] | self.ahead[other]) & ~both
        for index, ahead in enumerate(self.ahead):
            if ahead & both:
                self.ahead[index] = (ahead | after | 1 << node) & ~(1 << other)
        self.ahead[node] = after
        self.ahead[other] = 0

    def connect(self, node: int, user: int) -> None:
        """Says that `node` runs before `user`; the caller has checked that this is no cycle."""
        if node == user or self.reaches(node, user):
            return
        new = self.ahead[user] | 1 << user
        self.ahead[node] |= new
        for index, ahead in enumerate(self.ahead):
            if ahead >> node & 1:
                self.ahead[index] |= new
