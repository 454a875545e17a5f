"""From placed equations to tasks: groups, the fewest tasks without cycles, equal bodies."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st
from jax import lax

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.flat import Equation
from multimesh._src.ir.program import LoopNode, all_tasks
from multimesh._src.ir.scope import Scope
from multimesh._src.partition.dedupe import hashable, signature
from multimesh._src.partition.split.acyclic import split_acyclic
from multimesh._src.partition.split.groups import Group
from multimesh._src.partition.split.regions import Region
from tests.partition.programs import cut, zeros
from tests.programs.plainly import layer, mlp, pipeline, square_loss

SQUARE = zeros(8, 8)


# --- acyclic -------------------------------------------------------------------------------------


@st.composite
def regions(draw: Any) -> tuple[Region, dict[int, Group]]:
    """A random graph whose edges go to later positions, in up to three groups."""
    size = draw(st.integers(1, 12))
    region = Region()
    groups = {}
    for position in range(size):
        region.steps.append(Equation(position, None, (), (), Scope()))
        for operand in draw(st.sets(st.integers(0, max(0, position - 1)), max_size=3)):
            if operand < position:
                region.operands[position].append(operand)
                region.users[operand].append(position)
        groups[position] = Group("ABC"[draw(st.integers(0, 2))], 0, 0, False)
    return region, groups


def acyclic_order(region: Region, tasks: Any) -> bool:
    """Whether the tasks, merged as given, can be ordered."""
    of = {p: number for number, task in enumerate(tasks) for p in task}
    after: dict[int, set[int]] = defaultdict(set)
    for position in range(len(region.steps)):
        for user in region.users[position]:
            if of[user] != of[position]:
                after[of[user]].add(of[position])
    left = set(range(len(tasks)))
    while left:
        ready = {task for task in left if not after[task] & left}
        if not ready:
            return False
        left -= ready
    return True


@settings(max_examples=200, deadline=None, database=None)
@given(regions())
def test_tasks_are_in_dataflow_order_and_none_can_be_merged(
    drawn: tuple[Region, dict[int, Group]],
) -> None:
    region, groups = drawn
    tasks = split_acyclic(region, groups)
    assert sorted(p for task in tasks for p in task) == list(range(len(region.steps)))
    assert all(len({groups[p] for p in task}) == 1 for task in tasks)
    done: set[int] = set()
    for task in tasks:
        done |= set(task)
        assert all(set(region.operands[p]) <= done for p in task)
    for a in range(len(tasks)):
        for b in range(a):
            if groups[tasks[a][0]] == groups[tasks[b][0]]:
                rest = [t for n, t in enumerate(tasks) if n not in (a, b)]
                assert not acyclic_order(region, [*rest, (*tasks[b], *tasks[a])])


def chain(names: str) -> tuple[Region, dict[int, Group]]:
    region = Region()
    for position in range(len(names)):
        region.steps.append(Equation(position, None, (), (), Scope()))
        if position:
            region.operands[position].append(position - 1)
            region.users[position - 1].append(position)
    return region, {p: Group(name, 0, 0, False) for p, name in enumerate(names)}


def test_a_group_is_cut_only_where_another_stands_between() -> None:
    assert split_acyclic(*chain("AAABBA")) == ((0, 1, 2), (3, 4), (5,))
    assert split_acyclic(*chain("AAA")) == ((0, 1, 2),)


def test_an_equation_joins_the_latest_task_that_it_can() -> None:
    # 0:A -> 1:B -> 2:A, and 3:A reads only 0: it runs with 2, not with 0
    region, groups = chain("ABA")
    region.steps.append(Equation(3, None, (), (), Scope()))
    region.operands[3].append(0)
    region.users[0].append(3)
    groups[3] = Group("A", 0, 0, False)
    assert split_acyclic(region, groups) == ((0,), (1,), (2, 3))


# --- groups --------------------------------------------------------------------------------------


def names_of(program: Any) -> list[str]:
    return [f"{task.name} {task.kind}" for task in all_tasks(program.steps)]


def test_one_task_a_layer_and_direction() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: mlp(p, x).sum())(params)

    made, _ = cut(pipeline(2), step, [SQUARE] * 3, SQUARE)
    # layer2 is on the submesh of layer0, behind layer1: a task of its own
    assert names_of(made.program) == [
        "layer0_fwd F",
        "layer1_fwd F",
        "layer2_fwd F",
        "layer2_bwd BW",
        "layer1_bwd BW",
        "layer0_bwd BW",
    ]


def test_no_optimizer_arithmetic_in_forward_tasks() -> None:
    def step(params: Any, batch: Any, decay: Any) -> Any:
        value, grads = jax.value_and_grad(square_loss)(params, batch)
        old = [jnp.sin(p) * decay for p in params]
        return [p - g for p, g in zip(old, grads, strict=True)], value

    made, _ = cut(pipeline(2), step, [SQUARE] * 2, (SQUARE, SQUARE), zeros())
    for task in all_tasks(made.program.steps):
        found = {eqn.primitive.name for eqn in task.body.eqns}
        assert not ("sin" in found and task.name.endswith("_fwd"))


def test_unscoped_equations_join_the_task_of_their_operand_else_of_their_user() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        y = jnp.cos(y)
        with layer(0):
            x = x @ params[0]
        x = jnp.sin(x)
        with layer(1):
            return (x * y) @ params[1]

    made, _ = cut(pipeline(2), step, [SQUARE] * 2, SQUARE, SQUARE)
    first, second = all_tasks(made.program.steps)
    assert [e.primitive.name for e in first.body.eqns] == ["dot_general", "sin"]
    assert [e.primitive.name for e in second.body.eqns] == ["cos", "mul", "dot_general"]


def test_tasks_clone_what_is_cheap_and_import_what_it_reads() -> None:
    def step(params: Any, x: Any, number: Any) -> Any:
        mask = (jnp.arange(8) < number)[:, None]
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.where(mask, x @ w, 0.0)
        return x

    made, _ = cut(pipeline(2), step, [SQUARE] * 2, SQUARE, zeros(dtype="int32"))
    tasks = list(all_tasks(made.program.steps))
    assert len(tasks) == 2
    for task in tasks:
        assert "iota" in {eqn.primitive.name for eqn in task.body.eqns}
        assert made.program.arguments[3] in task.inputs


# --- equal bodies --------------------------------------------------------------------------------


def test_a_chain_of_clones_may_be_longer_than_python_has_frames() -> None:
    def step(w: Any, x: Any) -> Any:
        scale = jnp.float32(1)
        for _ in range(1500):
            scale = lax.sin(scale + 1.0)
        with layer(0):
            return x @ w * scale

    made, _ = cut(pipeline(1), step, SQUARE, SQUARE)
    (task,) = made.program.tasks
    assert sum(eqn.primitive.name == "sin" for eqn in task.body.eqns) == 1500


def test_equal_layers_share_one_body_and_one_executable_a_submesh() -> None:
    def step(params: Any, x: Any) -> Any:
        return microbatch(lambda p, x: mlp(p, x).sum(), 0, 2, argnum=1)(params, x)

    made, _ = cut(pipeline(2), step, [zeros(8, 8)] * 2, zeros(8, 8))
    (loop,) = [node for node in made.program.steps if isinstance(node, LoopNode)]
    assert loop.microbatch
    bodies = {id(task.body) for task in all_tasks(made.program.steps)}
    assert len(bodies) == len(list(all_tasks(made.program.steps)))  # ends differ from middles

    def deep(params: Any, x: Any) -> Any:
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w)
        return x

    made, _ = cut(pipeline(4), deep, [SQUARE] * 8, SQUARE)
    assert len({id(task.body) for task in all_tasks(made.program.steps)}) == 1
    assert len(made.plan.executables) == 4


def test_signatures_differ_in_structure_params_literals_and_types() -> None:
    def trace(fun: Any, *args: Any) -> Any:
        return signature(jax.make_jaxpr(fun)(*args))

    x, y = SQUARE, zeros(8, 8, dtype="int32")
    base = trace(lambda a, b: (a @ b) * 2.0, x, x)
    assert base == trace(lambda c, d: (c @ d) * 2.0, x, x)
    others = [
        trace(lambda a, b: (b @ a) * 2.0, x, x),
        trace(lambda a, b: (a @ b) * 3.0, x, x),
        trace(lambda a, b: (a @ b.T) * 2.0, x, x),
        trace(lambda a, b: (a @ b) + 2.0, x, x),
        trace(lambda a, b: (a @ b) * 2, y, y),
        trace(lambda a, b: ((a @ b) * 2.0, a), x, x),
        trace(lambda a, b: jax.lax.fori_loop(0, 2, lambda _, c: c @ b, a), x, x),
        trace(lambda a, b: jax.lax.fori_loop(0, 3, lambda _, c: c @ b, a), x, x),
    ]
    assert len({base, *others}) == len(others) + 1


def test_zeros_of_two_signs_and_ones_of_three_types_differ() -> None:
    values = [0.0, -0.0, 1, 1.0, True, "1"]
    assert len({hashable(value) for value in values}) == len(values)
