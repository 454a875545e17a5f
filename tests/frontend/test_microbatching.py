"""Microbatch loops against accumulation by hand, and batches. Needs 8 CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src import config
from multimesh._src.errors import MicrobatchError, ShardingError
from multimesh._src.frontend.batches import MicrobatchedArray, prepare_batch
from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.scopes import scope_of_equation
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.jax_compat import jaxprs

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 2), np.float32)
X = RNG.standard_normal((8, 3), np.float32)
Y = RNG.standard_normal((8, 2), np.float32)


def loss(w, batch):
    return jnp.square(batch["x"] @ w - batch["y"]).sum()


BATCH = {"x": X, "y": Y}
GRAD = jax.value_and_grad(loss)


def by_hand(fun, w, batch, size):
    """Sums the results of slices of rows, in ascending order."""
    total = None
    for start in range(0, len(batch["x"]), size):
        cut = slice(start, start + size)
        part = fun(w, {name: leaf[cut] for name, leaf in batch.items()})
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    return total


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_array_equal(g, e)


def assert_trees_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=2e-6)


def scans(jaxpr):
    return [e for e in jaxprs.all_eqns(jaxpr) if e.primitive.name == "scan"]


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_sum_is_accumulation_by_hand(size):
    run = jax.jit(microbatch(GRAD, 0, size, argnum=1))
    assert_trees_close(run(W, BATCH), by_hand(GRAD, W, BATCH, size))


def test_sum_is_bitwise_a_loop_by_hand():
    def loop(w, batch):
        def step(total, rows):
            return jax.tree.map(jnp.add, total, GRAD(w, rows)), None

        zeros = (jnp.zeros(()), jnp.zeros_like(w))
        slices = jax.tree.map(lambda leaf: leaf.reshape(4, 2, -1), batch)
        return jax.lax.scan(step, zeros, slices)[0]

    run = jax.jit(microbatch(GRAD, 0, 2, argnum=1))
    assert_trees_equal(run(W, BATCH), jax.jit(loop)(W, BATCH))


def test_eager_and_ignored_give_the_same():
    run = microbatch(GRAD, 0, 2, argnum=1)
    expected = run(W, BATCH)
    with config.ignore_transforms():
        assert_trees_equal(run(W, BATCH), expected)
        assert not scope_of_equation(scans(jax.make_jaxpr(run)(W, BATCH))[0]).markers


def test_mean():
    run = jax.jit(microbatch(GRAD, 0, 2, argnum=1, reduce="mean"))
    expected = jax.tree.map(lambda r: r / 4, by_hand(GRAD, W, BATCH, 2))
    assert_trees_close(run(W, BATCH), expected)


def test_reductions_of_several_results():
    def f(x, i):
        return {"s": x.sum(), "m": (x.max(), x.mean()), "rows": x * 2, "i": i}

    reduce = {"s": "sum", "m": ("max", "mean"), "rows": "concat", "i": "stack"}
    out = microbatch(f, 0, 2, reduce=reduce, with_index=True)(X)
    parts = X.reshape(4, 2, 3)
    np.testing.assert_allclose(out["s"], X.sum(), rtol=1e-5)
    np.testing.assert_array_equal(out["m"][0], X.max())
    np.testing.assert_allclose(out["m"][1], parts.mean((1, 2)).mean(), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(out["rows"], X * 2)
    np.testing.assert_array_equal(out["i"], np.arange(4))
    assert out["i"].dtype == jnp.int32


def test_reduction_prefix():
    out = microbatch(lambda x: ({"a": x, "b": x}, x.sum()), 0, 2, reduce=("stack", "sum"))(X)
    assert out[0]["a"].shape == out[0]["b"].shape == (4, 2, 3) and out[1].shape == ()


def test_concat_along_another_dim():
    out = microbatch(lambda x: x + 1, 1, 2, reduce="concat")(X.T)
    np.testing.assert_array_equal(out, X.T + 1)


@pytest.mark.parametrize("low", [jnp.int32, jnp.bool_, jnp.bfloat16])
def test_max_of_all_kinds(low):
    values = jnp.asarray([[-3, -2], [0, 0], [-5, -1], [-9, -9]]).astype(low)
    expected = values.max(0)
    out = microbatch(lambda x: x.max(0), 0, 2, reduce="max")(values)
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out, expected)


def test_sums_of_integers_and_booleans():
    flags = np.array([True, True, False, True])
    out = microbatch(lambda b: (b.any(), b.sum()), 0, 2)(flags)
    assert (int(out[0]), int(out[1])) == (2, 3) and out[0].dtype == jnp.int32
    mean = microbatch(lambda b: (b.all(), b.sum()), 0, 2, reduce="mean")(flags)
    assert (float(mean[0]), float(mean[1])) == (0.5, 1.5)


def test_accum_dtype():
    def f(w, x):
        return (w * x).sum(0), jnp.int32(1)

    x = jnp.asarray(RNG.standard_normal((64, 5)), jnp.bfloat16)
    w = jnp.ones((), jnp.bfloat16)
    out, count = microbatch(f, 0, 1, argnum=1, accum_dtype=jnp.float32)(w, x)
    assert out.dtype == jnp.bfloat16 and (count.dtype, int(count)) == (jnp.int32, 64)
    expected = x.astype(jnp.float32).sum(0)
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))
    assert (microbatch(f, 0, 1, argnum=1)(w, x)[0] != out).any()


def test_gradients_through_the_loop():
    total = microbatch(loss, 0, 2, argnum=1)
    np.testing.assert_allclose(
        jax.grad(total)(W, BATCH), jax.grad(loss)(W, BATCH), rtol=1e-5, atol=1e-6
    )
    hessian = jax.hessian(lambda w: total(w, BATCH))(W)
    np.testing.assert_allclose(hessian, jax.hessian(loss)(W, BATCH), rtol=1e-5, atol=1e-5)


def test_vmap():
    total = microbatch(loss, 0, 2, argnum=1)
    many = np.stack([W, 2 * W])
    got = jax.vmap(total, in_axes=(0, None))(many, BATCH)
    np.testing.assert_allclose(got, [loss(w, BATCH) for w in many], rtol=1e-5)


@pytest.mark.parametrize(
    "inner",
    [
        lambda x: jax.lax.psum(microbatch(jnp.sum, 0, 2)(x), "data"),
        lambda x: microbatch(lambda x: jax.lax.psum(x.sum(), "data"), 0, 2)(x),
        lambda x: (
            jax.lax.pmax(microbatch(jnp.max, 0, 2, reduce="max")(x), "data") + X.sum() - X.max()
        ),
    ],
)
def test_inside_shard_map(inner):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    run = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=P("data"), out_specs=P()))
    np.testing.assert_allclose(run(X), X.sum(), rtol=1e-5)


def test_remat_and_random_keys():
    def noisy(w, batch, i):
        key = jax.random.fold_in(jax.random.key(7), i)
        return jax.checkpoint(loss)(w, batch) + jax.random.normal(key)

    run = microbatch(jax.value_and_grad(noisy), 0, 4, argnum=1, with_index=True)
    value, _ = run(W, BATCH)
    noise = sum(jax.random.normal(jax.random.fold_in(jax.random.key(7), i)) for i in range(2))
    np.testing.assert_allclose(value, loss(W, BATCH) + noise, rtol=1e-5)


def test_typed_keys_are_cut():
    keys = jax.random.split(jax.random.key(0), 8)
    out = microbatch(lambda k: jax.vmap(jax.random.uniform)(k), 0, 2, reduce="concat")(keys)
    np.testing.assert_array_equal(out, jax.vmap(jax.random.uniform)(keys))


def test_several_arguments_and_dims():
    def f(x, scale, y):
        return (x * scale).sum() + y.sum(1)[0]

    run = microbatch(f, (0, 1), 2, argnum=(0, 2))
    expected = sum(f(X[i : i + 2], 2.0, Y.T[:, i : i + 2]) for i in range(0, 8, 2))
    np.testing.assert_allclose(run(X, 2.0, Y.T), expected, rtol=1e-5)


def test_dims_as_a_prefix_and_whole_leaves():
    batch = {"x": X, "t": {"y": Y.T}, "table": np.float32([1, 2, 3])}

    def f(b):
        assert b["table"].shape == (3,)
        return (b["x"] * b["table"]).sum() + b["t"]["y"].sum()

    out = microbatch(f, {"x": 0, "t": -1, "table": None}, 2)(batch)
    np.testing.assert_allclose(out, f(batch), rtol=1e-5)


def test_other_arguments_may_be_anything():
    out = microbatch(lambda mode, x, *, scale: x.sum() * scale, 0, 2, argnum=-1)(
        "train", X, scale=2
    )
    np.testing.assert_allclose(out, 2 * X.sum(), rtol=1e-5)


# --- form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 8])
def test_it_is_one_scan_under_one_marker(size):
    traced = jax.make_jaxpr(microbatch(GRAD, 0, size, 1, schedule="1f1b", num_stages=3))(W, BATCH)
    (scan,) = scans(traced)
    assert jaxprs.scan_parts(scan)[:4] == (1, 2, 8 // size, False)
    markers = {scope_of_equation(eqn).markers for eqn in traced.eqns}
    assert len(markers) == 1
    marker = microbatch_marker(markers.pop()[0])
    assert (marker.num_microbatches, marker.size) == (8 // size, size)
    assert (marker.schedule, marker.num_stages) == ("1f1b", 3)


@pytest.mark.parametrize(("dim", "expected"), [(0, ["reshape"]), (1, ["reshape", "transpose"])])
def test_form_of_the_batch(dim, expected):
    traced = jax.make_jaxpr(microbatch(lambda x: x.sum(), dim, 2))(np.ones((8, 8)))
    assert [e.primitive.name for e in traced.eqns] == [*expected, "scan"]
    (scan,) = scans(traced)
    assert scan.invars[-1].aval.shape == ((4, 2, 8), (4, 8, 2))[dim]


def test_the_function_is_traced_once():
    calls = []

    def f(w, batch):
        calls.append(1)
        return loss(w, batch)

    jax.jit(microbatch(jax.grad(f), 0, 2, argnum=1)).trace(W, BATCH)
    assert len(calls) == 1


def test_scopes_of_the_function_stay():
    def f(x):
        with jax.named_scope("layer0"):
            return jnp.sin(x).sum()

    def outer(x):
        with jax.named_scope("model"):
            return microbatch(f, 0, 2)(x)

    traced = jax.make_jaxpr(outer)(X)
    sine = next(e for e in jaxprs.all_eqns(traced) if e.primitive.name == "sin")
    (scan,) = scans(traced)
    scope = scope_of_equation(scan).join(scope_of_equation(sine))
    assert scope.path == ("model", "layer0") and len(scope.markers) == 1


def test_custom_schedule_is_kept_as_written():
    rows = [["a", "b"], [(0, "a"), [1, "b"]]]
    run = microbatch(lambda x: x.sum(), 0, 2, custom_schedule=rows)
    rows[0].append("changed later")
    scope = scope_of_equation(scans(jax.make_jaxpr(run)(X))[0])
    marker = microbatch_marker(scope.markers[0])
    assert marker.custom_schedule == (("a", "b"), ((0, "a"), (1, "b")))


# --- shardings -----------------------------------------------------------------------------------


def constraints(jaxpr):
    return [e.params for e in jaxprs.all_eqns(jaxpr) if e.primitive is constraint_p]


def test_arg_shardings_are_logical_and_leave_the_new_dim_whole():
    run = microbatch(loss, 0, 2, 1, arg_shardings={"x": P("batch", "embed"), "y": None})
    with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data")):
        (params,) = constraints(jax.make_jaxpr(run)(W, BATCH))
    assert params["dims"] == ((), ("batch",), ("embed",)) and params["kind"] == "logical"


def test_arg_shardings_of_several_arguments():
    run = microbatch(lambda x, y: (x.sum(), y.sum()), 0, 2, (0, 1), arg_shardings=(P("a"), P("b")))
    with config.autoshard():
        dims = [p["dims"][1] for p in constraints(jax.make_jaxpr(run)(X, Y))]
    assert dims == [("a",), ("b",)]


def test_arg_shardings_in_plain_jit():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    expected = jax.jit(microbatch(loss, 0, 2, 1))(W, BATCH)
    for sharding in (P("batch"), NamedSharding(mesh, P("data"))):
        run = jax.jit(microbatch(loss, 0, 2, 1, arg_shardings=sharding))
        np.testing.assert_allclose(run(W, BATCH), expected, rtol=1e-5)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_size_below_one(size):
    with pytest.raises(MicrobatchError, match="the size is an integer of at least 1"):
        microbatch(loss, 0, size)


def test_size_that_does_not_divide():
    with pytest.raises(MicrobatchError) as error:
        microbatch(GRAD, 0, 3, argnum=1)(W, BATCH)
    text = str(error.value)
    assert "argument 1['x'] has `8` rows, which do not divide into microbatches of `3`" in text
    assert "use `size=2`" in text and "pad the batch to `9` rows" in text


def test_no_rows():
    with pytest.raises(MicrobatchError, match="has `0` rows"):
        microbatch(jnp.sum, 0, 2)(np.ones((0, 3)))


def test_leaves_of_different_length():
    with pytest.raises(MicrobatchError) as error:
        microbatch(GRAD, 0, 2, argnum=1)(W, {"x": X, "y": Y[:4]})
    assert "argument 1['x'] has `8` rows but argument 1['y'] has `4`" in str(error.value)


def test_dim_that_does_not_exist():
    with pytest.raises(MicrobatchError, match=r"`dim=2` does not exist in argument 0 of shape"):
        microbatch(jnp.sum, 2, 2)(X)


def test_argnum_out_of_range():
    with pytest.raises(MicrobatchError, match="`argnum=1`, but the function was called with `1`"):
        microbatch(jnp.sum, 0, 2, argnum=1)(X)


@pytest.mark.parametrize("argnum", [(), (0, 0)])
def test_argnum_without_sense(argnum):
    with pytest.raises(MicrobatchError, match="give one position, or different ones"):
        microbatch(jnp.sum, 0, 2, argnum=argnum)


def test_nothing_to_cut():
    with pytest.raises(MicrobatchError, match="no array that could be cut"):
        microbatch(lambda b: 0.0, 0, 2)({})
    with pytest.raises(MicrobatchError, match="no array that could be cut"):
        microbatch(jnp.sum, None, 2)(X)


def test_dim_that_is_no_prefix():
    with pytest.raises(MicrobatchError, match="is no prefix of the batch"):
        microbatch(loss, {"z": 0}, 2, argnum=1)(W, BATCH)


def test_unknown_reduction():
    with pytest.raises(MicrobatchError, match="no reduction `avg`") as error:
        microbatch(loss, 0, 2, reduce=("sum", "avg"))
    assert "`sum`, `mean`, `max`, `stack`, `concat`" in str(error.value)
    with pytest.raises(MicrobatchError, match="no reduction `None`"):
        microbatch(loss, 0, 2, reduce=None)


def test_reduction_that_is_no_prefix():
    with pytest.raises(MicrobatchError, match="is no prefix of the results"):
        microbatch(lambda x: (x, x), 0, 2, reduce=("sum",))(X)


@pytest.mark.parametrize(
    ("fun", "dim", "reduce", "problem"),
    [
        (lambda x: x.sum(), 0, "concat", "it has no dim `0`"),
        (lambda x: x[0] * 1j, 0, "max", "complex numbers have no order"),
        (lambda x: jax.random.key(0), 0, "sum", "its elements are no numbers"),
    ],
)
def test_results_that_cannot_be_reduced(fun, dim, reduce, problem):
    with pytest.raises(MicrobatchError, match=f"cannot be reduced by `{reduce}`: {problem}"):
        microbatch(fun, dim, 2, reduce=reduce)(X)


def test_concat_with_different_dims():
    run = microbatch(lambda x, y: x, (0, 1), 2, argnum=(0, 1), reduce="concat")
    with pytest.raises(MicrobatchError, match="cut along different dims"):
        run(X, Y.T)


def test_accum_dtype_must_float():
    with pytest.raises(MicrobatchError, match=r"`accum_dtype=.*int32.*` is no floating dtype"):
        microbatch(loss, 0, 2, accum_dtype=jnp.int32)


def test_schedule_and_custom_schedule():
    with pytest.raises(MicrobatchError, match="Both `schedule='gpipe'` and `custom_schedule`"):
        microbatch(loss, 0, 2, schedule="gpipe", custom_schedule=[["a"]])
    microbatch(loss, 0, 2, schedule="custom", custom_schedule=[["a"]])


def test_arg_shardings_that_do_not_fit():
    with pytest.raises(ShardingError, match="has `3` entries but the array has `2` dims"):
        microbatch(jnp.sum, 0, 2, arg_shardings=P("a", "b", "c"))(X)
    with pytest.raises(MicrobatchError, match=r"`arg_shardings=.*` is no prefix of the batch"):
        microbatch(loss, 0, 2, 1, arg_shardings={"z": P("a")})(W, BATCH)


# --- prepared batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_prepared_batches_keep_shape_and_row_order(dim):
    rows = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    prepared = prepare_batch({"x": rows}, dim, 2)["x"]
    assert prepared.shape == (8, 8) and prepared.ndim == 2 and len(prepared) == 8
    assert prepared.dtype == rows.dtype and prepared.nbytes == rows.nbytes
    assert prepared.num_microbatches == 4 and prepared.stored.shape[0] == 4
    np.testing.assert_array_equal(np.asarray(prepared), rows)
    assert np.asarray(prepared, dtype=np.float16).dtype == np.float16
    np.testing.assert_array_equal(prepared.stored[1], rows.take([2, 3], axis=dim))


def test_prepared_batches_are_sharded_inside_a_microbatch():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    prepared = prepare_batch(BATCH, 0, 4, sharding=NamedSharding(mesh, P("data")))
    for array in prepared.values():
        assert array.stored.sharding.spec == P(None, "data")
    assert prepared["x"].stored.addressable_shards[0].data.shape == (2, 2, 3)


def test_prepared_batches_of_device_arrays():
    prepared = prepare_batch(jnp.asarray(X), 0, 2)
    np.testing.assert_array_equal(np.asarray(prepared), X)


def test_prepared_batches_check_their_rows():
    with pytest.raises(MicrobatchError, match=r"batch\['x'\] has `8` rows"):
        prepare_batch(BATCH, 0, 3)
    with pytest.raises(MicrobatchError, match="`dim=5` does not exist"):
        prepare_batch(X, 5, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda b: jax.jit(lambda x: x + 1)(b),
        lambda b: jax.jit(lambda x: x + 1).lower(b),
        lambda b: jax.grad(lambda x: x.sum())(b),
        jnp.sin,
        microbatch(jnp.sum, 0, 2),
    ],
)
def test_plain_jax_does_not_take_prepared_batches(use):
    with pytest.raises(MicrobatchError) as error:
        use(prepare_batch(X, 0, 2))
    assert "MicrobatchedArray(shape=(8, 3), dtype=float32, num_microbatches=4, dim=0)" in str(
        error.value
    )
    assert "numpy.asarray(batch)" in str(error.value)


def test_prepared_batches_are_leaves():
    prepared = prepare_batch(BATCH, 0, 2)
    assert all(isinstance(leaf, MicrobatchedArray) for leaf in jax.tree.leaves(prepared))
