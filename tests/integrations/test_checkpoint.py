"""Checkpoints: training goes on as if nothing had happened, on any mesh, with or without us."""

import asyncio
import dataclasses
import shutil
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.runtime import counters
from multimesh.jax import checkpoint, errors, mjit, parallelize
from tests.integrations import training

SIZES = (2, 2, 2)  # stage, data, model


class Trained(NamedTuple):
    """A step, and what a run of four steps without interruption gave; all on the host."""

    step: Any
    compiled: Any
    path: Any  # of the checkpoint after two steps
    saved: Any
    after_four: Any
    donated: Any  # the state after two steps, which the third was given


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    step = training.make_step(*SIZES)
    path = tmp_path_factory.mktemp("run") / "2"
    donated = training.run(step, training.make_state(), 2)
    saved = on_host(donated)
    checkpoint.save(path, donated)
    after_four = on_host(training.run(step, donated, 2))
    return Trained(step, training.compiled(step), path, saved, after_four, donated)


@pytest.mark.parametrize("like", ["compiled", "donated"])
@pytest.mark.parametrize("step", ["compiled", "step"])
def test_training_goes_on_as_if_it_had_not_been_interrupted(trained, like, step):
    state = checkpoint.restore(trained.path, getattr(trained, like))
    assert training.same_bits(on_host(state), trained.saved)
    assert training.lie_alike(state, trained.donated)

    before = counters.snapshot()
    state = training.run(getattr(trained, step), state, 2)
    grown = counters.since(before)
    assert grown.argument_moves == 0
    assert (grown.traces, grown.compiles) == (0, 0)
    assert grown.argument_puts == 2 * len(training.BATCH), "only the batch comes from the host"
    assert training.same_bits(on_host(state), trained.after_four)


@pytest.mark.parametrize(
    ("sizes", "explicit"), [((1, 4, 1), False), ((2, 1, 1), True)], ids=["one-stage", "two-devices"]
)
def test_other_meshes_and_back(trained, tmp_path, sizes, explicit):
    step = training.make_step(*sizes, explicit=explicit)
    compiled = training.compiled(step)
    state = checkpoint.restore(trained.path, compiled)
    assert training.same_bits(on_host(state), trained.saved)
    assert training.lie_alike(state, checkpoint.abstract_state(compiled))

    before = counters.snapshot()
    state = training.run(compiled, state, 1)
    assert counters.since(before).argument_moves == 0
    saved = on_host(trained.saved)  # a copy, because its key is donated
    expected = on_host(training.run(compiled, saved, 1))
    assert training.same_bits(on_host(state), expected)

    checkpoint.save(tmp_path / "3", state)
    back = checkpoint.restore(tmp_path / "3", trained.compiled)
    assert training.same_bits(on_host(back), expected)


def test_plain_jax_reads_ours(trained):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    state = jax.device_put(trained.saved, NamedSharding(mesh, P()))
    plain = jax.jit(lambda state: state.apply_gradients(grads=state.params)).lower(state).compile()
    restored = checkpoint.restore(trained.path, plain)
    assert training.same_bits(plain(restored).params, plain(state).params)

    fresh = training.make_state()
    restored = checkpoint.restore(trained.path, fresh)
    assert training.same_bits(restored.replace(step=0), trained.saved.replace(step=0))
    assert restored.step == 2 and type(restored.step) is int
    assert not restored.params["w0"].committed

    restored = ocp.StandardCheckpointer().restore(trained.path, state)
    assert training.same_bits(restored, trained.saved)


def test_ours_reads_plain_jax(trained, tmp_path):
    state = training.make_state()  # its counter is a Python number
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", state)
    restored = checkpoint.restore(tmp_path / "0", trained.compiled)
    assert training.lie_alike(restored, trained.donated)
    ours = training.run(trained.compiled, restored, 4)
    assert training.same_bits(on_host(ours), trained.after_four)


def test_a_served_jit_is_a_step_too(trained):
    with training.make_multi_mesh(*SIZES):
        lowered = jax.jit(training.train_step).lower(
            jax.eval_shape(training.make_state), training.BATCH
        )
        compiled = lowered.compile()
        state = checkpoint.restore(trained.path, compiled)
    assert training.lie_alike(state, trained.donated)


# --- Orbax's own manager -------------------------------------------------------------------------


def test_the_manager_keeps_the_newest_and_steps_may_donate_while_it_writes(
    trained, tmp_path, monkeypatch
):
    may_write = hold_writes(monkeypatch)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        state, expected = checkpoint.restore(trained.path, trained.compiled), {}
        for number in (2, 3, 4):
            manager.save(number, args=ocp.args.StandardSave(state))
            expected[number] = on_host(state)
            state = training.run(trained.step, state, 1)
            assert manager.latest_step() == number
            may_write.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]
        for number in (3, 4):
            path = manager.directory / str(number)
            restored = checkpoint.restore(path, trained.compiled)
            assert training.same_bits(on_host(restored), expected[number])
        target = checkpoint.abstract_state(trained.compiled)
        restored = manager.restore(4, args=ocp.args.StandardRestore(target))
        assert training.lie_alike(restored, trained.donated)
        assert training.same_bits(on_host(restored), trained.after_four)


