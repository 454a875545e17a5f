"""Minimum cuts of small directed graphs (Dinic's algorithm), for `assign.glue`.

    graph = FlowGraph()                      node 0 is the source, node 1 the sink
    a = graph.add_node()
    graph.add_edge(SOURCE, a, 5)             cutting source -> a costs 5, a -> sink 3
    graph.add_edge(a, SINK, 3)
    graph.source_side()                      {SOURCE, a}: the edge to the sink is cut

Reference: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
estimation", Soviet Math. Doklady 11 (1970).
"""

from collections import deque

SOURCE: int = 0
SINK: int = 1


class FlowGraph:
    """A graph of numbered nodes whose edges have integer capacities; `None` is unbounded."""

    def __init__(self) -> None:
        self._edges_of: list[list[int]] = [[], []]  # per node, numbers of edges that leave it
        self._head: list[int] = []  # edge n and its reverse n ^ 1 stand side by side
        self._left: list[int] = []
        self._total = 1

    def add_node(self) -> int:
        """Returns a new node."""
        self._edges_of.append([])
        return len(self._edges_of) - 1

    def add_edge(self, tail: int, head: int, capacity: int | None) -> None:
        """Adds an edge; without a capacity it is never cut."""
        if capacity is not None:
            self._total += capacity
        for start, end, left in ((tail, head, capacity), (head, tail, 0)):
            self._edges_of[start].append(len(self._head))
            self._head.append(end)
            self._left.append(-1 if left is None else left)

    def source_side(self) -> frozenset[int]:
        """The nodes on the source's side of a minimum cut, as few as possible."""
        unbounded = self._total  # more than any cut of bounded edges
        self._left = [unbounded if left < 0 else left for left in self._left]
        while True:
            level = self._levels()
            if level[SINK] < 0:
                return frozenset(node for node, depth in enumerate(level) if depth >= 0)
            self._block(level)

    def _levels(self) -> list[int]:
        """Distance of each node from the source along edges with room left; -1: none."""
        level = [-1] * len(self._edges_of)
        level[SOURCE] = 0
        todo = deque((SOURCE,))
        while todo:
            node = todo.popleft()
            for edge in self._edges_of[node]:
                head = self._head[edge]
                if self._left[edge] and level[head] < 0:
                    level[head] = level[node] + 1
                    todo.append(head)
        return level

    def _block(self, level: list[int]) -> None:
        """Sends flow along shortest paths until each of them has a full edge."""
        tried = [0] * len(level)  # per node, its edges that lead nowhere any more
        path: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                room = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= room
                    self._left[edge ^ 1] += room
                path, node = [], SOURCE
                continue
            edges = self._edges_of[node]
            while tried[node] < len(edges) and not self._leads_on(edges[tried[node]], node, level):
                tried[node] += 1
            if tried[node] < len(edges):
                path.append(edges[tried[node]])
                node = self._head[path[-1]]
            elif path:
                node = self._head[path.pop() ^ 1]
                tried[node] += 1
            else:
                return

    def _leads_on(self, edge: int, node: int, level: list[int]) -> bool:
        return self._left[edge] > 0 and level[self._head[edge]] == level[node] + 1
