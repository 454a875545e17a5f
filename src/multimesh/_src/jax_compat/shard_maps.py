"""`shard_map`: which mesh it takes while we trace, and how its equations are read and placed.

    jax.shard_map(f, mesh=global_mesh, ...)     with the mesh (stage=2, data=2)
    in scope `layer1` of the slice stage=1  ->  shard_map[mesh=Lent(stage=1, data=2), ...]

The body of a `shard_map` has the shapes of one shard, so it has to be traced on a mesh of the right
sizes. Programs make `shard_map` functions anywhere and call them while we trace; every call asks
JAX's `_shmap_checks` for its mesh. In threads that trace for us that function is answered with a
*lent* mesh: abstract, with Auto axes, and it remembers what the user gave. JAX keeps the answer for
the next call of the same function, so a lent mesh is always taken back for what the user gave.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Private names, all of `jax._src`:
`shard_map._shmap_checks` and `_check_specs_vs_args` (their text becomes part of our errors);
`core.unshard_aval_handlers` (results of a `shard_map` would name its mesh in their types);
`core.NamedAxisEffect`, by name. Without them a `shard_map` keeps the mesh that it names, and runs
there; one without a mesh has to be `multimesh.jax.shard_map`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from multimesh._src.errors import ShardingError, message
from multimesh._src.jax_compat import jaxprs, private

core: Any = None
shard_map: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import core, shard_map

Lender: TypeAlias = Callable[[Any, frozenset[str]], "LentMesh"]

_ACTIVE = threading.local()  # .lender: set in threads that trace for us
_LOCK = threading.RLock()
_PATCHED = ("_shmap_checks", "_check_specs_vs_args")
_originals: dict[str, Any] = {}
_users = 0


class LentMesh(AbstractMesh):
    """The mesh on which one call of a `shard_map` is traced.

    Attributes:
        given: What the user gave: a mesh or None.
        home: The mesh with devices that has these axes, where the call stands. None inside another
            `shard_map`.
        label: How users see it: `stage=1`.
        line: The user's `file:line` of the call.
    """

    __slots__ = ("given", "home", "label", "line")

    given: Mesh | AbstractMesh | None
    home: Mesh | None
    label: str
    line: str

    @property
    def plain(self) -> AbstractMesh:
        """The same axes as one of JAX's own meshes."""
        return AbstractMesh(self.axis_sizes, self.axis_names, axis_types=self.axis_types)


def lent_mesh(home: Mesh, given: Mesh | AbstractMesh | None, label: str, line: str) -> LentMesh:
    """Makes a lent mesh with the axes of `home`, of type Auto; see `LentMesh`."""
    types = (AxisType.Auto,) * len(home.axis_names)
    return _lent(home, types, given=given, home=home, label=label, line=line)


def _lent(mesh: Mesh | AbstractMesh, axis_types: tuple[AxisType, ...], **own: Any) -> LentMesh:
    fields = {
        "axis_sizes": tuple(mesh.shape.values()),
        "axis_names": tuple(mesh.axis_names),
        "axis_types": axis_types,
        "abstract_device": None,
        "size": mesh.size,
        **own,
    }
    # JAX's constructor would give one of its own meshes: equal ones are one object.
    lent = object.__new__(LentMesh)
    for name, value in fields.items():
        object.__setattr__(lent, name, value)
    return lent


# --- while we trace ------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether calls of `jax.shard_map` can be lent a mesh."""
    return all(hasattr(shard_map, name) for name in _PATCHED)


@contextlib.contextmanager
def lending(lender: Lender) -> Iterator[None]:
    """Within it, in this thread, every call of a `shard_map` is traced on the mesh it is lent.

    Args:
        lender: Called with what the user gave as mesh (None: nothing), and the axes that specs
            name. Calls inside another `shard_map` are left to JAX.
    """
    if not is_available():
        yield
        return
    _acquire()
    before = getattr(_ACTIVE, "lender", None)
    _ACTIVE.lender = lender
    try:
        yield
    finally:
        _ACTIVE.lender = before
        _release()


def _acquire() -> None:
    global _users
    with _LOCK:
        _users += 1
        if _users > 1:
            return
        _originals["unshard"] = core.unshard_aval_handlers[core.ShapedArray]
        core.unshard_aval_handlers[core.ShapedArray] = _unshard
        _originals["_check_specs_vs_args"] = shard_map._check_specs_vs_args
        shard_map._check_specs_vs_args = _check_specs_vs_args
        # This one stays: meshes that were lent are still to be taken back later.
        if "_shmap_checks" not in _originals:
            _originals["_shmap_checks"] = shard_map._shmap_checks
            shard_map._shmap_checks = _shmap_checks


def _release() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            core.unshard_aval_handlers[core.ShapedArray] = _originals["unshard"]
            shard_map._check_specs_vs_args = _originals["_check_specs_vs_args"]


