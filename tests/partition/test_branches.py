"""Conditionals and whiles over several submeshes in the passes (R12)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task
from multimesh._src.ir.flat import FlatProgram, Loop, all_equations
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.branches import join_branches
from multimesh._src.partition.choices import read_own_options
from multimesh._src.partition.prune import prune
from multimesh._src.partition.seeds import Seeds
from multimesh._src.partition.text import print_flat
from tests.partition.programs import (
    assigned,
    cut,
    inlined,
    loops,
    named,
    primitives,
    simplified,
    traced,
    zeros,
)

W, X, FLAG = zeros(8, 8), zeros(4, 8), zeros(dtype=bool)


def two_stages() -> MultiMesh:
    devices = np.array(jax.devices()[:2])
    multi = MultiMesh(global_mesh=jax.sharding.Mesh(devices, ("stage",)))

    def of_layer(name: str, backprop: bool) -> Task:
        return Task(name=name, mesh_slice={"stage": int(name.removeprefix("layer")) % 2})

    multi.register_task(r"layer\d+", callback=of_layer)
    return multi


def layer(index, x, w):
    with jax.named_scope(f"layer{index}"):
        return jnp.tanh(x @ w)


def joined(function, *args) -> tuple[FlatProgram, dict[int, int]]:
    """The program with conditionals made, and the places of its equations."""
    multi = two_stages()
    made = assigned(multi, function, *args)
    seeds = Seeds(traced(multi, function, *args).matcher)
    flat = join_branches(made.flat, made.place, made.match, made.cloned, seeds)
    return flat, made.place


def conditionals(flat, place) -> list[tuple[int, list[list[str]]]]:
    """Per conditional its submesh and the primitives in each of its branches."""
    return [
        (
            place[equation.serial],
            [
                [eqn.primitive.name for eqn in jaxprs.open_jaxpr(branch).eqns]
                for branch in equation.eqn.params["branches"]
            ],
        )
        for equation in named(flat.steps, "cond")
    ]


def forward(w0, w1, x, flag):
    return lax.cond(flag, lambda: layer(1, layer(0, x, w0), w1), lambda: layer(1, x, w1))


def test_branches_stand_under_guards():
    flat = inlined(two_stages(), forward, W, W, X, FLAG)
    assert print_flat(flat).splitlines()[1:] == [
        "  %4:int32[] = convert_element_type %3",
        "  %5:float32[4,8] = dot_general %2 %1  [layer1] if %4 == 0",
        "  %6:float32[4,8] = tanh %5  [layer1] if %4 == 0",
        "  %7:float32[4,8] = dot_general %2 %0  [layer0] if %4 == 1",
        "  %8:float32[4,8] = tanh %7  [layer0] if %4 == 1",
        "  %9:float32[4,8] = dot_general %8 %1  [layer1] if %4 == 1",
        "  %10:float32[4,8] = tanh %9  [layer1] if %4 == 1",
        "  %11:float32[4,8] = select_n %4 %6 %10",
        "return %11",
    ]


def test_one_conditional_per_submesh_with_zeros_for_what_crosses():
    flat, place = joined(forward, W, W, X, FLAG)
    work = ["dot_general", "tanh"]
    assert conditionals(flat, place) == [
        (place_of(place, flat, 0), [["broadcast_in_dim"], work]),
        (place_of(place, flat, 1), [work, work]),
    ]
    assert not any(equation.guards or equation.chooses for equation in all_equations(flat.steps))


def place_of(place, flat, number):
    return place[named(flat.steps, "cond")[number].serial]


def test_a_conditional_on_one_submesh_stays_whole():
    def function(w0, x, flag):
        with jax.named_scope("layer0"):
            return lax.cond(flag, lambda: jnp.tanh(x @ w0), lambda: x)

    flat = inlined(two_stages(), function, W, X, FLAG)
    assert primitives(flat.steps) == ["convert_element_type", "cond"]


def test_a_known_flag_leaves_one_branch():
    def function(w0, w1, x):
        return forward(w0, w1, x, True)

    flat = inlined(two_stages(), function, W, W, X)
    assert "select_n" not in primitives(flat.steps)
    assert len(named(flat.steps, "dot_general")) == 2


def test_branches_of_opposite_order_need_three_pieces():
    def function(w0, w1, x, flag):
        def onward():
            return layer(1, layer(0, x, w0), w1)

        def backward():
            return layer(0, layer(1, x, w1), w0)

        return lax.cond(flag, onward, backward)

    flat, place = joined(function, W, W, X, FLAG)
    first, second, third = (where for where, _ in conditionals(flat, place))
    assert first == third != second


def test_what_no_task_touches_is_cut_where_its_operands_lie():
    """A skipped update: no scope inside, operands on both submeshes."""

    def step(w0, w1, x, flag):
        def loss(ws):
            return layer(1, layer(0, x, ws[0]), ws[1]).sum()

        grads = jax.grad(loss)((w0, w1))

        def update():
            return [jnp.tanh(w - 0.1 * g) for w, g in zip((w0, w1), grads, strict=True)]

        return lax.cond(flag, update, lambda: [w0, w1])

    flat, place = joined(step, W, W, X, FLAG)
    work = [[], ["mul", "sub", "tanh"]]
    (first, one), (second, other) = conditionals(flat, place)
    assert one == other == work
    assert first != second


def test_scalars_alone_are_not_worth_cutting():
    def function(w0, w1, x, step):
        rate = lax.cond(step < 3, lambda: step * 0.1, lambda: jnp.sqrt(step))
        return layer(1, layer(0, x * rate, w0), w1)

    flat = inlined(two_stages(), function, W, W, X, zeros())
    assert len(named(flat.steps, "cond")) == 1


def test_a_cheap_conditional_is_cloned_with_what_it_reads():
    def function(w0, w1, x, step):
        mask = lax.cond(step < 3, lambda: jnp.arange(32.0) * step, lambda: jnp.ones(32))
        return layer(1, layer(0, x, w0 + mask[:8]), w1 + mask[8:16])

    _, texts = cut(two_stages(), function, W, W, X, zeros())
    assert texts["assign"].count("select_n") == 1
    assert "float32[32]" not in texts["split"], "the mask crosses"


def test_a_backward_branch_reads_its_own_residuals():
    def step(w0, w1, x, flag):
        def loss(ws):
            unlike = lambda: jnp.sin(layer(1, x, ws[1]))  # noqa: E731
            return lax.cond(flag, lambda: layer(1, layer(0, x, ws[0]), ws[1]), unlike).sum()

        return jax.grad(loss)((w0, w1))

    flat = prune(inlined(two_stages(), step, W, W, X, FLAG))
    assert len(named(flat.steps, "select_n")) > 2
    flat = prune(read_own_options(flat))
    assert len(named(flat.steps, "select_n")) == 2  # the gradients


def test_effects_stay_in_their_branch_and_loop():
    def function(w0, w1, xs, flag):
        def body(carry, x):
            def noisy():
                jax.debug.callback(lambda _: None, w0.sum())
                return layer(1, layer(0, x, w0 * 2), w1)

            return carry + lax.switch(flag, [lambda: layer(1, x, w1), noisy]), None

        return lax.scan(body, jnp.zeros((4, 8)), xs)[0]

    flat = simplified(two_stages(), function, W, W, zeros(3, 4, 8), zeros(dtype="int32"))
    (loop,) = loops(flat.steps)
    (callback,) = (eq for eq in all_equations(loop.body) if eq.eqn.effects)
    assert [guard.branch for guard in callback.guards] == [1]
    moved = [eq for eq in all_equations(flat.steps[: flat.steps.index(loop)]) if eq.guards]
    assert {eq.primitive for eq in moved} >= {"mul"}  # what does not grow leaves with its guard


def test_a_while_carries_its_condition():
    def function(w0, w1, x, limit):
        def body(carry):
            return carry[0] + 1, layer(1, layer(0, carry[1], w0), w1)

        return lax.while_loop(lambda carry: carry[0] < limit, body, (0, x))

    flat = inlined(two_stages(), function, W, W, X, zeros(dtype="int32"))
    loop = flat.steps[-1]
    assert isinstance(loop, Loop)
    assert loop.condition == loop.carries[-1].inside
    assert primitives(flat.steps)[-2:] == ["lt", "loop"]
    assert primitives(loop.body)[-1] == "lt"
    _, texts = cut(two_stages(), function, W, W, X, zeros(dtype="int32"))
    assert f"loop while %{loop.condition}: " in texts["split"]
    assert "while `layer0` .. `layer1`" in texts["emit"]


def test_a_while_that_nobody_reads_goes():
    def function(w0, w1, x):
        lax.while_loop(lambda c: c.sum() < 3, lambda c: layer(1, layer(0, c, w0), w1), x)
        return x

    assert prune(inlined(two_stages(), function, W, W, X)).steps == ()
