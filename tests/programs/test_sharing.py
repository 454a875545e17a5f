"""Weights that several stages share: stacked layers (R7), and weights tied over stages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.runtime import counters
from multimesh.jax import MultiMesh, init as mm_init, mjit
from multimesh.jax.errors import ExecutionError
from tests.programs import stacked
from tests.programs.plainly import assert_close
from tests.programs.stacked import (
    BATCH,
    NUM_STEPS,
    Case,
    by_index,
    by_scan,
    by_scan_with_remat,
    judge,
    make_multi_mesh,
    optimizer,
)

Tree = Any
STACKS = ("up", "bias", "down")
TABLE = f"float32[{stacked.WIDTH},{stacked.WIDTH}]"


def submesh_of(multi_mesh: MultiMesh) -> Mesh:
    """The first stage as a mesh."""
    mesh = multi_mesh.global_mesh
    return Mesh(mesh.devices[:1], mesh.axis_names)


def staged(multi_mesh: MultiMesh, case: Case) -> tuple[Any, Any]:
    """The step with its state donated, and what `explain()` says of it."""
    with multi_mesh:
        step = mjit(case.step(), donate_argnums=0)
    return step, step.lower(case.state(), BATCH).explain()


def train(step: Callable[..., Tree], state: Tree, num_steps: int = NUM_STEPS) -> Tree:
    """Runs the steps; from the second on nothing is traced, compiled or moved."""
    state, value = step(state, BATCH)
    before = counters.snapshot()
    for _ in range(num_steps - 1):
        state, value = step(state, BATCH)
    new = counters.since(before)
    assert (new.traces, new.compiles, new.argument_moves) == (0, 0, 0)
    return state, value


def stacks_of(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves that are stacks, opt state included."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in named
        if any(f"'{name}'" in jax.tree_util.keystr(path) for name in STACKS)
    ]


def check_places(state: Tree, multi_mesh: MultiMesh, num_layers: int) -> None:
    """Every stack is one array over the stages; a device holds the layers of its stage alone."""
    mesh = multi_mesh.global_mesh
    num_stages = mesh.shape["stage"]
    per_stage = num_layers // num_stages
    found = stacks_of(state)
    assert len(found) == 9  # parameters and two moments
    for name, leaf in found:
        assert leaf.sharding.mesh == mesh, name
        first = leaf.sharding.spec[0]
        assert first == "stage" or first[0] == "stage", name
        for shard in leaf.addressable_shards:
            stage = int(np.argwhere(mesh.devices == shard.device)[0][0])
            rows = range(*shard.index[0].indices(num_layers))
            assert set(rows) <= set(range(stage * per_stage, (stage + 1) * per_stage)), name


def crossings(report: Any) -> dict[tuple[str, str], int]:
    """How often each type crosses an edge in a call, scalars and views left out."""
    found: dict[tuple[str, str], int] = {}
    for reshard in report.reshards:
        if reshard.bytes and not reshard.type.endswith("[]"):
            key = reshard.type, reshard.edge
            found[key] = found.get(key, 0) + reshard.copies
    return found


def check_traffic(report: Any, num_microbatches: int, num_layers: int) -> None:
    """Activations cross from stage to stage, and the small stack to its users: no weight does."""
    rows = stacked.ROWS // num_microbatches
    activation = f"float32[{rows},{stacked.WIDTH}]"
    small = f"float32[{num_layers}]"
    for (kind, edge), copies in crossings(report).items():
        assert kind in (activation, small, "float32[1]"), (kind, edge)
        assert copies <= num_microbatches, (kind, edge)
    assert not any(stack.moved for stack in report.stacks)


# --- stacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "explicit", "run"),
    [
        (2, False, by_scan),
        (2, False, by_index),
        pytest.param(4, False, by_scan, marks=pytest.mark.slow),
        pytest.param(2, True, by_scan, marks=pytest.mark.slow),
        pytest.param(4, False, by_index, marks=pytest.mark.slow),
        pytest.param(2, True, by_index, marks=pytest.mark.slow),
    ],
)
def test_stacked_layers_are_one_array_over_the_stages(num_stages, explicit, run):
    multi_mesh = make_multi_mesh(num_stages, 4, scanned=run is by_scan, explicit=explicit)
    case = Case(run)
    step, report = staged(multi_mesh, case)
    check_traffic(report, 4, 4)
    made = train(step, case.state())
    check_places(made[0], multi_mesh, 4)
    judge(case, made, submesh_of(multi_mesh))


CASES = {
    "no loop": Case(by_scan, size=0),
    "no loop, by index": Case(by_index, size=0),
    "gradient outside": Case(by_scan, outside=True),
    "zb-h1": Case(by_index, schedule="zb-h1"),
    "remat": Case(by_scan_with_remat),
    "several steps in one call": Case(by_scan, in_one_call=3),
}
QUICK = ("gradient outside",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=[] if n in QUICK else pytest.mark.slow) for n, c in CASES.items()],
)
def test_stacked_layers_in_other_loops(case):
    multi_mesh = make_multi_mesh(2, 4, scanned=case.run_layers is not by_index)
    step, report = staged(multi_mesh, case)
    assert len(report.stacks) == 3 and not any(stack.moved for stack in report.stacks)
    assert not any(kind.startswith(("float32[1,", "float32[4,16")) for kind, _ in crossings(report))
    made = train(step, case.state(), 3)
    check_places(made[0], multi_mesh, 4)
    judge(case, made, submesh_of(multi_mesh), 3)


@pytest.mark.parametrize(
    ("place", "explicit"),
    [
        pytest.param("replicated", True, marks=pytest.mark.slow),
        ("stage", False),
        pytest.param("replicated", False, marks=pytest.mark.slow),
        pytest.param("stage", True, marks=pytest.mark.slow),
        pytest.param("one device", False, marks=pytest.mark.slow),
        pytest.param("uncommitted", True, marks=pytest.mark.slow),
    ],
)
def test_stacks_arrive_anywhere(place, explicit):
    multi_mesh = make_multi_mesh(2, 4, scanned=True, explicit=explicit)
    mesh, case = multi_mesh.global_mesh, Case(by_scan)

    def put(leaf):
        in_place = place == "stage" and leaf.ndim > 1 and leaf.shape[0] == 4
        if place in ("replicated", "stage"):
            return jax.device_put(leaf, NamedSharding(mesh, P("stage") if in_place else P()))
        if place == "one device":
            return jax.device_put(leaf, jax.devices()[5])
        return jnp.asarray(leaf) if place == "uncommitted" else leaf

    given = jax.tree.map(put, case.state())
    with multi_mesh:
        step = mjit(case.step(), donate_argnums=0)
    before = counters.snapshot()
    state, _ = step(given, BATCH)
    # where stacks lie in place only the embedding, the head, the small stack and moments are moved
    most = 9 if place == "stage" else len(jax.tree.leaves(given))
    assert counters.since(before).argument_moves <= most
    check_places(state, multi_mesh, 4)
    made = train(step, state, 2)
    assert counters.since(before).traces == 1
    judge(case, made, submesh_of(multi_mesh), 3)


def test_layout_of_the_model_axis_is_kept():
    multi_mesh = make_multi_mesh(2, 4, scanned=True)
    mesh = multi_mesh.global_mesh
    spec = {"up": P("stage", None, "model"), "bias": P(), "down": P("stage", "model"), "scale": P()}
    case = Case(by_scan, transformation=optax.sgd(0.1))
    params, rest = case.state()
    params["layers"] = {
        name: jax.device_put(leaf, NamedSharding(mesh, spec[name]))
        for name, leaf in params["layers"].items()
    }
    with multi_mesh:
        step = mjit(case.step())
    (after, _), _ = step((params, rest), BATCH)
    for name in ("up", "down"):
        assert after["layers"][name].sharding.is_equivalent_to(NamedSharding(mesh, spec[name]), 3)


def test_interleaved_layers_move_once_a_call():
    """Rows 2-5 of 8 lie on the other stage than the one that reads them."""
    multi_mesh = make_multi_mesh(2, 8, scanned=True, interleave=2)
    case = Case(by_scan, num_layers=8)
    step, report = staged(multi_mesh, case)
    up = next(stack for stack in report.stacks if stack.name.endswith("['up']"))
    assert up.homes == ((0, 4, "stage=0"), (4, 8, "stage=1"))
    assert up.moved == (("stage=0", "stage=1", (2, 3)), ("stage=1", "stage=0", (4, 5)))
    assert up.moved_bytes == 4 * 8 * 16 * 4 and not up.why
    # four rows go, and their gradients come back, once a call and not in every microbatch
    found = crossings(report)
    for edge in ("stage=0 -> stage=1", "stage=1 -> stage=0"):
        assert found["float32[1,8,16]", edge] == 4
    assert "interleave=1" in report.as_text()
    made = train(step, case.state(), 3)
    check_places(made[0], multi_mesh, 8)
    judge(case, made, submesh_of(multi_mesh), 3)


@pytest.mark.slow
def test_unlike_numbers_of_layers_share_the_rows_evenly():
    multi_mesh = make_multi_mesh(2, 4, scanned=False, layers_per_stage=(3, 1))
    case = Case(by_index)
    step, report = staged(multi_mesh, case)
    up = next(stack for stack in report.stacks if stack.name.endswith("['up']"))
    assert up.moved == (("stage=1", "stage=0", (2,)),)
    made = train(step, case.state(), 3)
    check_places(made[0], multi_mesh, 4)
    judge(case, made, submesh_of(multi_mesh), 3)


@pytest.mark.slow
def test_a_number_of_layers_that_does_not_divide_stays_on_one_stage():
    multi_mesh = make_multi_mesh(4, 6, scanned=True)
    case = Case(by_scan, num_layers=6)
    step, report = staged(multi_mesh, case)
    up = next(stack for stack in report.stacks if stack.name.endswith("['up']"))
    assert up.homes == ((0, 6, "stage=0"),)
    assert up.why == "6 rows do not divide over 4 submeshes"
    assert all(part in report.as_text() for part in ("6 rows do not divide", "over 4 submeshes"))
    found = crossings(report)
    assert found["float32[1,8,16]", "stage=0 -> stage=1"] == 2  # layers 2 and 3, once a call
    assert found["float32[1,8,16]", "stage=1 -> stage=0"] == 2  # and their gradients
    assert not any(kind.startswith("float32[6,") for kind, _ in found)
    made = train(step, case.state(), 3)
    judge(case, made, submesh_of(multi_mesh), 3)


def penalised(x, layers):
    """Compares the layers of one stack with each other."""
    rows = layers["up"].reshape(layers["up"].shape[0], -1)
    return by_scan(x, layers) + 1e-3 * jnp.sum(jnp.abs(rows @ rows.T))


@pytest.mark.slow
def test_what_needs_all_rows_keeps_the_stack_together():
    multi_mesh, case = make_multi_mesh(2, 4, scanned=True), Case(penalised)
    step, report = staged(multi_mesh, case)
    stacks = {stack.name.split("'")[-2]: stack for stack in report.stacks}
    assert len(stacks["up"].homes) == 1 and "needs all rows together" in stacks["up"].why
    assert len(stacks["down"].homes) == 2 and not stacks["down"].why
    made = train(step, case.state(), 3)
    judge(case, made, submesh_of(multi_mesh), 3)


TRANSFORMATIONS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "apply_if_finite": optax.apply_if_finite(optimizer, 3),
    "MultiSteps": optax.MultiSteps(optimizer, 2).gradient_transformation(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_other_optimizers_keep_their_state_with_the_layers(name):
    multi_mesh = make_multi_mesh(2, 4, scanned=True)
    case = Case(by_scan, transformation=TRANSFORMATIONS[name])
    step, report = staged(multi_mesh, case)
    assert not any(stack.moved for stack in report.stacks)
    made = train(step, case.state(), 3)
    for path, leaf in jax.tree_util.tree_leaves_with_path(made[0]):
        if leaf.ndim > 2:
            assert leaf.sharding.spec[0] == "stage", jax.tree_util.keystr(path)
    judge(case, made, submesh_of(multi_mesh), 3)


def test_stacks_are_made_in_place():
    multi_mesh, case = make_multi_mesh(2, 4, scanned=True), Case(by_scan)

    def init(key):
        leaves, tree = jax.tree.flatten(stacked.make_params(4))
        keys = jax.random.split(key, len(leaves))
        made = [jax.random.normal(k, leaf.shape) / 3 for k, leaf in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(tree, made)
        return params, stacked.optimizer.init(params)

    key = jax.random.key(0)
    with multi_mesh:
        step = mjit(case.step(), donate_argnums=0)
        compiled = step.lower(jax.eval_shape(init, key), BATCH).compile()
        state = mjit(init, out_shardings=compiled.input_shardings[0][0])(key)
        again = mm_init(init, like=compiled)(key)
    check_places(state, multi_mesh, 4)
    check_places(again, multi_mesh, 4)
    assert_close(state[0], jax.jit(init)(key)[0])
    before = counters.snapshot()
    state, _ = compiled(state, BATCH)
    assert counters.since(before).argument_moves == 0
    check_places(state, multi_mesh, 4)


def test_functions_without_tasks_keep_stacks_on_their_stages():
    multi_mesh, case = make_multi_mesh(2, 4, scanned=True), Case(by_scan)
    with multi_mesh:
        step = mjit(case.step())
        gradient = mjit(jax.grad(lambda p, batch: stacked.loss(by_scan, p, batch)))
        average = mjit(lambda a, b: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, a, b))
        norm = mjit(optax.tree.norm)
    (placed, _), _ = step(case.state(), BATCH)
    for made in (gradient(placed, BATCH), average(placed, placed)):
        for name in STACKS:
            sharding = made["layers"][name].sharding
            assert sharding.mesh.shape["stage"] == 2 and sharding.spec[0] == "stage", name
    on_host = jax.tree.map(np.asarray, placed)
    np.testing.assert_allclose(norm(placed), optax.tree.norm(on_host), rtol=1e-6)


@pytest.mark.parametrize("donate", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_a_frozen_stack_stays_the_callers_array(donate):
    multi_mesh = make_multi_mesh(2, 4, scanned=True)

    def step(params, batch):
        def of_head(head):
            return stacked.loss(by_scan, {**params, "head": head}, batch)

        value, grad = jax.value_and_grad(of_head)(params["head"])
        return {**params, "head": params["head"] - 0.1 * grad}, value

    with multi_mesh:
        ours = mjit(step, donate_argnums=donate)
    given = stacked.make_params(4)
    first, _ = ours(given, BATCH)
    second, _ = ours(first, BATCH)
    for name in STACKS:
        assert second["layers"][name] is first["layers"][name]
        np.testing.assert_array_equal(second["layers"][name], given["layers"][name])


def test_a_stack_that_was_donated_is_named():
    multi_mesh, case = make_multi_mesh(2, 4, scanned=True), Case(by_scan)
    with multi_mesh:
        step = mjit(case.step(), donate_argnums=0)
    state, _ = step(case.state(), BATCH)
    step(state, BATCH)
    again = case.state()
    again[0]["layers"]["up"] = state[0]["layers"]["up"]
    with pytest.raises(ExecutionError, match=r"`state\[0\]\['layers'\]\['up'\]`.* is deleted"):
        step(again, BATCH)


# --- tied weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_weight_tied_over_the_first_and_the_last_stage(num_stages):
    multi_mesh = make_multi_mesh(num_stages, 4, scanned=True)
    case = Case(by_scan, tied=True)
    step, report = staged(multi_mesh, case)
    last = f"stage={num_stages - 1}"
    # the weight goes, and the sum of its gradients comes back, once a call
    table = {edge: copies for (kind, edge), copies in crossings(report).items() if kind == TABLE}
    assert table == {f"stage=0 -> {last}": 1, f"{last} -> stage=0": 1}
    made = train(step, case.state())
    judge(case, made, submesh_of(multi_mesh))


def by_index_tied(x, layers):
    """Every layer has the same weights."""
    for index in range(4):
        with jax.named_scope(f"layer{index}"):
            x = stacked.layer(x, jax.tree.map(lambda stack: stack[0], layers))
    return x


@pytest.mark.slow
def test_a_weight_tied_over_four_stages():
    multi_mesh = make_multi_mesh(4, 4, scanned=False)
    case = Case(by_index_tied, num_layers=1)
    step, report = staged(multi_mesh, case)
    found = {k: n for k, n in crossings(report).items() if k[0] == "float32[1,8,16]"}
    out = {f"stage=0 -> stage={stage}": 1 for stage in (1, 2, 3)}
    back = {f"stage={stage} -> stage=0": 1 for stage in (1, 2, 3)}
    assert {edge: copies for (_, edge), copies in found.items()} == out | back
    made = train(step, case.state())
    judge(case, made, submesh_of(multi_mesh))
