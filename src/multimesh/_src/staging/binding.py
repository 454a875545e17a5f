"""The contexts that a function sees: those of its call, or those it was made in.

A function made inside a context is bound to it and may be called anywhere, except inside another
`MultiMesh`: there it is unclear which one is meant. A function made outside every context uses the
ones that are active at the call. `ignore_transforms` at the call holds for both.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from multimesh._src import config
from multimesh._src.errors import MeshError, message
from multimesh._src.frontend.contexts import ActiveContexts, Context, active_contexts
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tracing import Surroundings
from multimesh._src.jax_compat import avals


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a function takes its contexts from.

    Attributes:
        name: Name of the function, for errors.
        bound: The contexts that it was made in; None: it takes those of each call.
        multi_mesh: Made of `mjit(mesh=)`; used where no other `MultiMesh` is active.
        devices: What `TaskMesh` numbers index; None: those of the mesh, else `jax.devices()`.
    """

    name: str
    bound: ActiveContexts | None
    multi_mesh: MultiMesh | None
    devices: tuple[Any, ...] | None

    def key(self) -> Hashable:
        """Returns the part of a cache key that contexts and JAX's own settings make.

        The contexts of the call are in JAX's trace context; `config` puts them there.

        Raises:
            MeshError: The function is bound to another `MultiMesh` than the active one.
        """
        if self.bound is None:
            return avals.trace_context()
        self._check_mesh(config.state().contexts)
        return avals.trace_context(), tuple(c.cache_key for c in self.bound.contexts)

    def contexts(self) -> ActiveContexts:
        """Returns the contexts and settings that hold for a call made here."""
        active = active_contexts()
        chosen = active
        if self.bound is not None and self.bound.contexts != active.contexts:
            self._check_mesh(active.contexts)
            settings = self.bound.settings
            if active.settings.ignore_transforms:
                settings = dataclasses.replace(settings, ignore_transforms=True)
            chosen = ActiveContexts(self.bound.contexts, settings)
        if self.multi_mesh is not None and chosen.global_mesh is None:
            contexts = (*chosen.contexts[:-1], self.multi_mesh, chosen.contexts[-1])
            settings = dataclasses.replace(chosen.settings, autoshard=True)
            chosen = ActiveContexts(contexts, settings)
        return chosen

    def _check_mesh(self, contexts: Sequence[Any]) -> None:
        active = next((c for c in contexts if isinstance(c, MultiMesh)), None)
        if active is None or active is self.bound.multi_mesh:  # pyright: ignore[reportOptionalMemberAccess]
            return
        raise MeshError(
            message(
                f"`{self.name}` was made in `{self.bound.multi_mesh!r}` and is called inside "  # pyright: ignore[reportOptionalMemberAccess]
                f"`{active!r}`.",
                ways=(
                    "call it outside of the other MultiMesh.",
                    "make it outside of every context: it then uses the one at each call.",
                ),
            )
        )

    def surroundings(self, contexts: ActiveContexts) -> Surroundings:
        """Returns what tracing has to know of the contexts."""
        mesh = contexts.global_mesh
        devices = self.devices
        if devices is None:
            devices = tuple(mesh.devices.flat) if mesh is not None else tuple(jax.devices())
        return Surroundings(
            matcher=contexts.matcher(devices),
            settings=contexts.settings,
            global_mesh=mesh,
            devices=devices,
            schedule=contexts.settings.schedule,
        )


def make_binding(
    name: str, mesh: Mesh | MultiMesh | None = None, devices: Sequence[Any] | None = None
) -> Binding:
    """Binds a function made here to the contexts that are entered here, if any.

    Args:
        name: Name of the function, for errors.
        mesh: A global mesh for where no `MultiMesh` is active.
        devices: What `TaskMesh` numbers index.

    Raises:
        MeshError: `mesh` is not the mesh of the active `MultiMesh`.
    """
    active = active_contexts()
    bound = active if len(active.contexts) > 1 else None
    multi_mesh = MultiMesh(global_mesh=mesh) if mesh is not None else None
    if multi_mesh is not None and active.global_mesh not in (None, multi_mesh.global_mesh):
        raise MeshError(
            message(
                f"`mjit(mesh=)` of `{name}` is `{mesh!r}`, but `{active.multi_mesh!r}` is active.",
                ways=("leave out `mesh=`.",),
            )
        )
    return Binding(name, bound, multi_mesh, None if devices is None else tuple(devices))


def registered(contexts: Sequence[Context]) -> tuple[str, ...]:
    """Returns the matchers that are registered with some contexts."""
    return tuple(r.matcher for context in contexts for r in context.registrations)
