"""A residual network whose layers are stacked, and how its training is judged by R1."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh

from multimesh.jax import MultiMesh, Task, microbatch
from tests.oracle import Oracle, compare, reference_a, reference_b
from tests.programs.plainly import normal

Tree = Any
WIDTH, ROWS, SIZE, NUM_STEPS = 8, 16, 4, 10
BATCH = (normal(ROWS, WIDTH, seed=1), normal(ROWS, WIDTH, seed=2))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def make_multi_mesh(
    num_stages: int, num_layers: int, *, scanned: bool, explicit: bool = False, **layers: Any
) -> MultiMesh:
    """Stages of `8 / num_stages` devices; layers by scan or by index, `embed` and `head` outside.

    The axes of a stage are data and model, of size 2 where there are enough devices.
    """
    model = 2 if num_stages < 4 else 1
    sizes = (num_stages, 8 // num_stages // model, model)
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()).reshape(sizes)
    mesh = Mesh(devices, ("stage", "data", "model"), axis_types=(axis_type,) * 3)
    multi_mesh = MultiMesh(global_mesh=mesh)
    matcher = "layer" if scanned else r"layer(\d+)"
    multi_mesh.register_layers(matcher, num_layers=num_layers, scanned=scanned, **layers)
    multi_mesh.register_task("embed", task=Task(mesh_slice={"stage": 0}))
    multi_mesh.register_task("head", task=Task(mesh_slice={"stage": num_stages - 1}))
    return multi_mesh


def make_params(num_layers: int, *, tied: bool = False) -> Tree:
    """`layers` are the stacks; the small one has as many elements as R7 keeps everywhere."""
    params = {
        "embed": normal(WIDTH, WIDTH, seed=3) / 3,
        "layers": {
            "up": normal(num_layers, WIDTH, 2 * WIDTH, seed=4) / 3,
            "bias": normal(num_layers, 2 * WIDTH, seed=5) / 3,
            "down": normal(num_layers, 2 * WIDTH, WIDTH, seed=6) / 3,
            "scale": 1 + normal(num_layers, seed=7) / 8,
        },
    }
    return params if tied else {**params, "head": normal(WIDTH, WIDTH, seed=8) / 3}


def layer(x: Any, weights: Tree) -> Any:
    """One residual layer."""
    hidden = jnp.tanh(x @ weights["up"] + weights["bias"])
    return x + weights["scale"] * (hidden @ weights["down"])


def by_scan(x: Any, layers: Tree, remat: bool = False) -> Any:
    """All layers, the scan's body in scope `layer`."""

    def body(x: Any, weights: Tree) -> Any:
        with jax.named_scope("layer"):
            return layer(x, weights), None

    return lax.scan(jax.checkpoint(body) if remat else body, x, layers)[0]


def by_index(x: Any, layers: Tree) -> Any:
    """All layers, layer i in scope `layer<i>`."""
    for index in range(layers["up"].shape[0]):
        with jax.named_scope(f"layer{index}"):
            x = layer(x, jax.tree.map(lambda stack, at=index: stack[at], layers))
    return x


def loss(run_layers: Callable[[Any, Tree], Any], params: Tree, batch: Tree) -> Any:
    """Mean square error; a head of its own or the transposed embedding."""
    x, y = batch
    with jax.named_scope("embed"):
        x = x @ params["embed"]
    x = run_layers(x, params["layers"])
    with jax.named_scope("head"):
        x = x @ (params["head"] if "head" in params else params["embed"].T)
        return jnp.mean((x - y) ** 2)


def by_scan_with_remat(x: Any, layers: Tree) -> Any:
    """`by_scan`, every layer recomputed in the backward pass."""
    return by_scan(x, layers, remat=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A training step on stacks.

    `outside` takes the gradient of the microbatched loss, not the other way round; `size` 0 has no
    loop, and `in_one_call` runs so many steps in one call.
    """

    run_layers: Callable[[Any, Tree], Any]
    num_layers: int = 4
    size: int = SIZE
    schedule: str | None = None
    outside: bool = False
    tied: bool = False
    in_one_call: int = 0
    transformation: optax.GradientTransformation = optimizer

    def state(self) -> Tree:
        """Parameters and optimizer state on the host."""
        params = make_params(self.num_layers, tied=self.tied)
        return jax.tree.map(np.asarray, (params, self.transformation.init(params)))

    def gradient(self) -> Callable[..., Tree]:
        """Loss and gradient."""
        of_batch = functools.partial(loss, self.run_layers)
        options = {"argnum": 1, "reduce": "mean", "schedule": self.schedule}
        if self.outside:
            return jax.value_and_grad(microbatch(of_batch, 0, self.size, **options))
        gradient = jax.value_and_grad(of_batch)
        return microbatch(gradient, 0, self.size, **options) if self.size else gradient

    def step(self) -> Callable[..., Tree]:
        """One call: `state, loss = step(state, batch)`."""
        gradient = self.gradient()

        def step(state: Tree, batch: Tree) -> Tree:
            params, rest = state
            value, grads = gradient(params, batch)
            updates, rest = self.transformation.update(grads, rest, params)
            return (optax.apply_updates(params, updates), rest), value

        def steps(state: Tree, batch: Tree) -> Tree:
            return lax.scan(lambda s, _: step(s, batch), state, None, length=self.in_one_call)

        return steps if self.in_one_call else step


def judge(case: Case, ours: Tree, mesh: Mesh, num_steps: int = NUM_STEPS) -> None:
    """Applies R1 to the state and the loss of our last step; `mesh` is that of a stage."""
    sizes = mesh.devices.shape
    plainly = replace(case, schedule=None)  # a schedule changes no result
    compare(ours, *references(plainly, sizes, num_steps)).check()


@functools.cache
def references(case: Case, sizes: tuple[int, ...], num_steps: int) -> tuple[Tree, Tree, Tree]:
    """Both references and the oracle after so many steps; B on a mesh of these sizes."""
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("stage", "data", "model"))
    step, state = case.step(), case.state()

    def train(call: Callable[..., Tree]) -> Tree:
        now, value = state, None
        for _ in range(num_steps):
            now, value = call(now, BATCH)
        return jax.tree.map(np.asarray, (now, value))

    return (
        train(functools.partial(reference_a, step)),
        train(lambda *args: reference_b(step, mesh, args)),
        train(Oracle(step, state, BATCH)),
    )
