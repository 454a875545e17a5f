"""Slow and simple second opinions on schedules, and strategies that draw schedules and graphs."""

import itertools

from hypothesis import strategies as st

from multimesh._src.schedule.actions import Kind, actions_of
from multimesh._src.schedule.built_in import BUILT_IN
from multimesh._src.schedule.graph import Edge, OutsideTask, Part, StageGraph
from multimesh._src.schedule.rule import Shape


def instances(entry, graph):
    """The (node, microbatch) that an entry of a row runs; unknown ones are None."""
    found = []
    for action in actions_of(entry):
        nodes = [Part(action.kind, action.stage)]
        if action.kind is Kind.BW and nodes[0] not in graph.nodes:
            nodes = [Part(Kind.B, action.stage), Part(Kind.W, action.stage)]
        known = [(node, action.microbatch) for node in nodes if node in graph.nodes]
        found += known or [None]
    return found


def is_legal(rows, graph, num_microbatches):
    """Whether rows run every action once, on its rank, and can be run to the end."""
    wanted = {
        (node, i): graph.placement[node.stage]
        for node in graph.nodes
        if isinstance(node, Part)
        for i in range(num_microbatches)
    }
    ran = [
        (inst, rank) for rank, row in enumerate(rows) for e in row for inst in instances(e, graph)
    ]
    if None in [inst for inst, _ in ran] or len(ran) != len(set(ran)) or dict(ran) != wanted:
        return False
    return len(rows) == graph.num_ranks and runs_to_end(rows, graph, num_microbatches)


def runs_to_end(rows, graph, num_microbatches):
    """Tries every rank again and again until nothing moves."""
    done = set()
    position = [0] * len(rows)
    outside = {(task, i) for task in graph.outside for i in range(num_microbatches)}
    moved = True
    while moved:
        moved = False
        for task in [one for one in outside if ready([one], graph, done)]:
            outside.remove(task)
            done.add(task)
            moved = True
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                entry = row[position[rank]]
                parts = [list(instances(a, graph)) for a in actions_of(entry)]
                if not all(ready(part, graph, done) for part in parts):
                    break
                done.update(inst for part in parts for inst in part)
                position[rank] += 1
                moved = True
    return not outside and all(at == len(row) for at, row in zip(position, rows, strict=True))


def ready(together, graph, done):
    """Whether all that these instances need, but for each other, has run."""
    return all(
        i < edge.distance
        or (edge.source, i - edge.distance) in done
        or (edge.distance == 0 and (edge.source, i) in together)
        for node, i in together
        for edge in graph.edges
        if edge.target == node
    )


def end_times(rows, graph, cost, latency):
    """The end of every entry as the longest path to it; no tasks outside the ranks.

    `cost` is from an entry to its run time. Returns {(rank, position): end}.
    """
    place = {
        inst: (rank, k)
        for rank, row in enumerate(rows)
        for k, entry in enumerate(row)
        for inst in instances(entry, graph)
    }
    ends = {}

    def end(rank, k):
        if (rank, k) in ends:
            return ends[rank, k]
        entry = rows[rank][k]
        start = end(rank, k - 1) if k else 0.0
        for node, i in instances(entry, graph):
            for edge in graph.edges:
                if edge.target == node and i >= edge.distance:
                    source = place[edge.source, i - edge.distance]
                    if source != (rank, k):
                        start = max(start, end(*source) + (latency if edge.crosses else 0.0))
        ends[rank, k] = start + cost(entry)
        return ends[rank, k]

    for rank, row in enumerate(rows):
        for k in range(len(row)):
            end(rank, k)
    return ends


@st.composite
def built_in_schedules(draw, max_ranks=4, max_microbatches=8):
    """A built-in schedule of a size that it can do."""
    rule = draw(st.sampled_from(BUILT_IN))
    chunks = {"one": 1, "v": 2, "any": draw(st.integers(1, 3))}[rule.chunks]
    ranks = draw(st.integers(1, max_ranks))
    sizes = [
        m for m in range(1, max_microbatches + 1) if not rule.objection(Shape(ranks, m, chunks))
    ]
    if not sizes:
        ranks, sizes = 1, [max_microbatches]
    return rule(num_ranks=ranks, num_microbatches=draw(st.sampled_from(sizes)), num_chunks=chunks)


@st.composite
def stage_graphs(draw, placement=None):
    """A stage graph with skips, stages that lack kinds, towers and ordered carries."""
    if placement is None:
        ranks = draw(st.integers(1, 3))
        more = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
        placement = (*range(ranks), *more)
    num_ranks = max(placement) + 1
    nodes, edges = [], []
    forms = [draw(st.sampled_from(("F", "BW", "B", "W", "lonely"))) for _ in placement]
    kinds = {
        "F": (Kind.F,),
        "BW": (Kind.F, Kind.BW),
        "B": (Kind.F, Kind.B, Kind.W),
        "W": (Kind.F, Kind.W),
        "lonely": (Kind.B,),
    }
    for stage, form in enumerate(forms):
        nodes += [Part(kind, stage) for kind in kinds[form]]
    chance = st.integers(0, 2)

    def connect(source, target, distance=0):
        if source in nodes and target in nodes:
            crosses = placement[source.stage] != placement[target.stage]
            edges.append(Edge(source, target, crosses, distance))

    for low in range(len(placement)):
        here = [node for node in nodes if node.stage == low]
        edges += [Edge(a, b) for a, b in itertools.pairwise(here)]
        if draw(chance) == 0:
            connect(Part(Kind.F, low), Part(Kind.F, low), distance=1)
        for high in range(low + 1, len(placement)):
            if high == low + 1 or draw(chance) == 0:
                connect(Part(Kind.F, low), Part(Kind.F, high))
                for first in (Kind.B, Kind.BW):
                    for second in (Kind.B, Kind.BW):
                        connect(Part(first, high), Part(second, low))
    for number in range(draw(st.integers(0, 2))):
        occupies = tuple(r for r in range(num_ranks) if draw(chance) == 0)
        task = OutsideTask(f"tower{number}", num_ranks + number, occupies)
        forwards = [node for node in nodes if isinstance(node, Part) and node.kind is Kind.F]
        if forwards:
            after = draw(st.integers(0, len(forwards)))
            edges += [Edge(node, task, True) for node in forwards[:after][-1:]]
            edges += [Edge(task, node, True) for node in forwards[after:][:1]]
        nodes.append(task)
    return StageGraph(placement, tuple(nodes), tuple(edges), num_ranks)
