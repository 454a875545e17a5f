"""Every private name of JAX that is used, one file per corner of JAX.

`ENTRIES` lists them with the versions on which each was checked. Nothing outside this package may
import `jax._src` or `jaxlib`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of this package: the private names it uses and what happens without them."""

    file: str
    names: tuple[str, ...]
    versions: tuple[str, ...]
    without: str


_ALL = ("0.10.2", "0.11.2", "0.12.0.1")

ENTRIES = (
    Entry(
        file="avals.py",
        names=(
            "jax._src.config.trace_context, use_simplified_jaxpr_constants",
            "jax._src.core.pytype_aval_mappings, ShapedArray",
            "jax._src.array.ArrayImpl, jax._src.random.prng.PRNGKeyArray",
            "jax._src.util.cache",
        ),
        versions=_ALL,
        without="functions cannot close over arrays on several Explicit meshes",
    ),
    Entry(
        file="backends.py",
        names=("jax._src.xla_bridge.backends_are_initialized",),
        versions=_ALL,
        without="JAX itself refuses a late change of the number of CPU devices",
    ),
    Entry(
        file="compiled.py",
        names=(
            "jax.stages.Compiled._executable, _params; attributes of the loaded executable",
            "jax._src.array.ArrayImpl with _pjrt_layout",
            "jax._src.config: the values local to a thread",
        ),
        versions=_ALL,
        without="tasks are called by jax.stages.Compiled.__call__; thread-local settings of JAX "
        "do not hold in the threads that compile; measuring waits for tasks whose results are all "
        "donated",
    ),
    Entry(
        file="constraints.py",
        names=(
            "jax._src.pjit.sharding_constraint_p",
            "code of jax.lax.with_sharding_constraint, flax.core.meta.global_mesh_defined, "
            "flax.linen.spmd.with_logical_constraint",
        ),
        versions=_ALL,
        without="bare specs need `multimesh.jax.with_sharding_constraint`",
    ),
    Entry(
        file="copies.py",
        names=(
            "jax._src.lib._jax.batched_copy_array_to_devices_with_sharding, ArrayCopySemantics",
            "jax._src.array.ArrayImpl with _arrays, Sharding._internal_device_list",
            "jax._src.core.ShapedArray, update_aval_with_sharding",
            "jax._src.random.prng.PRNGKeyArray with _base_array, _impl of key dtypes",
        ),
        versions=_ALL,
        without="values are copied by jax.device_put, which may go through the host",
    ),
    Entry(
        file="effects.py",
        names=(
            "jax._src.effects.ordered_effects",
            "params of debug_callback and io_callback",
        ),
        versions=_ALL,
        without="ordered effects are told by the names of their classes",
    ),
    Entry(
        file="jaxprs.py",
        names=(
            "jax._src.core.eval_jaxpr",
            "jax._src.effects.JaxprInputEffect",
            "jax._src.interpreters.partial_eval.make_jaxpr_effects",
            "params of scan: num_consts, num_carry; ft_in",
        ),
        versions=_ALL,
        without="nothing works: programs cannot be read",
    ),
    Entry(
        file="jit_calls.py",
        names=(
            "jax._src.pjit._infer_params, _run_python_pjit, jit_trace, _cpp_pjit and what it asks",
            "_fun and _jit_info of what jax.jit returns; jax._src.sharding_impls.UNSPECIFIED",
        ),
        versions=_ALL,
        without="plain jax.jit inside a context stays plain JAX: mjit is needed",
    ),
    Entry(
        file="jit_hook.py",
        names=(
            "jax._src.pjit.jit_p with its impl and params, jax._src.sharding_impls.UNSPECIFIED",
            "jax._src.core.trace_state_clean, jax.stages.Traced._consts",
        ),
        versions=_ALL,
        without="mjit functions cannot be transformed eagerly",
    ),
    Entry(
        file="manual.py",
        names=("manual_axis_type of avals and of jax.ShapeDtypeStruct",),
        versions=_ALL,
        without="microbatch inside shard_map needs check_vma=False",
    ),
    Entry(
        file="name_stack.py",
        names=(
            "jax._src.source_info_util.Transform",
            "jax._src.source_info_util.current_name_stack",
            "jax._src.source_info_util.current, user_frame, user_frames",
            "jax._src.source_info_util.SetNameStackContextManager",
            "NameStack.stack",
        ),
        versions=_ALL,
        without="the text of name stacks is parsed; scopes open around a call are not seen",
    ),
    Entry(
        file="placements.py",
        names=("code of jax.device_put and jax.reshard; params of their equations",),
        versions=_ALL,
        without="values inside programs are placed by `multimesh.jax.with_sharding_constraint`",
    ),
    Entry(
        file="plain_types.py",
        names=(
            "jax._src.core.ShapedArray with sharding and memory_space",
            "jax._src.core.JaxprEqnContext with cur_abstract_mesh and manager",
        ),
        versions=_ALL,
        without="programs cannot state shardings in their types, nor offload by a remat policy",
    ),
    Entry(
        file="shard_maps.py",
        names=(
            "jax._src.shard_map._shmap_checks, _check_specs_vs_args",
            "jax._src.core.unshard_aval_handlers, ShapedArray; NamedAxisEffect by name",
            "fields of jax.sharding.AbstractMesh; params of shard_map",
        ),
        versions=_ALL,
        without="a shard_map on the global mesh runs on all its devices; one without a mesh must "
        "be multimesh.jax.shard_map",
    ),
    Entry(
        file="shardy.py",
        names=(
            "jax._src.config.use_shardy_partitioner",
            "jaxlib.mlir.passmanager, jaxlib.mlir.dialects.sdy",
        ),
        versions=_ALL,
        without="layouts are asked of XLA by compiling; free arguments stay replicated",
    ),
)
