"""What `explain()` tells a reader to look at, and what it says of code and registrations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from multimesh._src.report.program import CarryReport
from multimesh.jax import MultiMesh, Task, ignore_transforms, microbatch, mjit

W = [np.eye(8, dtype=np.float32)] * 4
X = np.ones((8, 8), np.float32)


def pipeline(num_stages=2, width=1, **given):
    devices = np.array(jax.devices()[: num_stages * width]).reshape(num_stages, width)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    multi_mesh.register_task(
        r"layer\d",
        callback=lambda name, _: Task(mesh_slice={"stage": int(name[5:])}),
    )
    for matcher, task in given.items():
        multi_mesh.register_task(matcher, task=task)
    return multi_mesh


def layer(i, x, w):
    with jax.named_scope(f"layer{i}"):
        return jnp.tanh(x @ w)


def two_layers(params, x):
    return layer(1, layer(0, x, params[0]), params[1])


def explained(multi_mesh, fun, *args, **options):
    with multi_mesh:
        report = mjit(fun, **options).lower(*(args or (W, X))).explain()
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    return report, text


def worth_a_look(text):
    """The lines of the section, joined."""
    section = text.split("\n\nWorth a look\n")[1].split("\n\n")[0]
    return " ".join(section.split())


def test_an_idle_slice_is_named():
    report, text = explained(pipeline(4, 2), two_layers)
    assert report.idle == ("stage=2 (devices 4-5)", "stage=3 (devices 6-7)")
    assert "idle: stage=2 (devices 4-5), stage=3 (devices 6-7): no task runs there." in (
        worth_a_look(text)
    )
    assert explained(pipeline(2), two_layers)[0].idle == ()


def test_idle_devices_that_are_no_slice():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    multi_mesh.register_task("layer0", task=Task(mesh_slice={"stage": 0}))
    multi_mesh.register_task("layer1", task=Task(mesh_slice={"stage": 1, "data": 0}))
    assert explained(multi_mesh, two_layers)[0].idle == ("device 3",)


def test_an_axis_that_shards_nothing():
    report, text = explained(pipeline(2, 2), two_layers)
    assert report.unused_axes == ("data=2",)
    assert "no value is sharded over `data`" in worth_a_look(text)
    sharded, _ = explained(pipeline(2, 2), two_layers, in_shardings=([None] * 4, P("data")))
    assert sharded.unused_axes == ()


def test_a_name_in_a_constraint_that_no_task_maps():
    def constrained(names):
        def two(params, x):
            x = lax.with_sharding_constraint(layer(0, x, params[0]), P(names[0]))
            with jax.named_scope("layer1"):
                sharded = lax.cond(
                    x[0, 0] > 0, lambda y: lax.with_sharding_constraint(y, P(names[1])), jnp.sin, x
                )
                return jnp.tanh(sharded @ params[1])

        return two

    report, text = explained(pipeline(2, 2), constrained(("dat", "expert")))
    assert [u.name for u in report.unmapped] == ["dat", "expert"]
    section = worth_a_look(text)
    assert "name axes that no task maps: `dat` in test_findings.py:" in section
    assert "`expert` in `layer1` (test_findings.py:" in section
    report, text = explained(pipeline(2, 2), constrained(("data", "data")))
    assert report.unmapped == ()
    assert "not sharded" not in text


def test_a_registration_without_a_match():
    multi_mesh = pipeline(decoder=Task(mesh_slice={"stage": 1}))
    report, text = explained(multi_mesh, two_layers)
    first, second = report.registrations
    assert (first.matched, first.shadowed) == (("layer0", "layer1"), ())
    assert (second.matched, second.shadowed) == ((), ())
    assert "`decoder` (test_findings.py:" in worth_a_look(text)
    assert "matched no scope of this function" in worth_a_look(text)


def test_a_registration_that_others_shadow():
    multi_mesh = pipeline(layer0=Task(mesh_slice={"stage": 1}))
    report, text = explained(multi_mesh, two_layers)
    assert report.registrations[1].shadowed == ("layer0",)
    assert "decides nothing: it touches layer0" in worth_a_look(text)


def test_layers_that_no_scope_has():
    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi_mesh.register_layers(r"layer\d", num_layers=4)
    report, text = explained(multi_mesh, two_layers)
    assert report.registrations[0].missing == (2, 3)
    assert "is registered for layers that no scope has: 2, 3." in worth_a_look(text)


def test_the_registrations_of_a_scanned_model():
    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi_mesh.register_layers("block", num_layers=4, scanned=True)

    def model(params, x):
        def body(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(body, x, params)[0]

    report, _ = explained(multi_mesh, model, np.stack(W), X)
    (registration,) = report.registrations
    assert registration.matched == ("block_0", "block_1", "block_2", "block_3")
    assert registration.missing == ()


def test_a_cond_that_is_not_cut():
    def model(params, x):
        x = layer(0, x, params[0])
        stay = lambda: layer(0, x, params[0])  # noqa: E731
        return lax.cond(x.sum() > 0, stay, lambda: layer(1, x, params[1]))

    report, text = explained(pipeline(), model)
    if report.whole:
        (whole,) = report.whole
        assert (whole.primitive, set(whole.inside)) == ("cond", {"stage=0", "stage=1"})
        assert "not cut: the `cond` at test_findings.py:" in worth_a_look(text)


def test_a_sequential_loop_says_what_is_carried():
    def model(params, x):
        return lax.scan(lambda c, _: (two_layers(params, c), None), x, length=3)[0]

    report, text = explained(pipeline(), model)
    assert report.loops[0].carried == CarryReport("float32[8,8]", "layer1", "layer0")
    assert "float32[8,8] that `layer1` makes in one turn is read by `layer0`" in worth_a_look(text)
    assert "-> where the turns are microbatches, use `microbatch`, or let" in worth_a_look(text)


def accumulation(add, initial=0.0):
    """Gradients of two layers on four microbatches, accumulated by hand."""

    def step(params, x):
        def turn(carry, piece):
            count, total = carry
            gradient = jax.grad(lambda p: two_layers(p, piece).sum())(params)
            return (count + 1, jax.tree.map(lambda t, g: add(t, g, count), total, gradient)), None

        start = (jnp.float32(0), jax.tree.map(lambda p: jnp.full_like(p, initial), params))
        return lax.scan(turn, start, x.reshape(4, 2, 8))[0][1]

    return step


def test_a_running_mean_is_no_sum_and_said_to_be_sequential():
    mean = accumulation(lambda t, g, count: t + (g - t) / (count + 1))
    report, text = explained(pipeline(), mean, W[:2], X)
    assert report.loops[0].simulation is None
    assert "does more than add to the float32[8,8] that it keeps from turn to" in worth_a_look(text)
    assert "-> use `microbatch`, or let the loop carry sums only and divide after it." in (
        worth_a_look(text)
    )


def test_sums_by_hand_are_pipelined_without_a_word():
    report, text = explained(pipeline(), accumulation(lambda t, g, _: t + g), W[:2], X)
    assert report.loops[0].simulation is not None
    assert "sequential" not in text


def test_layers_that_are_elsewhere_in_each_turn_are_not_sequential():
    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    place = {"loop_dependent_mesh_slice": lambda i: {"stage": i % 2}}
    multi_mesh.register_task("block", task=Task(**place))

    def model(params, x):
        def body(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(body, x, params)[0]

    assert "sequential:" not in explained(multi_mesh, model, np.stack(W), X)[1]


def test_the_way_out_of_a_while_inside_of_microbatches_is_no_python_for_of_itself():
    def loss(params, x):
        def turn(carry):
            return carry[0] + 1, two_layers(params, carry[1])

        return lax.while_loop(lambda carry: carry[1].sum() > carry[0], turn, (0.0, x))[1].sum()

    _, text = explained(pipeline(), microbatch(loss, 0, 4, argnum=1))
    assert "-> write the inner loop as a fixed number of turns in a Python `for`, or keep it" in (
        worth_a_look(text)
    )


def test_microbatches_around_a_loop_over_submeshes_say_so():
    def loss(params, x):
        return lax.scan(lambda c, _: (two_layers(params, c), None), x, length=3)[0].sum()

    report, text = explained(pipeline(), microbatch(loss, 0, 4, argnum=1, schedule="1f1b"))
    assert report.loops[0].is_microbatch and report.loops[0].holds_loops
    assert "the 2 microbatches of" in worth_a_look(text)
    assert "without a schedule: a loop over several submeshes stands inside" in worth_a_look(text)


def test_pipelines_are_listed_before_other_loops():
    def model(params, x):
        for _ in range(4):
            x = lax.scan(lambda c, _: (two_layers(params, c), None), x, length=3)[0]
        return microbatch(lambda x: two_layers(params, x), 0, 4, reduce="concat")(x)

    _, text = explained(pipeline(), model)
    listed = [line.split()[0:3] for line in text.splitlines()[1:9] if "loop of" in line]
    assert listed == [["loop", "of", "2"], ["loop", "of", "3"], ["loop", "of", "3"]]
    assert "and 2 more loops, below" in text


def test_rows_that_are_no_ranks_are_called_by_their_submesh():
    def step(params, x):
        def inner(w, x):
            return jnp.square(layer(1, layer(0, x, w[0]), w[1])).sum()

        def loss(params, x):
            return inner(jax.tree.map(jnp.subtract, params, jax.grad(inner)(params, x)), x)

        return microbatch(jax.grad(loss), 0, 4, argnum=1)(params[:2], x)

    _, text = explained(pipeline(), step)
    assert "stage=1, apart" in text and "row 2" not in text


def test_an_argument_that_comes_back_in_a_stated_layout_is_not_moved():
    def step(params, x):
        gradient = microbatch(jax.grad(lambda p, x: two_layers(p, x).sum()), 0, 4, argnum=1)
        return jax.tree.map(lambda p, g: p - g, params, gradient(params, x))

    layouts = {"in_shardings": (P(None, "data"), None), "out_shardings": P(None, "data")}
    report, _ = explained(pipeline(width=2), step, W[:2], X, donate_argnums=0, **layouts)
    assert {a.moved for a in report.arguments if a.name != "x"} == {"first call"}


def test_an_argument_of_a_sequential_loop_lives_where_it_is_read():
    def model(params, x):
        return lax.scan(lambda c, _: (two_layers(params, c), None), x, length=3)[0]

    report, _ = explained(pipeline(), model)
    assert next(a for a in report.arguments if a.name == "x").home == "stage=0"
    assert not [r for r in report.reshards if r.why == "argument"]


def test_a_tied_weight_has_one_owner():
    def model(params, x):
        return layer(1, layer(0, x, params[0]), params[0])

    report, text = explained(pipeline(), model)
    (shared,) = [r for r in report.reshards if r.why == "argument"]
    assert (shared.value, shared.edge, shared.bytes) == ("params[0]", "stage=0 -> stage=1", 256)
    assert (shared.made, shared.used.scope) == (None, "layer1")
    assert "shared: 1 argument used on several submeshes" in worth_a_look(text)
    assert "`params[0]` (stage=0 -> stage=1)" in worth_a_look(text)


def test_why_values_move():
    def loss(params, x):
        return two_layers(params, x).sum()

    report, _ = explained(pipeline(), jax.value_and_grad(loss))
    found = {(r.why, r.made.scope, r.used and r.used.scope) for r in report.reshards}
    assert ("value", "layer0", "layer1") in found
    assert ("gradient", "layer1", "layer0") in found
    assert ("result", "", None) in found
    assert all(r.made.line.startswith(__file__) for r in report.reshards)


def test_code_in_no_scope_is_named_with_its_place():
    def model(params, x):
        x = two_layers(params, x)
        with jax.named_scope("head"):
            return jnp.clip(x, 0.0, 0.5)

    report, text = explained(pipeline(), model)
    (code,) = [c for c in report.code if c.submesh]
    assert (code.scope, code.submesh, code.tasks) == ("head", "stage=1", ("layer1",))
    line = model.__code__.co_firstlineno + 3
    assert code.lines == (f"{__file__}:{line}",), "jnp.clip is a jit of JAX's own"
    assert f"test_findings.py:{line}" in text


def test_a_whole_backward_says_why():
    def loss(params, x):
        x = layer(0, x, params[0])
        with jax.named_scope("layer1"):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params[1:3]))
        return x.sum()

    def step(params, x):
        return microbatch(jax.value_and_grad(loss), 0, 2, argnum=1, schedule="zb-h1")(params, x)

    report, text = explained(pipeline(), step)
    (whole,) = report.loops[0].whole
    assert (whole.task, whole.primitive) == ("layer1", "scan")
    assert whole.line == f"{__file__}:{loss.__code__.co_firstlineno + 3}"
    assert "the contractions stand inside a scan: `layer1` (test_findings.py:" in worth_a_look(text)


def test_nothing_to_look_at():
    with pipeline():
        step = mjit(two_layers)
        arguments = jax.device_put((W[:2], X), step.lower(W[:2], X).compile().input_shardings[0])
        text = str(step.lower(*arguments).explain())
    assert "\n  worth a look  nothing\n" in text
    assert "Worth a look" not in text


@pytest.mark.parametrize("staged", ["trace", "lower"])
def test_plain_jax_says_why(staged):
    def plain(x):
        with jax.named_scope("encoder"):
            return x * 2

    assert "no task is registered" in str(getattr(mjit(plain), staged)(X).explain())
    with pipeline():
        with pytest.warns(UserWarning, match="no task matched"):
            text = str(getattr(mjit(plain), staged)(X).explain())
        assert "Registered: `layer\\d`. Scopes: `encoder`." in " ".join(text.split())
        with ignore_transforms():
            assert "`ignore_transforms` is set" in str(mjit(two_layers).lower(W, X).explain())


def test_a_function_cut_by_its_results_says_so():
    multi_mesh = pipeline()
    places = [jax.sharding.NamedSharding(multi_mesh.slice(stage=stage), P()) for stage in range(2)]
    text = mjit(lambda: (jnp.ones(2), jnp.ones(3)), out_shardings=tuple(places)).lower().explain()
    assert "device 0: 1 of 2 results, from `result[0]` on" in text
    assert "device 1: 1 of 2 results, from `result[1]` on" in text
