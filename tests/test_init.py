"""`init` in fresh processes: what it sets, when it may be called, what it refuses."""

import os
import subprocess
import sys
import textwrap

import pytest


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    dropped = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def output(code: str, **env: str) -> str:
    done = run(code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = "print(jax.default_backend(), jax.device_count())"


def test_before_import_of_jax():
    code = f"""
        import sys
        from jax_plugins.multimesh import init
        assert "jax" not in sys.modules and "multimesh.jax" not in sys.modules
        init(cpus=3)
        assert "jax" not in sys.modules
        import jax
        {SHOW}
    """
    assert output(code) == "cpu 3"


def test_after_import_of_jax():
    code = f"""
        import jax, jax.numpy
        import multimesh.jax
        from jax_plugins.multimesh import init
        init(cpus=5)
        {SHOW}
    """
    assert output(code, JAX_PLATFORMS="cpu") == "cpu 5"


def test_replaces_the_older_flag():
    code = f"""
        from jax_plugins.multimesh import init
        init(cpus=2)
        import jax
        {SHOW}
        import os
        print(os.environ["XLA_FLAGS"])
    """
    flags = "--xla_force_host_platform_device_count=7 --xla_cpu_enable_fast_math=false"
    assert output(code, XLA_FLAGS=flags) == "cpu 2\n--xla_cpu_enable_fast_math=false"


def test_twice_with_equal_values_does_nothing_even_late():
    code = f"""
        from jax_plugins.multimesh import init
        init(cpus=2)
        import jax
        {SHOW}
        init(cpus=2)
        {SHOW}
    """
    assert output(code) == "cpu 2\ncpu 2"


def test_twice_with_other_values():
    code = """
        from jax_plugins.multimesh import init
        from multimesh._src.errors import InitError
        init(cpus=2)
        try:
            init(cpus=4)
        except InitError as error:
            print(error)
    """
    assert "`cpus=2`, now with `cpus=4`" in output(code)


def test_too_late():
    code = """
        import jax
        jax.devices()
        from jax_plugins.multimesh import init
        from multimesh._src.errors import InitError
        try:
            init(cpus=4)
        except InitError as error:
            print(error)
        print(jax.device_count())
    """
    text = output(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    assert "too late: JAX has already started `1` devices of platform `cpu`" in text
    assert "restart the notebook's kernel" in text
    assert text.endswith("\n1")


def test_jax_finds_the_plugin_and_starts_without_init():
    code = f"""
        import jax
        {SHOW}
        import sys
        print("jax_plugins.multimesh" in sys.modules)
    """
    assert output(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1") == "cpu 1\nTrue"


@pytest.mark.parametrize("before", ["import jax", ""])
def test_output_options(before: str, tmp_path):
    code = f"""
        import gc, os, logging
        {before}
        from jax_plugins.multimesh import init
        init(cpus=1, dump={str(tmp_path)!r}, dump_all_passes=True, profile=True, debug="info",
             disable_gc=True)
        print(os.environ["MULTIMESH_DUMP"] == {str(tmp_path)!r}, gc.isenabled())
        print(os.environ["MULTIMESH_DUMP_ALL_PASSES"], os.environ["MULTIMESH_PROFILE"])
        import jax
        print(jax.config.jax_logging_level)
    """
    assert output(code) == "True False\n1 1\nINFO"


def test_distributed_single_process():
    code = """
        import socket
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        from jax_plugins.multimesh import init
        init(cpus=2, distributed=True, coordinator_address=f"localhost:{port}", num_processes=1,
             process_id=0, initialization_timeout=30)
        import jax
        print(jax.process_count(), jax.device_count(), jax.distributed.is_initialized())
    """
    assert output(code) == "1 2 True"


def test_gpus_makes_the_first_visible():
    code = """
        import os
        from jax_plugins.multimesh import init
        init(gpus=2)
        print(os.environ["CUDA_VISIBLE_DEVICES"])
    """
    assert output(code) == "0,1"
    assert output(code, CUDA_VISIBLE_DEVICES="4,6,7") == "4,6"


REFUSED = [
    ("cpus=0", "`init(cpus=0)`: it must be at least 1."),
    ("cpus='8'", "`init(cpus='8')`: it must be an integer."),
    ("cpus=2, gpus=2", "`init(cpus=2, gpus=2)` asks for two platforms."),
    ("debug='loud'", "`init(debug='loud')`: it is one of ('info', 'debug', 'spew')."),
    ("dump_all_passes=True", "needs `dump=`"),
    ("num_processes=2", "`init(num_processes=2)` is given without `distributed=True`."),
    ("gpus=2", "`JAX_PLATFORMS=cpu` excludes them"),
]


def test_refused_values():
    calls = "\n".join(f"attempt(lambda: init({arguments}))" for arguments, _ in REFUSED)
    code = f"""
from jax_plugins.multimesh import init
from multimesh._src.errors import InitError
def attempt(call):
    try:
        call()
    except InitError as error:
        print(error, end="\\0")
{calls}
"""
    messages = output(code, JAX_PLATFORMS="cpu").split("\0")
    for (_, expected), text in zip(REFUSED, messages, strict=False):
        assert expected in text
    assert len(messages) == len(REFUSED) + 1


def test_legacy_arguments_warn_and_name_the_jax_way():
    code = """
        import warnings
        from jax_plugins.multimesh import init
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            init(cpus=2, fbmem=1, sysmem=1, zcmem=1, realm_argv=[], network="ucx", kthreads=2)
        for warning in caught:
            print(warning.category.__name__, warning.filename, warning.message)
        import jax
        print(jax.device_count())
    """
    lines = output(code).splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["DeprecationWarning", "<string>"]] * 6
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in lines[0]
    assert "XLA_FLAGS" in lines[3]
    assert lines[-1] == "2"


def test_unknown_argument():
    done = run("from jax_plugins.multimesh import init; init(cpu=8)")
    assert "unexpected keyword argument 'cpu'" in done.stderr


def test_names_that_were_not_carried_over():
    import multimesh.jax

    for name in ("shutdown", "set_startup_config", "compile_hlo_module", "no_op_custom_call"):
        with pytest.raises(AttributeError, match="does not exist on stock JAX: "):
            getattr(multimesh.jax, name)
    with pytest.raises(AttributeError, match="register_ffi_target"):
        _ = multimesh.jax.register_custom_call_target
    with pytest.raises(AttributeError, match="has no attribute `nothing`"):
        _ = multimesh.jax.nothing


def test_public_names_exist():
    import multimesh.jax

    assert multimesh.jax.__all__ == sorted(multimesh.jax.__all__)
    for name in multimesh.jax.__all__:
        assert getattr(multimesh.jax, name) is not None