def _shmap_checks(mesh: Any, axis_names: Any, in_specs: Any, out_specs: Any, *rest: Any) -> Any:
    check = _originals["_shmap_checks"]
    mesh = mesh.given if isinstance(mesh, LentMesh) else mesh
    lender, around = getattr(_ACTIVE, "lender", None), jax.sharding.get_abstract_mesh()
    if lender is None or not (mesh is None or isinstance(mesh, (Mesh, AbstractMesh))):
        return check(mesh, axis_names, in_specs, out_specs, *rest)
    if around.empty:
        lent = lender(mesh, _axes_in((in_specs, out_specs)))
        return _fitting(lent, check, lent, axis_names, in_specs, out_specs, *rest)
    chosen, names = check(mesh, axis_names, in_specs, out_specs, *rest)
    return _lent(chosen, chosen.axis_types, given=mesh, home=None, label="", line=""), names


def _check_specs_vs_args(f: Any, mesh: Any, *rest: Any) -> Any:
    check = _originals["_check_specs_vs_args"]
    if not isinstance(mesh, LentMesh):
        return check(f, mesh, *rest)
    return _fitting(mesh, check, f, mesh, *rest)


def _fitting(lent: LentMesh, check: Callable[..., Any], *args: Any) -> Any:
    """Calls one of JAX's checks; what it refuses becomes an error of ours."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        raise ShardingError(
            message(
                f"a `shard_map` does not fit `{lent.label}`, whose axes are `{dict(lent.shape)}`.",
                where=lent.line,
                window=str(error),
                ways=(
                    "let the specs and `axis_names` name axes of that mesh, whose sizes divide "
                    "the dims",
                    "give `mesh=`: the global mesh, or the submesh that is meant",
                ),
            )
        ) from error


def _axes_in(specs: Any) -> frozenset[str]:
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    entries = [entry for leaf in leaves if isinstance(leaf, PartitionSpec) for entry in leaf]
    return frozenset(
        name
        for entry in entries
        if isinstance(entry, (str, tuple))
        for name in ((entry,) if isinstance(entry, str) else entry)
    )


def _unshard(mesh: Any, check_vma: bool, spec: Any, aval: Any) -> Any:
    """The type of a result of a `shard_map`, which names no mesh when that is lent."""
    result = _originals["unshard"](mesh, check_vma, spec, aval)
    if not isinstance(mesh, LentMesh) or not jax.sharding.get_abstract_mesh().empty:
        return result
    return core.ShapedArray(result.shape, result.dtype, weak_type=result.weak_type)


# --- equations -----------------------------------------------------------------------------------


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `shard_map`."""
    return eqn.primitive.name == "shard_map"


def collective_axes(eqn: JaxprEqn) -> frozenset[str]:
    """The mesh axes that the body of a `shard_map` names: in collectives, in `axis_index`."""
    effects: Iterator[Any] = (
        effect for inner in jaxprs.all_eqns(eqn.params["jaxpr"]) for effect in inner.effects
    )
    named = [effect for effect in effects if type(effect).__name__ == "NamedAxisEffect"]
    return frozenset(str(getattr(effect, "name", "")) for effect in named)


def on_submesh(jaxpr: ClosedJaxpr, fits: Callable[[LentMesh], None]) -> ClosedJaxpr:
    """Returns a body whose `shard_map`s run on the devices that the body runs on.

    Args:
        jaxpr: The body of a task.
        fits: Called with each lent mesh; raises where the task runs on another one.
    """

    @functools.cache
    def plain(lent: LentMesh) -> AbstractMesh:
        fits(lent)
        return lent.plain

    def rewrite(eqn: JaxprEqn) -> JaxprEqn:
        if not is_shard_map(eqn) or not isinstance(eqn.params["mesh"], LentMesh):
            return eqn
        return jaxprs.replace_eqn(eqn, params={**eqn.params, "mesh": plain(eqn.params["mesh"])})

    return jaxprs.map_eqns(jaxpr, rewrite)


def holds_shard_map(eqn: JaxprEqn, known: dict[int, tuple[Any, bool]]) -> bool:
    """Whether an equation is a `shard_map` or has one inside.

    Args:
        eqn: Any equation.
        known: What is known of jaxprs, by identity; grows.
    """
    return is_shard_map(eqn) or any(_has(j, known) for j in jaxprs.sub_jaxprs(eqn.params))


def _has(jaxpr: Any, known: dict[int, tuple[Any, bool]]) -> bool:
    if id(jaxpr) not in known:
        found = any(holds_shard_map(eqn, known) for eqn in jaxprs.open_jaxpr(jaxpr).eqns)
        known[id(jaxpr)] = (jaxpr, found)  # holds the jaxpr, or its id could be used again
    return known[id(jaxpr)][1]


def call_on(
    f: Callable[..., Any], mesh: Mesh | AbstractMesh | None, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Calls `jax.shard_map`, with a mesh where one is given."""
    return jax.shard_map(f, **options) if mesh is None else jax.shard_map(f, mesh=mesh, **options)
