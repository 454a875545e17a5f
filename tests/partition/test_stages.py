"""Stages, ranks and rows (S1, S2, S5), kinds of carries, and which loops are pipelined."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from multimesh._src.errors import PartitionError
from multimesh._src.ir.program import LoopNode, TaskNode
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.carries import classify_carries
from multimesh._src.partition.stages import Pipeline, find_stages
from multimesh._src.schedule.graph import Edge, OutsideTask, Part
from tests.partition.programs import assigned, cut, loops, zeros
from tests.programs.plainly import layer, pipeline

SQUARE = zeros(8, 8)
PAIR = [SQUARE, SQUARE]


def submeshes(*ids: tuple[int, ...]) -> list[Submesh]:
    devices = np.array(jax.devices())
    return [
        Submesh(n, f"devices {found}", Mesh(devices[list(found)], ("x",)))
        for n, found in enumerate(ids)
    ]


def tasks(*given: tuple[str, str, int, str, str]) -> list[TaskNode]:
    """Tasks from (name, kind, submesh, inputs, outputs); variables are letters."""
    return [
        TaskNode(
            index=n,
            name=name,
            kind=kind,  # type: ignore[arg-type]
            stage=-1,
            submesh=submesh,
            body=None,  # type: ignore[arg-type]
            inputs=tuple(map(ord, inputs)),
            outputs=tuple(map(ord, outputs)),
            origin="model.py:3",
        )
        for n, (name, kind, submesh, inputs, outputs) in enumerate(given)
    ]


def stages_of(found: Pipeline) -> list[str]:
    return [f"{task.name}:{task.stage}" for task in found.tasks]


CHAIN = tasks(
    ("embed", "F", 0, "x", "a"),
    ("layer0", "F", 0, "aw", "b"),
    ("layer1", "F", 1, "bv", "c"),
    ("layer1", "BW", 1, "cv", "d"),
    ("layer0", "BW", 0, "daw", "e"),
)


def test_neighbours_on_a_submesh_share_a_stage() -> None:
    found = find_stages(CHAIN, {}, submeshes((0,), (1,)))
    assert stages_of(found) == ["embed:0", "layer0:0", "layer1:1", "layer1:1", "layer0:0"]
    assert found.ranks == (0, 1)
    assert found.graph.placement == (0, 1)
    assert [str(node) for node in found.graph.nodes] == ["0F", "1F", "1BW", "0BW"]
    assert Edge(found.node_of[1], found.node_of[2], crosses=True) in found.graph.edges
    assert Edge(found.node_of[1], found.node_of[4], crosses=False) in found.graph.edges or (
        Edge(found.node_of[0], found.node_of[4], crosses=False) in found.graph.edges
    )


def test_a_second_visit_of_a_submesh_is_a_stage_of_its_own() -> None:
    given = tasks(
        ("a", "F", 0, "x", "a"),
        ("b", "F", 1, "a", "b"),
        ("c", "F", 0, "b", "c"),
        ("c", "BW", 0, "cb", "d"),
        ("b", "BW", 1, "da", "e"),
        ("a", "BW", 0, "ex", "f"),
    )
    found = find_stages(given, {}, submeshes((0,), (1,)))
    assert stages_of(found) == ["a:0", "b:1", "c:2", "c:2", "b:1", "a:0"]
    assert found.graph.placement == (0, 1, 0)


def test_a_task_joins_the_last_stage_that_it_can() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("b", "F", 1, "a", "b"), ("side", "F", 0, "y", "s"))
    assert stages_of(find_stages(given, {}, submeshes((0,), (1,)))) == ["a:0", "b:1", "side:0"]


def test_a_chain_of_tasks_joins_the_given_stage_that_it_leads_to() -> None:
    """Token and position embeddings before registered layers are no stage of their own."""
    given = tasks(
        ("embed", "F", 0, "x", "a"),
        ("positions", "F", 0, "ap", "b"),
        ("layer0", "F", 0, "b", "c"),
        ("layer1", "F", 1, "c", "d"),
    )
    found = find_stages(given, {2: 0, 3: 1}, submeshes((0,), (1,)))
    assert stages_of(found) == ["embed:0", "positions:0", "layer0:0", "layer1:1"]


def test_tasks_between_two_of_a_given_stage_belong_to_it() -> None:
    """A head without a stage, and a loss of its own result and the last layer's."""
    given = tasks(
        ("layer0", "F", 0, "x", "a"),
        ("layer1", "F", 1, "a", "b"),
        ("head", "F", 1, "b", "c"),
        ("total", "F", 1, "c", "d"),
        ("layer1", "F", 1, "db", "e"),
    )
    found = find_stages(given, {0: 0, 1: 1, 4: 1}, submeshes((0,), (1,)))
    assert stages_of(found) == ["layer0:0", "layer1:1", "head:1", "total:1", "layer1:1"]


