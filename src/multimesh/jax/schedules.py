"""Pipeline schedules: the built-in ones, one's own, and tools to check and compare them."""

from multimesh._src.schedule.actions import Action as Action, Kind as Kind, Pair as Pair
from multimesh._src.schedule.auto import auto as auto
from multimesh._src.schedule.before import before as before
from multimesh._src.schedule.built_in import (
    prefetch_wavefront as prefetch_wavefront,
    wavefront as wavefront,
)
from multimesh._src.schedule.check import check as check
from multimesh._src.schedule.compare import compare as compare
from multimesh._src.schedule.costs import Costs as Costs, Memory as Memory
from multimesh._src.schedule.custom import custom as custom, from_file as from_file
from multimesh._src.schedule.dualpipe_v import dualpipe_v as dualpipe_v
from multimesh._src.schedule.gpipe import gpipe as gpipe
from multimesh._src.schedule.graph import (
    Edge as Edge,
    OutsideTask as OutsideTask,
    Part as Part,
    StageGraph as StageGraph,
)
from multimesh._src.schedule.grid import grid as grid
from multimesh._src.schedule.interleaved import interleaved_1f1b as interleaved_1f1b
from multimesh._src.schedule.looped_bfs import looped_bfs as looped_bfs
from multimesh._src.schedule.make import (
    make_schedule as make_schedule,
    schedule_names as schedule_names,
)
from multimesh._src.schedule.one_f_one_b import eager_1f1b as eager_1f1b, one_f_one_b as one_f_one_b
from multimesh._src.schedule.schedule import Schedule as Schedule, parse_schedule as parse_schedule
from multimesh._src.schedule.simulate import Simulation as Simulation, simulate as simulate
from multimesh._src.schedule.zb_h import zb_h1 as zb_h1, zb_h2 as zb_h2
from multimesh._src.schedule.zb_v import zb_v as zb_v

__all__ = [
    "Action",
    "Costs",
    "Edge",
    "Kind",
    "Memory",
    "OutsideTask",
    "Pair",
    "Part",
    "Schedule",
    "Simulation",
    "StageGraph",
    "auto",
    "before",
    "check",
    "compare",
    "custom",
    "dualpipe_v",
    "eager_1f1b",
    "from_file",
    "gpipe",
    "grid",
    "interleaved_1f1b",
    "looped_bfs",
    "make_schedule",
    "one_f_one_b",
    "parse_schedule",
    "prefetch_wavefront",
    "schedule_names",
    "simulate",
    "wavefront",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
