r"""Matching: from an equation's path to the task and the submesh it belongs to (R2, R4, R6).

    path ("model", "layer1", "attn"), backprop False
      prefix model/layer1/attn: no matcher touches `attn`
      prefix model/layer1:      `layer\d+` touches `layer1`  ->  callback("layer1", False)
      -> Task(mesh_slice={"stage": 1})  ->  Match("layer1", mesh of stage 1, label "stage=1")

Contexts are asked innermost first, then prefixes longest first, then matchers in the order of
their registration. A callback that returns None says "not a task", and the search goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from multimesh._src.errors import MatchError, MeshError, message
from multimesh._src.frontend.markers import task_marker
from multimesh._src.frontend.registrations import Registration
from multimesh._src.frontend.tasks import LogicalAxes, Task, TaskMesh
from multimesh._src.ir.scope import Scope
from multimesh._src.topology import Index, describe_axes, devices_label, slice_label, slice_mesh

_Key = tuple[tuple[str, ...], bool, int | None]


@dataclass(frozen=True, slots=True)
class Match:
    """What a scope says of its equation."""

    name: str  # Task.name; default: the matched text
    text: str  # what the first group of the matcher matched
    mesh: Mesh  # the submesh, with all axis names and the user's axis types
    label: str  # `stage=1`, or `devices 0-3`
    pairs: tuple[tuple[str, str], ...]  # (logical axis, mesh axis), highest priority first
    stage: int | None
    task: Task = field(hash=False)
    scanned: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """One context as the matcher sees it: its registrations and the mesh that they slice."""

    registrations: tuple[Registration, ...]
    mesh: Mesh | None


@dataclass(frozen=True, slots=True, eq=False)
class Matcher:
    """A frozen snapshot of the active contexts, innermost first.

    `devices` are those that `TaskMesh` numbers index where no `MultiMesh` is active; None stands
    for `jax.devices()`.
    """

    levels: tuple[Level, ...] = ()
    devices: tuple[Any, ...] | None = None
    _found: dict[_Key, Match | None] = field(default_factory=dict)
    _explicit: dict[tuple[str, int | None], Match | None] = field(default_factory=dict)
    _groups: dict[str, tuple[Match, str]] = field(default_factory=dict)

    def of_scope(self, scope: Scope, iteration: int | None = None) -> Match | None:
        """Returns the match of a scope: the innermost explicit task around it, else `find`."""
        for component in reversed(scope.markers):
            explicit = task_marker(component)
            if explicit is None:
                continue
            key = (component, iteration)
            if key not in self._explicit:
                name = explicit.task.name or "task"
                self._explicit[key] = self.match_of(explicit.task, name, iteration=iteration)
            return self._explicit[key]
        return self.find(scope.path, scope.backprop, iteration)

    def find(
        self, path: tuple[str, ...], backprop: bool, iteration: int | None = None
    ) -> Match | None:
        """Returns what the path of an equation says, or None when no task matches.

        Args:
            path: Names of the scopes, outermost first.
            backprop: Whether a transpose stands in the scope.
            iteration: The iteration of the unrolled loop around the equation. Without it, tasks
                that need one (`scanned=True`, only a `loop_dependent_mesh_slice`) do not match.

        Raises:
            MatchError: A callback returned no `Task`, a `Task` cannot be used, or a name has two
                device sets.
            MeshError: A slice or a device number does not exist.
        """
        key = (path, backprop, iteration)
        if key not in self._found:
            found = (
                self.match_of(task, text, level.mesh, iteration, registration)
                for level, registration, text, task in self._hits(path, backprop, iteration)
            )
            self._found[key] = next((match for match in found if match is not None), None)
        return self._found[key]

    def registration_of(
        self, scope: Scope, iteration: int | None = None
    ) -> tuple[Registration, str] | None:
        """Returns the registration that decides a scope, and the matched text."""
        if any(task_marker(component) for component in scope.markers):
            return None
        hits = self._hits(scope.path, scope.backprop, iteration)
        return next(((registration, text) for _, registration, text, _ in hits), None)

    def needs_iteration(self, path: tuple[str, ...], backprop: bool) -> bool:
        """Whether the task of a path depends on the iteration of the loop around it (R11)."""
        for _, registration, _, task in self._hits(path, backprop, iteration=0):
            return registration.scanned or task.loop_dependent_mesh_slice is not None
        return False

    @property
    def matchers(self) -> tuple[str, ...]:
        """All registered matchers, in the order in which they are asked."""
        return tuple(r.matcher for level in self.levels for r in level.registrations)

    @property
    def scopes_seen(self) -> tuple[str, ...]:
        """The distinct scopes that were looked up so far, for warnings."""
        return tuple(sorted({"/".join(path) for path, _, _ in self._found if path}))

    def _hits(
        self, path: tuple[str, ...], backprop: bool, iteration: int | None
    ) -> Iterator[tuple[Level, Registration, str, Task]]:
        """Yields the matchers that touch the path and give a task, in the order of R2."""
        for level in self.levels:
            for length in range(len(path), 0, -1):
                for registration in level.registrations:
                    text = registration.touch(path[:length])
                    if text is None or (registration.scanned and iteration is None):
                        continue
                    if registration.scanned:
                        text = f"{text}_{iteration}"
                    task = registration.task_of(text, backprop)
                    if task is not None:
                        yield level, registration, text, task

    def match_of(
        self,
        task: Task,
        text: str,
        mesh: Mesh | None = None,
        iteration: int | None = None,
        registration: Registration | None = None,
    ) -> Match | None:
        """Returns the match of a task, its submesh resolved; also used for explicit tasks.

        Args:
            task: What the user wrote.
            text: The matched text, or the default name of an explicit task.
            mesh: The mesh that `mesh_slice` slices. Default: that of the innermost `MultiMesh`.
            iteration: The iteration of the loop, for `loop_dependent_mesh_slice`.
            registration: Where the task comes from, for errors. Default: an explicit task.

        Returns:
            The match, or None when the submesh depends on an iteration and there is none.
        """
        mesh = mesh if mesh is not None else self.global_mesh
        where = str(registration) if registration else f"explicit task `{text}`"
        name = _checked_name(task, text, where)
        _check_suffixes(task, where)
        place = self._place(task, mesh, iteration, where)
        if place is None:
            return None
        submesh, label = place
        match = Match(
            name=name,
            text=text,
            mesh=submesh,
            label=label,
            pairs=_pairs(task, submesh, where),
            stage=_checked_stage(task, where),
            task=task,
            scanned=registration is not None and registration.scanned,
        )
        if task.loop_dependent_mesh_slice is None:
            self._check_one_submesh(match, where)
        return match

    @property
    def global_mesh(self) -> Mesh | None:
        """The mesh of the innermost `MultiMesh`, if one is active."""
        return next((level.mesh for level in self.levels if level.mesh is not None), None)

    def _place(
        self, task: Task, mesh: Mesh | None, iteration: int | None, where: str
    ) -> tuple[Mesh, str] | None:
        """Returns submesh and label of a task."""
        _check_one_place(task, where)
        if task.mesh is not None:
            submesh = self._given_mesh(task.mesh, mesh, where)
            return submesh, devices_label(list(submesh.devices.flat))
        index = _mesh_slice(task, iteration, where)
        if index is None:
            return None
        if mesh is None:
            raise MatchError(
                message(
                    f"`mesh_slice={dict(index)}` slices the active `MultiMesh`, but none is "
                    "active.",
                    where=where,
                    ways=("enter a `MultiMesh`.", "give the task a `mesh=TaskMesh(...)`."),
                )
            )
        try:
            return slice_mesh(mesh, index), slice_label(index)
        except MeshError as error:
            error.add_note(f"  at {where}")
            raise

    def _given_mesh(self, given: TaskMesh | Mesh, mesh: Mesh | None, where: str) -> Mesh:
        if isinstance(given, Mesh):
            return given
        if not isinstance(given, TaskMesh):
            raise MatchError(
                message(
                    f"`mesh={given!r}` is no mesh.",
                    where=where,
                    ways=("give a `TaskMesh` or a `jax.sharding.Mesh`.",),
                )
            )
        try:
            return given.on(self._numbered_devices(mesh))
        except MeshError as error:
            error.add_note(f"  at {where}")
            raise

    def _numbered_devices(self, mesh: Mesh | None) -> Sequence[Any]:
        if mesh is not None:
            return list(mesh.devices.flat)
        return jax.devices() if self.devices is None else self.devices

    def _check_one_submesh(self, match: Match, where: str) -> None:
        """Checks that the name of a task has stood for the same device set before (R4)."""
        first, first_where = self._groups.setdefault(match.name, (match, where))
        if set(first.mesh.devices.flat) == set(match.mesh.devices.flat):
            return
        raise MatchError(
            message(
                f"Task name `{match.name}` stands for two device sets: `{first.label}` "
                f"({_ids(first.mesh)}) and `{match.label}` ({_ids(match.mesh)}).",
                window=f"{first.label}: {first_where}, text `{first.text}`\n"
                f"{match.label}: {where}, text `{match.text}`   <-- here",
                ways=(
                    "give tasks on different submeshes different names.",
                    "use `loop_dependent_mesh_slice` if the submesh follows the iteration.",
                ),
            )
        )


def _ids(mesh: Mesh) -> str:
    return devices_label(list(mesh.devices.flat))


def _checked_name(task: Task, text: str, where: str) -> str:
    name = text if task.name is None else task.name
    if not isinstance(name, str) or not name:
        raise MatchError(message(f"`{name!r}` is no name of a task.", where=where))
    return name


def _checked_stage(task: Task, where: str) -> int | None:
    stage = task.stage
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or stage < 0):
        raise MatchError(
            message(f"`stage={stage!r}`: a stage is an integer of at least 0.", where=where)
        )
    return stage


def _check_suffixes(task: Task, where: str) -> None:
    suffixes = task.split_backprop
    is_pair = isinstance(suffixes, (tuple, list)) and len(suffixes) == 2
    if suffixes is None or (is_pair and all(isinstance(suffix, str) for suffix in suffixes)):
        return
    raise MatchError(
        message(
            f"`split_backprop={suffixes!r}` is no pair of suffixes.",
            where=where,
            ways=('give two, as `split_backprop=("_activations", "_gradients")`.',),
        )
    )


def _check_one_place(task: Task, where: str) -> None:
    sliced = task.mesh_slice is not None or task.loop_dependent_mesh_slice is not None
    if sliced != (task.mesh is not None):
        return
    given = "both `mesh` and `mesh_slice`" if sliced else "neither `mesh` nor `mesh_slice`"
    raise MatchError(
        message(
            f"`Task(name={task.name!r})` has {given}.",
            where=where,
            ways=(
                "give `mesh_slice`, a slice of the active `MultiMesh` (`{}` is all of it).",
                "give `mesh`, a `TaskMesh` of device numbers.",
            ),
        )
    )


def _mesh_slice(task: Task, iteration: int | None, where: str) -> Mapping[str, Index] | None:
    """The slice of a task in an iteration; None where it depends on one and there is none."""
    index, field_name = task.mesh_slice, "mesh_slice"
    if task.loop_dependent_mesh_slice is not None and iteration is not None:
        field_name = f"loop_dependent_mesh_slice({iteration})"
        try:
            index = task.loop_dependent_mesh_slice(iteration)
        except Exception as error:
            error.add_note(f"`loop_dependent_mesh_slice` raised this for `{iteration}` at {where}.")
            raise
    if index is None or isinstance(index, Mapping):
        return index
    raise MatchError(
        message(
            f"`{field_name}={index!r}` is no mapping from mesh axes to indices.",
            where=where,
            ways=('name the axis, as `mesh_slice={"stage": 0}`; `{}` is the whole mesh.',),
        )
    )


def _pairs(task: Task, mesh: Mesh, where: str) -> tuple[tuple[str, str], ...]:
    """Returns the (logical, mesh axis) pairs of a task; by default an axis maps to itself."""
    if task.logical_axes is None:
        pairs = [(name, name) for name in mesh.axis_names]
    else:
        pairs = _flat_pairs(task.logical_axes, "logical_axes", where)
    pairs += _flat_pairs(task.extra_axes or (), "extra_axes", where)
    for logical, axis in pairs:
        if axis not in mesh.axis_names:
            raise MatchError(
                message(
                    f"Logical axis `{logical}` maps to the unknown mesh axis `{axis}`.",
                    where=where,
                    ways=(f"map it to an axis of the submesh: {describe_axes(mesh)}.",),
                )
            )
    return tuple(pairs)


def _flat_pairs(axes: LogicalAxes, field_name: str, where: str) -> list[tuple[str, str]]:
    entries = tuple(axes.items() if isinstance(axes, Mapping) else axes)
    flat: list[tuple[str, str]] = []
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise MatchError(
                message(
                    f"`{field_name}` has the entry `{entry!r}`.",
                    where=where,
                    ways=('write pairs of names, as `(("batch", "data"), ("mlp", "model"))`.',),
                )
            )
        logical, device_axes = entry
        if device_axes is None:
            continue
        names = device_axes if isinstance(device_axes, tuple | list) else (device_axes,)
        flat.extend((logical, name) for name in names)
    return flat