def test_stages_are_numbered_by_changes_of_submesh_then_program_order() -> None:
    given = tasks(
        ("late", "F", 2, "y", "l"),
        ("a", "F", 0, "x", "a"),
        ("b", "F", 1, "a", "b"),
        ("join", "F", 2, "bl", "c"),
    )
    found = find_stages(given, {}, submeshes((0,), (1,), (2,)))
    # `late` joins the stage of submesh 2, whose longest path has two changes
    assert stages_of(found) == ["late:2", "a:0", "b:1", "join:2"]


def test_given_stages_come_first_and_their_gaps_are_closed() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("b", "F", 1, "a", "b"), ("c", "F", 0, "b", "c"))
    found = find_stages(given, {0: 2, 1: 5, 2: 7}, submeshes((0,), (1,)))
    assert stages_of(found) == ["a:0", "b:1", "c:2"]
    found = find_stages(given, {1: 4}, submeshes((0,), (1,)))
    assert stages_of(found)[1] == "b:0"


def test_given_stages_that_form_a_cycle_are_an_error() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("b", "F", 1, "a", "b"), ("c", "F", 0, "b", "c"))
    with pytest.raises(PartitionError, match="given stages form a cycle: task `c` of stage") as e:
        find_stages(given, {0: 0, 1: 1, 2: 0}, submeshes((0,), (1,)))
    assert "model.py:3" in str(e.value)
    assert "a (stage 0) -> b (stage 1) -> c (stage 0)  <-- here" in str(e.value)
    assert "leave `Task.stage` out" in str(e.value)


def test_a_stage_on_two_submeshes_is_an_error() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("b", "F", 1, "a", "b"))
    with pytest.raises(PartitionError, match="stage `3` lies on two submeshes: task `a` and task"):
        find_stages(given, {0: 3, 1: 3}, submeshes((0,), (1,)))


def test_the_full_mesh_between_slices_has_a_row_of_its_own() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("all", "F", 1, "a", "b"), ("c", "F", 2, "b", "c"))
    found = find_stages(given, {}, submeshes((0,), (0, 1), (1,)))
    assert stages_of(found) == ["a:0", "all:-1", "c:1"]
    (row,) = [node for node in found.graph.nodes if isinstance(node, OutsideTask)]
    assert (row.row, row.occupies) == (2, (0, 1))


def test_of_overlapping_submeshes_the_smaller_is_a_rank() -> None:
    given = tasks(("a", "F", 0, "x", "a"), ("b", "F", 1, "a", "b"))
    found = find_stages(given, {}, submeshes((0, 1, 2), (2, 3)))
    assert found.ranks == (1,)
    assert isinstance(found.node_of[0], OutsideTask)


def test_the_backward_of_a_recomputed_stage_belongs_to_the_stage_whose_inputs_it_reads() -> None:
    given = tasks(
        ("a", "F", 0, "xu", "a"),
        ("b", "F", 1, "av", "b"),
        ("c", "F", 0, "bw", "c"),
        ("c", "BW", 0, "bw", "d"),
        ("b", "BW", 1, "dav", "e"),
        ("a", "BW", 0, "exu", "f"),
    )
    found = find_stages(given, {}, submeshes((0,), (1,)))
    assert stages_of(found) == ["a:0", "b:1", "c:2", "c:2", "b:1", "a:0"]


def test_a_backward_task_that_would_close_a_cycle_stands_alone() -> None:
    given = tasks(
        ("a", "F", 0, "x", "a"),
        ("b", "F", 1, "a", "b"),
        ("a", "BW", 0, "a", "p"),
        ("b", "BW", 1, "bp", "q"),
        ("a", "BW", 0, "qa", "r"),
    )
    found = find_stages(given, {}, submeshes((0,), (1,)))
    assert isinstance(found.node_of[2], Part)
    assert isinstance(found.node_of[4], OutsideTask)
    assert found.node_of[4].occupies == (0,)


def test_a_loop_of_backward_tasks_alone_is_numbered_like_a_forward_one() -> None:
    given = tasks(("b", "BW", 1, "x", "a"), ("a", "BW", 0, "a", "b"))
    found = find_stages(given, {}, submeshes((0,), (1,)))
    assert stages_of(found) == ["b:0", "a:1"]
    assert found.ranks == (1, 0)


# --- carries -------------------------------------------------------------------------------------


def kinds(body: Any, start: Any, num: int = 3) -> list[str]:
    def step(params: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: body(params, c, x), start, xs)

    found = assigned(pipeline(2), step, PAIR, zeros(num, 8, 8))
    (loop,) = loops(found.flat.steps)
    return list(classify_carries(loop, found.place).values())


