"""What a device holds: plans with known sizes."""

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, Task, mjit

SIZE = 4 * 64 * 64  # of one array


def chain(num_stages=2, width=1):
    """A MultiMesh with `layer<i>` on stage i."""
    devices = np.array(jax.devices()[: num_stages * width]).reshape(num_stages, width)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    multi_mesh.register_task(
        r"layer\d", callback=lambda name, _: Task(mesh_slice={"stage": int(name[5:])})
    )
    return multi_mesh


def forward(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = x @ w
    return x


def report_of(donate=None, width=1):
    array = np.ones((64, 64), np.float32)
    with chain(width=width):
        return mjit(forward, donate_argnums=donate).lower([array, array], array).explain()


def test_state_is_what_lives_there_and_peak_what_is_made_besides():
    first, second = report_of().submeshes
    assert (first.state_bytes, second.state_bytes) == (2 * SIZE, SIZE)
    assert first.peak_bytes == 3 * SIZE, "w, x and y"
    assert second.peak_bytes == 2 * SIZE, "w, and the copy of y, over which z is written"


def test_a_result_written_over_an_argument_takes_no_memory():
    assert report_of(donate=1).submeshes[0].peak_bytes == 2 * SIZE


def test_replicated_arrays_count_on_every_device():
    assert [s.state_bytes for s in report_of(width=2).submeshes] == [2 * SIZE, SIZE]


def test_sharded_arrays_count_their_shards():
    array = np.ones((64, 64), np.float32)
    multi_mesh = chain(width=2)
    with multi_mesh:
        specs = ([None, None], jax.sharding.PartitionSpec("data"))
        report = mjit(forward, in_shardings=specs).lower([array, array], array).explain()
    first, second = report.submeshes
    assert first.state_bytes == SIZE + SIZE // 2
    assert second.peak_bytes == SIZE + SIZE // 2
