"""The built-in schedules by name, and the one that a program gets if it names none."""

from collections.abc import Mapping
from dataclasses import dataclass

from multimesh._src.schedule.before import Before
from multimesh._src.schedule.dualpipe_v import dualpipe_v
from multimesh._src.schedule.gpipe import gpipe
from multimesh._src.schedule.interleaved import interleaved_1f1b
from multimesh._src.schedule.looped_bfs import looped_bfs
from multimesh._src.schedule.one_f_one_b import eager_1f1b, one_f_one_b
from multimesh._src.schedule.placement import looped, v_shaped
from multimesh._src.schedule.rule import AbstractRule, Request, Rule
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.zb_h import zb_h1, zb_h2
from multimesh._src.schedule.zb_v import zb_v


@dataclass(frozen=True, slots=True)
class Wavefront:
    """eager-1f1b with one stage a rank, interleaved-1f1b with more; two names of upstream's."""

    name: str

    def make(self, request: Request) -> Schedule:
        """Makes the schedule for a program.

        Raises:
            ScheduleError: The schedule cannot do this size, or wants another placement.
        """
        rule = interleaved_1f1b if request.shape.num_chunks > 1 else eager_1f1b
        return rule.make(request)


wavefront = Wavefront("wavefront")
prefetch_wavefront = Wavefront("prefetch-wavefront")

BUILT_IN: tuple[Rule, ...] = (
    gpipe,
    one_f_one_b,
    eager_1f1b,
    interleaved_1f1b,
    looped_bfs,
    zb_h1,
    zb_h2,
    zb_v,
    dualpipe_v,
)

BY_NAME: Mapping[str, AbstractRule] = {
    **{name: rule for rule in BUILT_IN for name in (rule.name, *rule.aliases)},
    **{rule.name: rule for rule in (wavefront, prefetch_wavefront)},
}


def default_rule(request: Request) -> Rule | Before:
    """The schedule of a program that names none; there is one for every placement."""
    shape = request.shape
    loop = looped(shape.num_ranks, shape.num_chunks)
    placement = request.placement or loop
    if placement == loop[: len(placement)]:
        if shape.num_chunks == 1:
            return gpipe if request.forward_only else eager_1f1b
        return looped_bfs if interleaved_1f1b.objection(shape) else interleaved_1f1b
    return zb_v if placement == v_shaped(shape.num_ranks) else Before(name="list")
