"""Names in the traces of `jax.profiler`: every call of a step, every run and every copy.

    with jax.profiler.trace("/tmp/trace"):        step 3 of train_step
        state, loss = step(state, batch)            layer0_fwd[0]   layer0_fwd[1]   copy stage=0 ...

They stand around the enqueueing, on the host's track; what the devices do bears the names of the
tasks anyway. A plan that is compiled while `MULTIMESH_PROFILE` is set (`init(profile=True)`) calls
its steps so, at 0.6 us each; any other is none the slower.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from multimesh._src.ir.plan import Copy, Plan, Run, Step
from multimesh._src.runtime.executor import Call, step_name

PROFILE = "MULTIMESH_PROFILE"


def wants_profile() -> bool:
    """Whether plans compiled now name what they do in traces."""
    return os.environ.get(PROFILE, "0") not in ("", "0")


def annotated(call: Call, plan: Plan, step: Step) -> Call:
    """Returns `call` with a name around it."""
    name, details = trace_name(plan, step)
    annotation = jax.profiler.TraceAnnotation

    def call_annotated(args: Sequence[Any]) -> Sequence[Any]:
        with annotation(name, **details):
            return call(args)

    return call_annotated


def trace_name(plan: Plan, step: Step) -> tuple[str, dict[str, Any]]:
    """Returns how traces call a step, and what they say besides."""
    if isinstance(step, Copy):
        return f"copy {step.edge}", {"values": len(step.sources)}
    if not isinstance(step, Run):
        return step_name(step), {}
    submesh = plan.executables[step.executable].submesh.label
    if step.iteration < 0:
        return step.task, {"submesh": submesh}
    name = f"{step.task}[{step.iteration}]"
    return name, {"submesh": submesh, "microbatch": step.iteration}


def annotated_call(name: str, number: int, enabled: bool) -> AbstractContextManager[Any]:
    """Returns a context that names one call of a step in traces, so that tools count steps."""
    if not enabled:
        return nullcontext()
    return jax.profiler.StepTraceAnnotation(name, step_num=number)
