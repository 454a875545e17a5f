"""`enable_recomputation`: cheap values are made on every submesh, or made once and sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import MultiMesh, context, mjit

pytestmark = pytest.mark.core


def forward(weights, x):
    mask = jnp.cos(jnp.arange(4.0))
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w) * mask
    return x


@pytest.mark.parametrize(("enabled", "num_masks_sent"), [(True, 0), (False, 1)])
def test_cheap_values_are_sent_only_without_recomputation(enabled, num_masks_sent):
    weights, x = [np.eye(4, dtype=np.float32)] * 2, np.ones((2, 4), np.float32)
    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi_mesh.register_layers(r"layer\d", num_layers=2)
    with multi_mesh, context(enable_recomputation=enabled):
        step = mjit(forward)
    sent = [r for r in step.lower(weights, x).explain().reshards if r.type == "float32[4]"]
    assert len(sent) == num_masks_sent
    np.testing.assert_allclose(step(weights, x), jax.jit(forward)(weights, x), rtol=1e-6)
