"""What `explain()` says of conditionals and whiles over several submeshes (R12)."""

import jax
import jax.numpy as jnp
from jax import lax

from multimesh.jax import mjit
from tests.report.small_step import make_multi_mesh


def layer(index, x, w):
    with jax.named_scope(f"layer{index}"):
        return jnp.tanh(x @ w)


def text_of(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    with make_multi_mesh():
        return mjit(function).lower(*args).explain().as_text()


def test_what_crosses_although_its_branch_may_not_be_taken():
    def function(v, w, x):
        def both():
            return layer(1, layer(0, x, v), w)

        return lax.cond(x.sum() > 0, both, lambda: layer(1, x, w))

    text = " ".join(text_of(function, (4, 4), (4, 4), (8, 4)).split())
    assert "it crosses even if its branch is not taken" in text
    assert "not cut" not in text


def test_a_while_is_named():
    def function(v, w, x):
        return lax.while_loop(lambda x: x.sum() > 0, lambda x: layer(1, layer(0, x, v), w), x)

    text = text_of(function, (4, 4), (4, 4), (8, 4))
    assert "While loop: layer0_fwd, layer1_fwd" in text
    assert "The host reads the condition before each iteration" in text
