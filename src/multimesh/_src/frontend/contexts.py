"""Contexts: where matchers are registered, and which of them are active.

Every thread has a stack of entered contexts. Below all stacks lies one default context for the
whole process, which takes what the module-level `register_task` registers outside of any context.
Entering sets no JAX mesh: eager code keeps its devices (R18).
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from multimesh._src import config
from multimesh._src.errors import MatchError, MeshError, message
from multimesh._src.frontend.matching import Level, Matcher
from multimesh._src.frontend.registrations import (
    Callback,
    Registration,
    make_layer_registration,
    make_registration,
)
from multimesh._src.frontend.tasks import Task
from multimesh._src.jax_compat.jit_calls import unserved
from multimesh._src.stages import plan_layers
from multimesh._src.topology import describe_axes

_identities = itertools.count()


class _Entered(threading.local):
    """The exits of the contexts that this thread has entered, outermost first."""

    def __init__(self):
        self.exits: list[tuple[Any, contextlib.AbstractContextManager[None]]] = []


_entered = _Entered()


class Context(contextlib.ContextDecorator):
    """A set of matchers that is active inside a `with` block or a decorated function.

    Contexts nest: the innermost is asked first.

    Example:
        >>> context = Context()
        >>> context.register_task(r"encoder", task=Task(mesh=TaskMesh(devices=[0, 1])))
        >>> with context:
        ...     pass
    """

    def __init__(self):
        self._identity = next(_identities)
        self._version = 0  # counts changes of the registrations
        self._registrations: tuple[Registration, ...] = ()

    @property
    def global_mesh(self) -> Mesh | None:
        """The mesh that tasks slice. None: that of the `MultiMesh` around this context."""
        return None

    @property
    def schedule(self) -> Any:
        """The schedule of microbatch loops that name none, or None."""
        return None

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """What is registered, in order."""
        return self._registrations

    @property
    def cache_key(self) -> tuple[int, int]:
        """Identity of this context and the number of changes of its registrations."""
        return (self._identity, self._version)

    def register_task(
        self,
        matcher: str,
        *,
        callback: Callback | None = None,
        task: Task | None = None,
        scanned: bool = False,
    ) -> None:
        r"""Says which scopes are tasks and where they run.

        Args:
            matcher: A regular expression that is searched in the path of scopes, as `r"layer\d+"`.
                Its first group, or the whole match, is the text that the callback gets. It never
                matches part of a number.
            callback: `callback(text, backprop) -> Task | None`, called once per pair of values.
                None says that the scope is no task.
            task: The task, instead of a callback.
            scanned: The scopes stand in a scan over layers: the text becomes `<text>_<iteration>`.

        Raises:
            MatchError: Both or none of callback and task, or an ill-formed matcher.
        """
        self._add(make_registration(matcher, callback, task, scanned))

    def register_layers(
        self,
        matcher: str,
        *,
        num_layers: int,
        axis: str = "stage",
        interleave: int = 1,
        placement: str = "loop",
        layers_per_stage: Sequence[int] | None = None,
        balance: Sequence[float] | None = None,
        scanned: bool = False,
    ) -> None:
        r"""Spreads numbered layers over the slices of a mesh axis, as pipeline stages.

        The layer is the last run of digits of the matched text, counted from 0; the text is the
        name of the task.

        Args:
            matcher: A regular expression, as `r"layer_\d+"`; see `register_task`.
            num_layers: Number of layers.
            axis: The mesh axis whose slices are the submeshes.
            interleave: Stages per submesh.
            placement: `"loop"` (stage s on submesh s mod p) or `"v"` (two stages a submesh, s and
                2p-1-s).
            layers_per_stage: Number of layers of each stage. Default: as even as possible.
            balance: Cost of each layer; the costliest stage then costs as little as possible.
            scanned: The layers are iterations of a scan, numbered in the order of the forward loop.

        Raises:
            MatchError: The numbers do not fit together.
            MeshError: There is no such axis, or no mesh.

        Example:
            >>> mesh = MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data"))
            >>> mesh.register_layers(r"layer\d+", num_layers=12, layers_per_stage=(2, 3, 3, 4))
        """
        stages = plan_layers(
            num_layers,
            _axis_size(self.global_mesh, axis, matcher),
            interleave=interleave,
            placement=placement,
            layers_per_stage=layers_per_stage,
            balance=balance,
        )
        self._add(make_layer_registration(matcher, stages, axis, scanned))

    def _add(self, registration: Registration) -> None:
        self._replace((*self._registrations, registration))

    def _replace(self, registrations: tuple[Registration, ...]) -> None:
        self._registrations = registrations
        self._version += 1
        if self is _default:
            config.set_process_cache_value(self.cache_key)
        config.refresh_cache_value()

    def __enter__(self) -> "Context":
        before = config.state()
        settings = before.settings
        if self.global_mesh is not None:
            settings = dataclasses.replace(settings, autoshard=True)
        if self.schedule is not None:
            settings = dataclasses.replace(settings, schedule=self.schedule)
        exit_ = config.entered(config.State(settings, (self, *before.contexts)))
        exit_.__enter__()
        _entered.exits.append((self, exit_))
        return self

    def __exit__(self, *error: Any) -> None:
        if not _entered.exits or _entered.exits[-1][0] is not self:
            raise MatchError(f"`{self!r}` is left, but it is not the context entered last.")
        _entered.exits.pop()[1].__exit__(None, None, None)


def _axis_size(mesh: Mesh | None, axis: str, matcher: str) -> int:
    mesh = mesh if mesh is not None else active_global_mesh()
    if mesh is None:
        raise MeshError(
            message(
                f"The layers `{matcher}` are spread over mesh axis `{axis}`, but there is no mesh.",
                ways=("register them with a `MultiMesh`, or inside one.",),
            )
        )
    if axis not in mesh.axis_names:
        raise MeshError(
            message(
                f"The layers `{matcher}` are spread over the unknown mesh axis `{axis}`.",
                where=f"a mesh with axes {describe_axes(mesh)}",
                ways=("give `axis=`, one of the axes above.",),
            )
        )
    return mesh.shape[axis]


_default: Context = Context()


@dataclass(frozen=True, slots=True)
class ActiveContexts:
    """The contexts and settings of one point of the program; the default context is the last."""

    contexts: tuple[Context, ...]
    settings: config.Settings

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Changes with everything that can change the meaning of a program here."""
        return (tuple(context.cache_key for context in self.contexts), self.settings)

    @property
    def global_mesh(self) -> Mesh | None:
        """The mesh of the innermost `MultiMesh`."""
        meshes = (context.global_mesh for context in self.contexts)
        return next((mesh for mesh in meshes if mesh is not None), None)

    @property
    def multi_mesh(self) -> Context | None:
        """The innermost `MultiMesh`."""
        return next((c for c in self.contexts if c.global_mesh is not None), None)

    @property
    def has_contexts(self) -> bool:
        """Whether any context was entered, or anything registered with the default one."""
        return len(self.contexts) > 1 or bool(_default.registrations)

    def matcher(self, devices: Sequence[Any] | None = None) -> Matcher:
        """Returns a frozen matcher of what is registered now.

        Args:
            devices: What `TaskMesh` numbers index where no `MultiMesh` is active.
        """
        levels = tuple(Level(c.registrations, c.global_mesh) for c in self.contexts)
        return Matcher(levels, None if devices is None else tuple(devices))

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Puts this thread into exactly these contexts and settings, for code of ours."""
        with config.entered(config.State(self.settings, self.contexts[:-1])), unserved():
            yield


def active_contexts() -> ActiveContexts:
    """Returns what is active at this point of this thread."""
    return ActiveContexts((*config.state().contexts, _default), config.current_settings())


def active_global_mesh() -> Mesh | None:
    """Returns the mesh of the innermost active `MultiMesh`, or None."""
    return active_contexts().global_mesh


def constraints_are_logical() -> bool:
    """Whether names in sharding constraints are logical axes at this point."""
    settings = config.state().settings
    return settings.autoshard and not settings.ignore_transforms


def register_task(
    matcher: str,
    *,
    callback: Callback | None = None,
    task: Task | None = None,
    scanned: bool = False,
) -> None:
    """Registers a task with the innermost active context, else for the whole process.

    See `Context.register_task`.
    """
    active_contexts().contexts[0].register_task(
        matcher, callback=callback, task=task, scanned=scanned
    )


def clear_tasks() -> None:
    """Forgets everything registered with the active contexts and with the default one."""
    for context in active_contexts().contexts:
        context._replace(())


@contextlib.contextmanager
def tasks(configurable: Callable[[], Any]) -> Iterator[None]:
    """Makes only the tasks active that a class or function registers, for a `with` block.

    Args:
        configurable: A class whose instances, when called, register tasks by `register_task`; or a
            function that does so. What was registered before comes back at the end.
    """
    before = [(context, context.registrations) for context in active_contexts().contexts]
    clear_tasks()
    try:
        made = configurable()
        if isinstance(configurable, type):
            made()
        yield
    finally:
        for context, registrations in before:
            context._replace(registrations)