def test_what_is_being_written_is_not_overwritten(trained, tmp_path, monkeypatch):
    may_write = hold_writes(monkeypatch)
    state = checkpoint.restore(trained.path, trained.compiled)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "2", state)
        training.run(trained.step, state, 3)
        assert not (tmp_path / "2").exists(), "not written yet"
        may_write.set()
    restored = checkpoint.restore(tmp_path / "2", trained.compiled)
    assert training.same_bits(on_host(restored), trained.saved)


def hold_writes(monkeypatch) -> threading.Event:
    """Lets Orbax's background thread write only after the event."""
    from orbax.checkpoint._src.serialization import serialization

    event = threading.Event()
    write = serialization.async_serialize_from_host

    async def held(*args: Any, **kwargs: Any) -> Any:
        await asyncio.to_thread(event.wait)
        return await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", held)
    return event


# --- what is read, and where to ------------------------------------------------------------------


def test_no_device_ever_holds_what_it_does_not_own(trained, monkeypatch):
    arrived: Counter[Any] = Counter()
    device_put = jax.device_put

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = device_put(*args, **kwargs)
        arrived.update(bytes_held(made))
        return made

    monkeypatch.setattr(jax, "device_put", counted)
    state = checkpoint.restore(trained.path, trained.compiled)
    assert arrived == bytes_held(state)
    whole = sum(x.nbytes for x in jax.tree.leaves(trained.saved.replace(key=None)))
    assert max(arrived.values()) < whole


def bytes_held(tree: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(tree):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard in (jax.random.key_data(leaf) if is_key else leaf).addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    x: Any
    y: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def test_leaves_of_every_kind(tmp_path):
    place = NamedSharding(Mesh(np.array(jax.devices()[6:]), ("data",)), P("data"))
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P())
    state = {
        "by number": {0: np.zeros(1), 1: np.ones(1)},
        "numbers": (True, 3, 2.5, np.float32(1.5), np.arange(3)),
        "free": [jnp.ones(2), jnp.asarray(3), jnp.bfloat16(1), jax.random.key(4)],
        "record": Record(jax.device_put(jnp.arange(4, dtype=jnp.int8), place), None),
        "pair": Pair((), {"a.b": jax.device_put(jnp.ones(4, bool), place)}),
        "weak": jax.device_put(2.0, everywhere),
        "keys": jax.device_put(jax.random.split(jax.random.key(0, impl="rbg"), 2), place),
    }
    checkpoint.save(tmp_path / "all", state)
    restored = checkpoint.restore(tmp_path / "all", state)
    assert training.same_bits(restored, state)
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    for ours, given in pairs:
        assert type(ours) is type(given)
        if isinstance(given, jax.Array):
            assert (ours.sharding, ours.committed) == (given.sharding, given.committed)
            assert ours.aval.weak_type == given.aval.weak_type


def test_types_without_a_place_come_to_the_host(tmp_path):
    state = [jnp.ones(2), jnp.bfloat16(1), jax.random.key(4)]
    checkpoint.save(tmp_path / "new folder" / "1", state)
    *arrays, key = checkpoint.restore(tmp_path / "new folder" / "1", jax.eval_shape(lambda: state))
    assert [type(x) for x in arrays] == [np.ndarray] * 2
    assert training.same_bits([*arrays, key], state)


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("here", {"x": np.ones(2)})
    assert checkpoint.restore("here", {"x": np.zeros(2)})["x"].tolist() == [1, 1]


def test_arguments_that_the_step_does_not_use_stay_on_the_host(tmp_path):
    place = NamedSharding(Mesh(np.array(jax.devices()[4:]), ("data",)), P("data"))
    state = {"unused": jnp.ones((2, 3)), "used": jax.device_put(jnp.arange(4.0), place)}
    step = mjit(lambda scale, *, state: state["used"] * scale)
    compiled = step.lower(2.0, state=state).compile()
    checkpoint.save(tmp_path / "state", state)
    restored = checkpoint.restore(tmp_path / "state", compiled, argnum="state")
    assert isinstance(restored["unused"], np.ndarray)
    assert restored["used"].sharding == place
    assert compiled(2.0, state=restored).tolist() == [0, 2, 4, 6]
    assert checkpoint.abstract_state(compiled, argnum="state")["unused"].sharding is None


def test_the_compiled_model_of_parallelize(tmp_path):
    def model(params, x):
        with jax.named_scope("layer1"):
            return x @ params["w"]

    params = {"w": jnp.ones((4, 4))}
    with training.make_multi_mesh(2, 2, 2):
        compiled, init = parallelize(
            model, init_params=lambda: params, initial_batch=np.ones((2, 4), np.float32)
        )
        checkpoint.save(tmp_path / "params", params)
        restored = checkpoint.restore(tmp_path / "params", compiled)
    assert training.lie_alike(restored, init())
    assert len(restored["w"].sharding.device_set) == 4


# --- errors --------------------------------------------------------------------------------------

