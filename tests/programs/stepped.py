"""Two layers with something done to the value between them, trained and compared by R1."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh.jax import MultiMesh, microbatch, mjit
from tests.oracle import Oracle, compare
from tests.programs.plainly import layer, normal, sgd

Tree = Any
Step = Callable[..., tuple[Tree, Tree]]
Between = Callable[[Any], Any]

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


def same(x: Tree) -> Tree:
    """Nothing is done to the value."""
    return x


def forward(between: Between) -> Callable[[Tree, Any], Any]:
    """Two layers with `between` between them."""

    def fun(params: Tree, x: Any) -> Any:
        with layer(0):
            x = jnp.tanh(x @ params[0])
        x = jnp.sin(between(x))
        with layer(1):
            return jnp.tanh(x @ params[1])

    return fun


def train(between: Between, size: int = 0, **options: Any) -> Step:
    """A step of gradient descent on `forward`, in microbatches of `size` rows if it is given."""

    def loss(params: Tree, batch: Tree) -> Any:
        x, y = batch
        return jnp.mean((forward(between)(params, x) - y) ** 2)

    return descent(loss, size, **options)


def descent(loss: Callable[[Tree, Tree], Any], size: int = 0, **options: Any) -> Step:
    """A step of gradient descent on a loss, in microbatches of `size` rows if it is given."""

    def step(params: Tree, batch: Tree) -> tuple[Tree, Any]:
        grad = jax.value_and_grad(loss)
        grad = microbatch(grad, 0, size, argnum=1, **options) if size else grad
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


def devices_of(x: jax.Array) -> list[int]:
    """The numbers of the devices that an array lies on."""
    return sorted(d.id for d in x.sharding.device_set)


def check_by_oracle(
    multi: MultiMesh,
    step: Step,
    state: Tree,
    *rest: Tree,
    plain: Step | None = None,
    steps: int = 3,
    place: Callable[[Tree], Tree] | None = None,
    **options: Any,
) -> tuple[Tree, Tree]:
    """Applies R1 after the first and after the last step, and returns what ours gave at last.

    Args:
        multi: Where `step` runs as ours, its state donated.
        step: The program.
        state: What it carries.
        rest: Its other arguments.
        plain: The same program for the references; default `step`.
        steps: How many steps.
        place: Puts our first state where it is to lie.
        options: Of `mjit`.
    """
    plain = plain or step
    with multi:
        staged = mjit(step, **{"donate_argnums": 0, **options})
    one, two = jax.devices()[0], Mesh(np.array(jax.devices()[:2]), ("data",))
    replicated = NamedSharding(two, P())
    jitted, oracle = jax.jit(plain), Oracle(plain, state, *rest)
    ours = (place or _copied)(state)
    a, b, exact = jax.device_put(state, one), jax.device_put(state, replicated), state
    last: tuple[Tree, Tree] = (ours, None)
    for number in range(steps):
        ours, other = staged(ours, *rest)
        a, other_a = jitted(a, *jax.device_put(rest, one))
        b, other_b = jitted(b, *jax.device_put(rest, replicated))
        exact, exact_other = oracle(exact, *rest)
        last = ours, other
        if number in (0, steps - 1):
            compare(last, (a, other_a), (b, other_b), (exact, exact_other)).check()
    return last


def _copied(state: Tree) -> Tree:
    return jax.tree.map(jnp.array, state)