BIG = jnp.ones((8, 8))


def test_sums_products_and_maxima_are_accumulated() -> None:
    def body(params: Any, carry: Any, x: Any) -> Any:
        a, b, c = carry
        with layer(0):
            x = x @ params[0]
        with layer(1):
            x = x @ params[1]
        return (a + x, jnp.maximum(x, b), x * c), x

    assert kinds(body, (BIG, BIG, BIG)) == ["accumulated"] * 3 + ["written"]


def test_a_mixture_of_operations_is_a_state() -> None:
    def body(params: Any, carry: Any, x: Any) -> Any:
        with layer(0):
            x = x @ params[0]
        with layer(1):
            x = x @ params[1]
        return jnp.maximum(carry + x, x), None

    assert kinds(body, BIG) == ["state"]


def test_what_is_read_inside_is_a_state_and_what_is_only_replaced_is_last() -> None:
    def body(params: Any, carry: Any, x: Any) -> Any:
        now, _before, total = carry
        with layer(0):
            x = (x + now) @ params[0]
        with layer(1):
            x = x @ params[1]
        return (x, now, total + x), total

    assert kinds(body, (BIG, BIG, BIG)) == ["state", "last", "state", "written"]


def test_only_writes_at_the_iterations_own_slot_are_written() -> None:
    def body(params: Any, carry: Any, x: Any) -> Any:
        i, own, shared, again = carry
        with layer(0):
            x = x @ params[0]
        with layer(1):
            x = x @ params[1]
        own = lax.dynamic_update_index_in_dim(own, x, i, 0)
        shared = lax.dynamic_update_index_in_dim(shared, x, i // 2, 0)
        again = lax.dynamic_update_index_in_dim(again, again[0] + x, i, 0)
        return (i + 1, own, shared, again), None

    stack = jnp.zeros((3, 8, 8))
    found = kinds(body, (jnp.int32(0), stack, stack, stack))
    assert found[1:] == ["state", "state"]


# --- pipelines -----------------------------------------------------------------------------------


def is_pipelined(body: Any, start: Any) -> bool:
    def step(params: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: body(params, c, x), start, xs)

    made, _ = cut(pipeline(2), step, PAIR, zeros(3, 8, 8))
    (loop,) = [node for node in made.program.steps if isinstance(node, LoopNode)]
    assert loop.microbatch == bool(made.schedules)
    return loop.microbatch


def test_a_state_of_one_forward_stage_is_pipelined() -> None:
    def body(params: Any, mean: Any, x: Any) -> Any:
        with layer(0):
            x = x @ params[0]
            mean = 0.9 * mean + x
        with layer(1):
            return mean, ((x - mean) @ params[1]).sum()

    assert is_pipelined(body, BIG)


def test_a_state_that_goes_around_is_not() -> None:
    def body(params: Any, x: Any, _: Any) -> Any:
        with layer(0):
            x = x @ params[0]
        with layer(1):
            return x @ params[1], None

    assert not is_pipelined(body, BIG)


def test_an_accumulation_over_forward_and_backward_is_not() -> None:
    def body(params: Any, best: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            with layer(0):
                h = x @ params[0]
            with layer(1):
                return jnp.sum(h @ params[1]), h

        (_, h), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jnp.maximum(jnp.maximum(best, h), grads[0]), None

    assert not is_pipelined(body, BIG)


def test_tasks_without_a_stage_join_given_stages_where_no_other_lies_between() -> None:
    given = tasks(
        ("embed", "F", 0, "x", "e"),
        ("b0", "F", 0, "e", "a"),
        ("b1", "F", 1, "a", "b"),
        ("b2", "F", 0, "b", "c"),
        ("b3", "F", 1, "c", "d"),
        ("head", "F", 1, "d", "h"),
    )
    found = find_stages(given, {1: 0, 2: 1, 3: 2, 4: 3}, submeshes((0,), (1,)))
    assert stages_of(found) == ["embed:0", "b0:0", "b1:1", "b2:2", "b3:3", "head:3"]
    assert found.graph.placement == (0, 1, 0, 1)


def test_a_sum_that_starts_at_a_python_number_is_accumulated() -> None:
    """The weak type of `0.` makes JAX convert what is carried, which changes nothing."""

    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                x = jnp.tanh(x @ params[0])
            with layer(1):
                size = jnp.sum(x @ params[1])
            return total + jnp.where(jnp.isfinite(x).all(), size, 0), None

        return lax.scan(body, 0.0, xs)[0]

    found = assigned(pipeline(2), step, PAIR, zeros(4, 2, 8))
    (loop,) = loops(found.flat.steps)
    assert [*classify_carries(loop, found.place).values()] == ["accumulated"]
