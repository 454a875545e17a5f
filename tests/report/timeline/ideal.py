"""An ideal machine: times of a real plan as the simulator would have them, without a device."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.report.timeline.calls import MeasuredStep
from multimesh._src.report.timeline.steps import StepInfo, describe_steps
from multimesh._src.report.timeline.timeline import Timeline
from multimesh._src.runtime.buffers import plan_buffers
from multimesh._src.runtime.timing import CallTimes, StepTimes
from multimesh.jax import MultiMesh, Task, microbatch, mjit

NUM_MICROBATCHES = 6
BEGAN = 100.0


def partitioned_step(
    num_stages: int = 4, schedule: Any = "1f1b", num_layers: int = 0
) -> Partitioned:
    """A step of one tiny layer a stage, or of more layers than stages in the V placement."""
    num_layers = num_layers or num_stages
    mesh = Mesh(np.array(jax.devices()[:num_stages]), ("stage",))
    multi_mesh = MultiMesh(global_mesh=mesh)

    def task(text: str, backprop: bool) -> Task:
        stage = int(text)
        rank = min(stage, 2 * num_stages - 1 - stage)
        name = f"layer{stage}_{'bwd' if backprop else 'fwd'}"
        return Task(name=name, mesh_slice={"stage": rank}, stage=stage)

    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def step(params: Any, x: Any) -> Any:
        gradient = microbatch(jax.value_and_grad(loss), 0, 1, argnum=1, schedule=schedule)
        value, grads = gradient(params, x)
        return [w - g for w, g in zip(params, grads, strict=True)], value

    multi_mesh.register_task(r"layer(\d+)", callback=task)
    with multi_mesh:
        params = [jnp.ones((8, 8))] * num_layers
        lowered = mjit(step).lower(params, jnp.ones((NUM_MICROBATCHES, 8)))
    return lowered._partitioned


def measured(partitioned: Partitioned) -> MeasuredStep:
    plan = plan_buffers(partitioned.plan).plan
    labels = tuple(submesh.label for submesh in partitioned.program.submeshes)
    infos = describe_steps(plan, partitioned)
    return MeasuredStep("step", infos, partitioned.schedules, labels)


def ideal_times(
    infos: tuple[StepInfo, ...],
    seconds: Callable[[StepInfo], float],
    latency: float = 0.0,
    *,
    enqueue: float = 0.0,
    unseen: Callable[[StepInfo], bool] = lambda info: False,
) -> CallTimes:
    """Runs a plan on paper: each device in order, copies that arrive after a latency.

    Args:
        infos: The steps of the plan.
        seconds: How long a run takes.
        latency: How long a copy takes.
        enqueue: How long the host takes for each step.
        unseen: Which copies are not seen to end.
    """
    free: dict[int, float] = {}
    there: list[float] = []
    steps: list[StepTimes] = []
    now = BEGAN
    for number, info in enumerate(infos):
        begin, now = now, now + enqueue
        start = max([begin, *(there[n] for n in info.needs)])
        if info.is_copy:
            end = start + latency
        else:
            end = max([start, *(free.get(d, 0.0) for d in info.devices)]) + seconds(info)
            free.update(dict.fromkeys(info.devices, end))
        there.append(end)
        seen = not (info.is_copy and unseen(info))
        steps.append(StepTimes(number, begin, now, end if seen else now, seen))
    return CallTimes(BEGAN, max(there), tuple(steps))


def ideal_timeline(
    partitioned: Partitioned, costs: Mapping[str, float], latency: float = 0.0, **options: Any
) -> Timeline:
    """The timeline of a call in which nodes of the stage graph take `costs`, all else nothing."""
    step = measured(partitioned)

    def seconds(info: StepInfo) -> float:
        return sum(costs[name] for name, _ in info.nodes)

    times = ideal_times(step.infos, seconds, latency, **options)
    return Timeline([(step, times, False)])
