"""Compares a program on submeshes with plain JAX (R1), over several calls."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh.jax import TaskMesh, ignore_transforms, mjit
from tests import oracle


def compare_with_plain(
    fun: Callable[..., Any],
    *args: Any,
    submesh: tuple[int, ...] = (1,),
    context: AbstractContextManager[Any] | None = None,
    donate: Sequence[int] = (),
    num_calls: int = 2,
    plain: Callable[..., Any] | None = None,
) -> Any:
    """Calls `mjit(fun)` several times and compares each result; returns the last."""
    plain = plain or fun
    host = jax.tree.map(np.asarray, args)
    names = tuple("abc"[: len(submesh)])
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(submesh))]).reshape(submesh), names)
    with ignore_transforms():
        reference_a = oracle.reference_a(plain, *host)
        reference_b = oracle.reference_b(plain, mesh, host)
        truth = oracle.Oracle(plain, *host)(*host)
    step = mjit(fun, donate_argnums=tuple(donate))
    results = None
    with context or nullcontext():
        for _ in range(num_calls):
            given = tuple(
                jax.tree.map(lambda x: jax.device_put(x, getattr(x, "sharding", None)), arg)
                if i not in donate
                else jax.tree.map(lambda x: x + 0, arg)
                for i, arg in enumerate(args)
            )
            results = step(*given)
            oracle.compare(results, reference_a, reference_b, truth).check()
            for i in donate:
                assert all(x.is_deleted() for x in jax.tree.leaves(given[i]))
    return results


def on(first: int, sizes: Sequence[int] = (1,), names: Sequence[str] = ("x",)) -> TaskMesh:
    """A TaskMesh of consecutive devices."""
    devices = range(first, first + int(np.prod(sizes)))
    return TaskMesh(devices=devices, axis_sizes=tuple(sizes), axis_names=tuple(names))


def sharded(x: Any, number: int, spec: P) -> Any:
    """`x` on the first devices, on axes a and b of sizes (number, 1)."""
    mesh = Mesh(np.array(jax.devices()[:number]).reshape(number, 1), ("a", "b"))
    return jax.device_put(x, NamedSharding(mesh, spec))


def device_ids(x: Any) -> set[int]:
    """Where an array lies."""
    return {device.id for device in x.sharding.device_set}
