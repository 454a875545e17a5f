"""What to change: the largest reasons why submeshes wait, one sentence each."""

from collections.abc import Iterator, Sequence

from multimesh._src.report.tables import duration
from multimesh._src.report.timeline.calls import Call, SubmeshTimes, TaskTimes
from multimesh._src.report.timeline.comparison import Comparison

_WORTH_A_WORD = 0.05  # share of the loop or call below which nothing is said
_CONTENTION = 1.5  # times longer than alone
_HOST_WAYS = "Give each run more to do: larger or fewer microbatches, fewer and larger tasks."
_MAX_TRIED = 4096  # ranks times microbatches up to which other schedules are simulated


def advise(
    call: Call,
    tasks: Sequence[TaskTimes],
    submeshes: Sequence[SubmeshTimes],
    comparisons: Sequence[Comparison],
) -> tuple[str, ...]:
    """Returns sentences, the most important first."""
    found = [*_contention(tasks)]
    for comparison in comparisons:
        found += _loop(comparison, _waits_for_host(call, submeshes))
    found += _outside(call, comparisons)
    if not comparisons and _waits_for_host(call, submeshes):
        found.append(f"Submeshes wait for the host. {_HOST_WAYS}")
    return tuple(found) or ("Nothing stands out.",)


def _contention(tasks: Sequence[TaskTimes]) -> Iterator[str]:
    known = [task for task in tasks if task.alone and not task.info.is_copy]
    together = sum(task.total for task in known)
    alone = sum(task.alone * task.num_runs for task in known)
    if alone and together > _CONTENTION * alone:
        yield (
            f"Runs take {together / alone:.1f} times as long as alone: submeshes share processors "
            "or memory, as CPU devices do. Judge a schedule by `costs(alone=True)`."
        )


def _waits_for_host(call: Call, submeshes: Sequence[SubmeshTimes]) -> bool:
    waits = max((s.waits.host for s in submeshes), default=0.0)
    return waits > _WORTH_A_WORD * call.duration


def _loop(comparison: Comparison, waits_for_host: bool) -> Iterator[str]:
    parts = sorted(comparison.parts[1:], key=lambda part: -part[1])
    for name, seconds in parts:
        if seconds < _WORTH_A_WORD * comparison.measured:
            continue
        amount = f"{duration(seconds)}, {seconds / comparison.measured:.0%} of the loop"
        if name == "uneven stages":
            yield _uneven(comparison, amount)
        elif name == "copies":
            yield _copies(comparison, amount)
        elif name.startswith("bubble"):
            yield _bubble(comparison, amount)
        elif waits_for_host:
            yield f"{amount}, go to the host and to runs that vary. {_HOST_WAYS}"
        else:
            yield (
                f"{amount}, are lost because runs of one task take unequal times: compare `a run` "
                "and `longest`; other programs on the same machine do this."
            )


def _bubble(comparison: Comparison, amount: str) -> str:
    simulation = comparison.simulation
    told = f"{amount}, are the schedule's bubble: more microbatches make it smaller"
    if simulation.graph.num_ranks * simulation.schedule.num_microbatches > _MAX_TRIED:
        return f"{told}."
    best = comparison.best()
    if best is None or best.simulation.makespan > 0.97 * simulation.makespan:
        return f"{told}; no other schedule for these stages does."
    name, makespan = best.schedule.name, duration(best.simulation.makespan)
    return (
        f"{told}, or, if its memory fits, `schedule={name!r}`: {makespan} by simulation in place "
        f"of {duration(simulation.makespan)}."
    )


def _uneven(comparison: Comparison, amount: str) -> str:
    simulation = comparison.uneven_stages
    busy = simulation.busy[: simulation.graph.num_ranks]
    most, least = max(busy), min(busy)
    labels = [simulation.graph.label(busy.index(seconds)) for seconds in (most, least)]
    return (
        f"{amount}, go to uneven stages: `{labels[0]}` works {duration(most)}, `{labels[1]}` "
        f"{duration(least)}. Move layers: `register_layers(layers_per_stage=)`."
    )


def _copies(comparison: Comparison, amount: str) -> str:
    source, target = max(comparison.latency, key=comparison.latency.__getitem__)
    return (
        f"{amount}, go to copies, {duration(comparison.latency[source, target])} from "
        f"`{source}` to `{target}`: `explain()` lists what crosses; `schedule='eager-1f1b'` runs "
        "ahead of slow links."
    )


def _outside(call: Call, comparisons: Sequence[Comparison]) -> Iterator[str]:
    inside = sum(comparison.measured for comparison in comparisons)
    outside = call.duration - inside
    if comparisons and outside > 4 * _WORTH_A_WORD * call.duration:
        yield (
            f"{duration(outside)} of {duration(call.duration)} pass outside of the loop: before "
            "the first microbatch, and in what follows the last one."
        )
