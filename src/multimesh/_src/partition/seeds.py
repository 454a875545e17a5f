r"""Seeds: which equations are given a submesh, and by what.

    with named_scope("layer0"):  y = x @ w      # the scope matches `layer\d+`: seed of `stage=0`
    z = y * 2                                   # no match: no seed, placed by `assign`

A scope inside an explicit `task(...)` belongs to that task; otherwise the registered matchers
decide (R2). Equations that hold other jaxprs (a scan or a remat region that stays whole)
take the seed of what is inside them when their own scope says nothing. A `shard_map` that was
traced on another mesh than that of its scope stands on that mesh, with all that it is inside of.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from multimesh._src.errors import MatchError, message
from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.matching import Match, Matcher
from multimesh._src.frontend.scopes import in_iteration, iteration_of, scope_of_equation
from multimesh._src.frontend.shard_maps import mesh_called_for
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import Equation, FlatProgram, all_equations, all_with_trip_counts
from multimesh._src.ir.scope import Scope
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat import jaxprs, shard_maps
from multimesh._src.topology import devices_label


@dataclass(slots=True)
class Seeds:
    """Looks up seeds, and numbers the submeshes in the order in which they are found."""

    matcher: Matcher
    submeshes: list[Submesh] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _inside: dict[tuple[int, Scope, int | None], tuple[Match, ...]] = field(default_factory=dict)
    _layers: dict[tuple[int, Scope], bool] = field(default_factory=dict)
    _meshes: dict[int, tuple[Mesh, ...]] = field(default_factory=dict)
    _called_for: dict[tuple[int, Scope, bool], tuple[int, ...]] = field(default_factory=dict)
    _shard_maps: dict[int, tuple[Any, bool]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def number(self, mesh: Mesh, label: str) -> int:
        """The index of the submesh on `mesh`, which is added when it is new."""
        key = (mesh.axis_names, mesh.devices.shape, tuple(d.id for d in mesh.devices.flat))
        if key not in self._numbers:
            self._numbers[key] = len(self.submeshes)
            self.submeshes.append(Submesh(len(self.submeshes), label, mesh))
        return self._numbers[key]

    def submesh_of(self, match: Match) -> int:
        """The index of the submesh that a match names."""
        return self.number(match.mesh, match.label)

    def rotating(self, equation: Equation, length: int) -> int:
        """The index of the submesh of a task whose place depends on the iteration of its loop.

        Raises:
            MatchError: The submeshes of two iterations differ in their axes.
        """
        matches = [self.of_equation(equation, iteration) for iteration in range(length)]
        found = [match for match in matches if match is not None]
        for match in found:
            if match.mesh.shape != found[0].mesh.shape:
                raise MatchError(
                    message(
                        f"task `{match.name}` rotates over submeshes of unlike axes: "
                        f"`{dict(found[0].mesh.shape)}` and `{dict(match.mesh.shape)}`.",
                        ways=("let `loop_dependent_mesh_slice` give slices of one size",),
                    )
                )
        rotation = tuple(self.submesh_of(match) for match in found)
        if len(set(rotation)) == 1:
            return rotation[0]
        if rotation not in self._numbers:
            labels = dict.fromkeys(self.submeshes[index].label for index in rotation)
            label = f"rotating over {', '.join(labels)}"
            self._numbers[rotation] = len(self.submeshes)
            self.submeshes.append(Submesh(len(self.submeshes), label, found[0].mesh, rotation))
        return self._numbers[rotation]

    def of_scope(self, scope: Scope, iteration: int | None = None) -> Match | None:
        """The match of an equation with this scope, in an iteration of the loop around it."""
        written_out = iteration_of(scope)
        if written_out is not None:
            return self.matcher.of_scope(scope, written_out)
        match = self.matcher.of_scope(scope, iteration)
        return None if match is not None and match.scanned else match

    def has_layers(self, eqn: Any, scope: Scope) -> bool:
        """Whether the iterations of a scan are layers (`scanned=True`), each with a submesh.

        Microbatches are none, whatever scopes they hold, and neither is a scan inside of a layer.
        """
        if eqn.primitive.name != "scan" or iteration_of(scope) is not None:
            return False
        if any(map(microbatch_marker, scope_of_equation(eqn).markers)):
            return False
        key = (id(eqn), scope)
        if key not in self._layers:
            self._alive.append(eqn)
            self._layers[key] = any(
                match.scanned
                for inner in _scopes_of_iteration(eqn, scope)
                if (match := self.matcher.of_scope(inner, 0)) is not None
            )
        return self._layers[key]

    def of_equation(self, equation: Equation, iteration: int | None = None) -> Match | None:
        """The match of an equation: of its scope in an iteration of its loop, or of its inside."""
        if equation.primitive == "add_any":
            return None  # autodiff gives it the scope of one of its users
        own = self.of_scope(equation.scope, iteration)
        if own is not None:
            return own
        return next(iter(self.inside(equation.eqn, equation.scope, iteration)), None)

    def inside(self, eqn: Any, scope: Scope, iteration: int | None = None) -> tuple[Match, ...]:
        """The distinct matches inside the jaxprs of `eqn`, in program order.

        Of a loop inside they are those of its first iteration.
        """
        key = (id(eqn), scope, iteration)
        if key not in self._inside:
            self._alive.append(eqn)  # keeps the id from being used again
            self._inside[key] = tuple(dict.fromkeys(self._walk(eqn, scope, iteration)))
        return self._inside[key]

    def num_submeshes_inside(self, eqn: Any, scope: Scope) -> int:
        """How many submeshes the jaxprs of `eqn` touch; a rotating one counts as two."""
        matches = self.inside(eqn, scope)
        rotates = any(match.task.loop_dependent_mesh_slice is not None for match in matches)
        touched = {self.submesh_of(match) for match in matches}
        touched |= {self.number(mesh, _label(mesh)) for mesh in self._meshes_inside(eqn)}
        return len(touched.union(self.called_for(eqn, scope))) + rotates

    def _meshes_inside(self, eqn: Any) -> tuple[Mesh, ...]:
        """The meshes on which values inside the jaxprs of `eqn` are placed by hand."""
        if id(eqn) not in self._meshes:
            self._alive.append(eqn)
            inner = (e for j in jaxprs.sub_jaxprs(eqn.params) for e in jaxprs.open_jaxpr(j).eqns)
            found = (mesh for e in inner for mesh in (_placed_on(e), *self._meshes_inside(e)))
            self._meshes[id(eqn)] = tuple(dict.fromkeys(mesh for mesh in found if mesh is not None))
        return self._meshes[id(eqn)]

    def called_for(self, eqn: Any, scope: Scope, *, in_loop: bool = False) -> tuple[int, ...]:
        """The submeshes that `shard_map`s call for, where it is not that of their scope.

        Raises:
            PartitionError: One was traced on a mesh that it cannot have.
        """
        if not shard_maps.holds_shard_map(eqn, self._shard_maps):
            return ()
        key = (id(eqn), scope, in_loop)
        if key not in self._called_for:
            self._alive.append(eqn)
            self._called_for[key] = tuple(dict.fromkeys(self._calls(eqn, scope, in_loop)))
        return self._called_for[key]

    def _calls(self, eqn: Any, scope: Scope, in_loop: bool) -> Iterator[int]:
        if shard_maps.is_shard_map(eqn):
            match = self.of_scope(scope, 0 if in_loop else None)
            mesh = mesh_called_for(eqn, match, self.matcher.global_mesh)
            if mesh is not None:
                yield self.number(*mesh)
            return
        in_loop = in_loop or eqn.primitive.name == "scan"
        for jaxpr in jaxprs.sub_jaxprs(eqn.params):
            for inner in jaxprs.open_jaxpr(jaxpr).eqns:
                joined = scope.join(scope_of_equation(inner))
                yield from self.called_for(inner, joined, in_loop=in_loop)

    def _walk(self, eqn: Any, scope: Scope, iteration: int | None) -> Iterator[Match]:
        if self.has_layers(eqn, scope):
            for layer in range(eqn.params["length"]):
                yield from self._walk_jaxprs(eqn, in_iteration(scope, id(eqn), layer), iteration)
        else:
            iteration = 0 if eqn.primitive.name == "scan" else iteration
            yield from self._walk_jaxprs(eqn, scope, iteration)

    def _walk_jaxprs(self, eqn: Any, scope: Scope, iteration: int | None) -> Iterator[Match]:
        for jaxpr in jaxprs.sub_jaxprs(eqn.params):
            for inner in jaxprs.open_jaxpr(jaxpr).eqns:
                joined = scope.join(scope_of_equation(inner))
                is_sum = inner.primitive.name == "add_any"
                match = None if is_sum else self.of_scope(joined, iteration)
                if match is not None:
                    yield match
                yield from self.inside(inner, joined, iteration)


def _placed_on(eqn: Any) -> Mesh | None:
    """The mesh that a constraint names, where it places its value by hand."""
    return eqn.params["mesh"] if eqn.primitive is constraint_p else None


def _label(mesh: Mesh) -> str:
    return devices_label(list(mesh.devices.flat))


def _scopes_of_iteration(eqn: Any, scope: Scope) -> Iterator[Scope]:
    """The scopes inside a scan, those inside scans within it left out."""
    for jaxpr in jaxprs.sub_jaxprs(eqn.params):
        for inner in jaxprs.open_jaxpr(jaxpr).eqns:
            joined = scope.join(scope_of_equation(inner))
            yield joined
            if inner.primitive.name != "scan":
                yield from _scopes_of_iteration(inner, joined)


def find_seeds(flat: FlatProgram, seeds: Seeds) -> tuple[dict[int, Match], dict[int, int]]:
    """Returns the match of every seed, and the submesh of every seed, by serial."""
    match: dict[int, Match] = {}
    seeded: dict[int, int] = {}
    for equation, length in all_with_trip_counts(flat.steps):
        found = seeds.of_equation(equation, 0 if length else None)
        if found is not None:
            match[equation.serial] = found
            rotates = found.task.loop_dependent_mesh_slice is not None
            seeded[equation.serial] = (
                seeds.rotating(equation, length) if rotates else seeds.submesh_of(found)
            )
        mesh = _placed_on(equation.eqn)
        if mesh is not None:
            seeded[equation.serial] = seeds.number(mesh, _label(mesh))
            match.pop(equation.serial, None)
        called_for = seeds.called_for(equation.eqn, equation.scope, in_loop=length > 0)
        if called_for:
            seeded[equation.serial] = called_for[0]
            match.pop(equation.serial, None)
    return match, seeded


def backward_names(
    seeds: Seeds, flat: FlatProgram, match: Mapping[int, Match]
) -> Callable[[str], str]:
    """The name that a task's backward has by its own matcher, else the name with a suffix."""
    scopes = {
        match[equation.serial].name: equation.scope
        for equation in all_equations(flat.steps)
        if equation.serial in match and not equation.scope.backprop
    }

    def name_of(name: str) -> str:
        scope = scopes.get(name)
        found = scope and seeds.of_scope(replace(scope, transposes=1))
        return found.name if found else name

    return name_of
