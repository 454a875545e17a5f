"""Plans made by hand, for the tests of the runtime."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multimesh._src.ir.plan import Constant, Copy, Executable, Input, Plan, Run, SlotInfo, Step
from multimesh._src.ir.submesh import Submesh

P = PartitionSpec
REPLICATED = P()


def submesh(index: int, devices: Sequence[int], *, explicit: bool = False) -> Submesh:
    """Returns a submesh with the axes stage (size 1) and data."""
    array = np.array([jax.devices()[i] for i in devices]).reshape(1, -1)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(array, ("stage", "data"), axis_types=(kind, kind))
    return Submesh(index, f"stage={index}", mesh)


class PlanBuilder:
    """Builds a plan step by step. All arrays are float32 unless an aval is given."""

    def __init__(self) -> None:
        self.slots: list[SlotInfo] = []
        self.inputs: list[Input] = []
        self.constants: list[Constant] = []
        self.executables: list[Executable] = []
        self.steps: list[Step] = []

    def slot(
        self, shape: Any, place: Submesh, spec: PartitionSpec = REPLICATED, label: str = ""
    ) -> int:
        aval = shape if hasattr(shape, "dtype") else jax.ShapeDtypeStruct(shape, jnp.float32)
        self.slots.append(SlotInfo(aval, NamedSharding(place.mesh, spec), label))
        return len(self.slots) - 1

    def argument(
        self,
        name: str,
        shape: Any,
        place: Submesh,
        spec: PartitionSpec = REPLICATED,
        *,
        donated: bool = False,
        microbatches: int = 0,
        dim: int = 0,
    ) -> int:
        slot = self.slot(shape, place, spec, name)
        index = len(self.inputs)
        self.inputs.append(Input(index, index, name, (slot,), donated, microbatches, dim))
        return slot

    def constant(self, value: Any, place: Submesh, spec: PartitionSpec = REPLICATED) -> int:
        value = np.asarray(value)
        slot = self.slot(jax.ShapeDtypeStruct(value.shape, value.dtype), place, spec, "constant")
        self.constants.append(Constant(value, slot))
        return slot

    def executable(
        self,
        name: str,
        function: Callable[..., Any],
        place: Submesh,
        inputs: Sequence[int],
        out_specs: Sequence[PartitionSpec],
    ) -> int:
        """Adds a program of the types and layouts of the slots `inputs`."""
        avals = [self.slots[slot].aval for slot in inputs]
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        body = jax.make_jaxpr(function)(*structs)
        in_specs = tuple(self.slots[slot].sharding.spec for slot in inputs)
        self.executables.append(Executable(name, body, place, in_specs, tuple(out_specs)))
        return len(self.executables) - 1

    def run(
        self, number: int, inputs: Sequence[int], *, task: str = "", iteration: int = -1
    ) -> tuple[int, ...]:
        executable = self.executables[number]
        outputs = tuple(
            self.slot(
                jax.ShapeDtypeStruct(aval.shape, aval.dtype), executable.submesh, spec, "result"
            )
            for aval, spec in zip(executable.body.out_avals, executable.out_specs, strict=True)
        )
        self.steps.append(Run(number, tuple(inputs), outputs, task or executable.name, iteration))
        return outputs

    def task(
        self,
        name: str,
        function: Callable[..., Any],
        place: Submesh,
        inputs: Sequence[int],
        out_specs: Sequence[PartitionSpec] = (REPLICATED,),
    ) -> tuple[int, ...]:
        """Adds a program and one run of it."""
        return self.run(self.executable(name, function, place, inputs, out_specs), inputs)

    def copy(self, source: int, place: Submesh, spec: PartitionSpec = REPLICATED) -> int:
        target = self.slot(self.slots[source].aval, place, spec, "copy")
        self.steps.append(Copy((source,), (target,), f"to {place.label}"))
        return target

    def plan(self, *outputs: int) -> Plan:
        return Plan(
            tuple(self.slots),
            tuple(self.inputs),
            tuple(self.constants),
            tuple(self.executables),
            tuple(self.steps),
            outputs,
        )


def accumulation(iterations: int, *, donated: bool = True, size: int = 8) -> Plan:
    """A loop over two submeshes that adds up `x_i * w` into an argument, then updates `w`.

    (w, total, x_0, ..) -> (w - total', total')
    """
    first, second = submesh(0, (0, 1)), submesh(1, (2, 3))
    builder = PlanBuilder()
    w = builder.argument("w", (size,), second, P("data"), donated=True)
    total = builder.argument("total", (size,), second, P("data"), donated=donated)
    xs = [builder.argument(f"x[{i}]", (size,), first) for i in range(iterations)]
    forward = builder.executable("forward", lambda x: jnp.sin(x), first, [xs[0]], [P()])
    hidden = [builder.run(forward, [x], iteration=i)[0] for i, x in enumerate(xs)]
    moved = [builder.copy(h, second, P("data")) for h in hidden]
    add = builder.executable(
        "add", lambda w, h, a: (h * 2, a + h * w), second, [w, moved[0], total], [P("data")] * 2
    )
    for i, value in enumerate(moved):
        _, total = builder.run(add, [w, value, total], iteration=i)
    (updated,) = builder.task("update", lambda w, t: w - t, second, [w, total], [P("data")])
    return builder.plan(updated, total)