STATE = {"w": np.ones((2, 4), np.float32), "count": np.int32(3), "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "7"
    checkpoint.save(path, STATE)
    return path


def test_a_path_without_checkpoint(tmp_path, small):
    with pytest.raises(errors.MissingCheckpointError, match=r"no checkpoint at `.*/nothing`\.$"):
        checkpoint.restore(tmp_path / "nothing", STATE)
    with pytest.raises(FileNotFoundError, match=r"holds checkpoints: `7`\.[^$]*restore one, `.*7`"):
        checkpoint.restore(small.parent, STATE)


def test_a_checkpoint_that_is_not_complete(tmp_path, small):
    half = tmp_path / "7.orbax-checkpoint-tmp"  # where Orbax writes until all is there
    shutil.copytree(small, half)
    with pytest.raises(errors.CheckpointError, match=r"7\.orbax.*` is not complete"):
        checkpoint.restore(half, STATE)


def test_a_checkpoint_with_several_items(tmp_path):
    for item in ("params", "state"):
        checkpoint.save(tmp_path / item, {"x": np.ones(1)})
    with pytest.raises(errors.CheckpointError, match="several items: `params`, `state`"):
        checkpoint.restore(tmp_path, {"x": np.ones(1)})


def test_another_tree(small):
    like = {"w": STATE["w"], "key": STATE["key"], "layers": [{"b": np.ones(1)}]}
    with pytest.raises(errors.CheckpointError) as error:
        checkpoint.restore(small, like)
    assert "`['layers'][0]['b']` is only in `like`." in str(error.value)
    assert "`['count']` is only stored." in str(error.value)


def test_another_shape_or_dtype(small):
    like = {**STATE, "w": np.ones((4, 4), np.float32), "count": np.float32(3)}
    with pytest.raises(errors.CheckpointError) as error:
        checkpoint.restore(small, like)
    assert "`['w']` is stored as `float32[2,4]`, but is `float32[4,4]` in `like`" in str(
        error.value
    )
    assert "`['count']` is stored as `int32[]`, but is `float32[]`" in str(error.value)


@pytest.mark.parametrize("stored", [jax.random.key(0), jax.random.key_data(jax.random.key(0))])
def test_keys_and_integers_are_not_confused(tmp_path, stored):
    data = jax.random.key_data(jax.random.key(0))
    other = jax.random.key(0) if stored.dtype == data.dtype else data
    checkpoint.save(tmp_path / "key", {"key": stored})
    like = jax.device_put({"key": other}, jax.devices()[1])
    with pytest.raises(errors.CheckpointError, match=r"`\['key'\]` is stored as .* in `like`"):
        checkpoint.restore(tmp_path / "key", like)


def test_a_step_that_is_not_compiled(small):
    step = mjit(lambda state: state["w"])
    for like in (step, step.trace(STATE), step.lower(STATE), jax.jit(lambda state: state)):
        with pytest.raises(errors.CheckpointError, match=r"not compiled[^$]*step\.lower\(state"):
            checkpoint.restore(small, like)


def test_a_like_that_is_no_state(small):
    with pytest.raises(errors.CheckpointError, match=r"`\['w'\]` is a `str`"):
        checkpoint.restore(small, {"w": "float32"})


def test_an_argument_that_the_step_does_not_have(small):
    compiled = mjit(lambda state: state["w"]).lower(STATE).compile()
    for argnum in (1, "state"):
        with pytest.raises(errors.TraceError, match="no argument of the compiled step: it has 1"):
            checkpoint.restore(small, compiled, argnum=argnum)


def test_states_that_cannot_be_saved(small, tmp_path):
    deleted = jnp.ones(2)
    deleted.delete()
    state = {"name": "mlp", "empty": jnp.ones((0, 2)), "deleted": deleted}
    with pytest.raises(errors.CheckpointError) as error:
        checkpoint.save(tmp_path / "x", state)
    for text in (
        "`['name']` is a `str`",
        "`['empty']` has no elements, `[0, 2]`",
        "`['deleted']` is deleted; if a step was given it as donated",
    ):
        assert text in str(error.value)
    with pytest.raises(errors.CheckpointError, match="a single array"):
        checkpoint.save(tmp_path / "x", jnp.ones(2))
    with pytest.raises(errors.CheckpointError, match="no arrays"):
        checkpoint.save(tmp_path / "x", {"nothing": None})
    with pytest.raises(errors.CheckpointError, match=r"7` exists[^$]*overwrite=True"):
        checkpoint.save(small, STATE)
    checkpoint.save(tmp_path / "y", {"x": np.ones(1)})
    checkpoint.save(tmp_path / "y", {"x": np.zeros(2)}, overwrite=True)
    assert checkpoint.restore(tmp_path / "y", {"x": np.zeros(2)})["x"].tolist() == [0, 0]


def test_without_orbax(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'multimesh-jax\[orbax\]'"):
        checkpoint.restore(small, STATE)
    assert checkpoint.abstract_state(STATE)["w"].shape == (2, 4), "it needs no Orbax"


def on_host(tree: Any) -> Any:
    return jax.tree.map(to_host, tree)


def to_host(x: Any) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.asarray(jax.random.key_data(x)))
    return np.array(x)
