"""Which variant a call takes, without tracing anything."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.ir.plan import Input, Plan, SlotInfo
from multimesh._src.staging.variants import (
    Variant,
    VariantCache,
    dims_on,
    taken,
    user_sharding,
)

WHOLE = ((2, 2, 2), ("stage", "data", "model"))


@pytest.fixture
def whole() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(WHOLE[0]), WHOLE[1])


def stage(whole: Mesh, index: int) -> Mesh:
    return Mesh(whole.devices[index : index + 1], whole.axis_names)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (P(), ()),
        (P(None, None), ()),
        (P("data", None), (("data",),)),
        (P(("stage", "data"), "model"), (("data",), ("model",))),
        (P("stage"), ()),
        (P(None, "data"), ((), ("data",))),
        (P("other"), (("other",),)),
    ],
)
def test_retargeting(whole: Mesh, spec: P, dims: Any) -> None:
    assert dims_on(spec, stage(whole, 0)) == dims


def test_what_fits_an_argument(whole: Mesh) -> None:
    here, there = stage(whole, 0), stage(whole, 1)
    decided = taken(NamedSharding(here, P("data")), P(None, "model"), decided=True)
    free = taken(NamedSharding(here, P("data")), None, decided=False)
    assert decided.fits(NamedSharding(here, P("data", None)))
    assert decided.fits(NamedSharding(there, P("data")))  # moved
    assert decided.fits(NamedSharding(whole, P(("stage", "data"))))
    assert decided.fits(NamedSharding(whole, P(None, "model")))  # as it was traced
    assert not decided.fits(NamedSharding(here, P("model")))
    assert free.fits(NamedSharding(here, P("data")))
    assert not free.fits(NamedSharding(there, P("data")))
    assert not free.fits(NamedSharding(here, P()))


def test_host_and_single_device_arguments_fit_every_variant(whole: Mesh) -> None:
    take = taken(NamedSharding(stage(whole, 0), P("data")), None, decided=False)
    variant = Variant(list, None, (take,), False)
    one = Mesh(np.array(jax.devices()[5:6]), ("x",))
    for value in (
        np.ones(4),
        1.0,
        jax.numpy.ones(4),
        jax.device_put(np.ones(4), jax.devices()[3]),
        jax.device_put(np.ones(4), NamedSharding(one, P())),
    ):
        assert variant.fits([value])
    assert not variant.fits([jax.device_put(np.ones(4), NamedSharding(stage(whole, 1), P("data")))])


def test_plain_variants_fit_one_device_set(whole: Mesh) -> None:
    variant = Variant(list, None, (), True)
    first = jax.device_put(np.ones(4), NamedSharding(stage(whole, 0), P()))
    second = jax.device_put(np.ones(4), NamedSharding(stage(whole, 1), P()))
    assert variant.fits([first, first, np.ones(4), jax.numpy.ones(4)])
    assert not variant.fits([first, second])


def test_the_usual_call_compares_nothing_but_two_lists(whole: Mesh) -> None:
    take = taken(NamedSharding(stage(whole, 0), P("data")), None, decided=False)
    made = []

    def make() -> Variant:
        made.append(Variant(list, None, (take,), False))
        return made[-1]

    cache, sharding = VariantCache(), NamedSharding(stage(whole, 0), P("data"))
    arrays = [jax.device_put(np.ones(4, np.float32), sharding) for _ in range(2)]
    assert cache.find("key", arrays[:1], make) is made[0]
    fits = []
    Variant_fits = Variant.fits
    try:
        Variant.fits = lambda self, leaves: fits.append(1) or Variant_fits(self, leaves)
        assert cache.find("key", arrays[1:], make) is made[0]
        assert not fits
        assert cache.find("key", [np.ones(4, np.float32)], make) is made[0]
        assert fits
    finally:
        Variant.fits = Variant_fits
    assert cache.find("other", arrays[:1], make) is made[1]
    assert cache.find("key", [np.ones(5, np.float32)], make) is made[2]
    assert len(made) == 3


def test_a_failing_variant_is_not_kept() -> None:
    cache = VariantCache()

    def fail() -> Variant:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.find("key", [1.0], fail)
    variant = Variant(list, None, (None,), False)
    assert cache.find("key", [1.0], lambda: variant) is variant


def test_sharding_of_a_batch_as_the_user_holds_it(whole: Mesh) -> None:
    submesh = stage(whole, 0)
    stored = SlotInfo(
        jax.ShapeDtypeStruct((4, 3, 2, 5), np.float32),
        NamedSharding(submesh, P(None, None, "data", "model")),
        "batch",
    )
    plan = Plan((stored,), (), (), (), (), ())
    entry = Input(0, 0, "batch", (0,), False, microbatches=4, dim=1)
    assert user_sharding(plan, entry) == NamedSharding(submesh, P(None, "data", "model"))
    assert user_sharding(plan, Input(0, 0, "x", (), False)) is None
