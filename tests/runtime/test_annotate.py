"""Names in profiler traces, and none where nobody asked."""

import warnings

import jax
import numpy as np
import pytest

from multimesh._src.runtime.annotate import trace_name, wants_profile
from multimesh._src.runtime.compiled_plan import compile_plan
from multimesh._src.runtime.timing import recording
from tests.runtime.plans import REPLICATED, PlanBuilder, submesh


class Recorder:
    alone = False

    def add(self, compiled, times):
        pass


def chain():
    builder = PlanBuilder()
    first, second = submesh(0, (0,)), submesh(1, (1,))
    x = builder.argument("x", (8,), first)
    add = builder.executable("layer0_fwd", lambda x: (x + 1,), first, [x], [REPLICATED])
    (y,) = builder.run(add, [x], iteration=3)
    z = builder.copy(y, second)
    other = builder.executable("update", lambda x: (x * 2,), second, [z], [REPLICATED])
    (out,) = builder.run(other, [z])
    return builder.plan(out)


def test_names_of_runs_and_copies() -> None:
    plan = chain()
    names = [trace_name(plan, step) for step in plan.steps]
    assert names == [
        ("layer0_fwd[3]", {"submesh": "stage=0", "microbatch": 3}),
        (f"copy {plan.steps[1].edge}", {"values": 1}),
        ("update", {"submesh": "stage=1"}),
    ]


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("MULTIMESH_PROFILE", value)
    assert wants_profile() is wanted


def stats_of(file, names):
    """What a trace says of the events of these names."""
    with warnings.catch_warnings():
        # jaxlib makes a type without `__module__`; where that warning is an error it aborts
        warnings.simplefilter("ignore")
        data = jax.profiler.ProfileData.from_file(str(file))  # owns all that is read below
        return {
            event.name: dict(event.stats)
            for plane in data.planes
            for line in plane.lines
            for event in line.events
            if event.name in names
        }


@pytest.mark.parametrize("recorded", [False, True])
def test_traces_show_our_names(monkeypatch: pytest.MonkeyPatch, tmp_path, recorded: bool) -> None:
    monkeypatch.setenv("MULTIMESH_PROFILE", "1")
    compiled = compile_plan(chain(), name="train_step")
    monkeypatch.delenv("MULTIMESH_PROFILE")
    x = jax.device_put(np.ones(8, np.float32), jax.devices()[0])
    compiled.call([x])
    with jax.profiler.trace(str(tmp_path)):
        if recorded:
            with recording(Recorder()):
                jax.block_until_ready(compiled.call([x]))
        else:
            jax.block_until_ready(compiled.call([x]))
    (file,) = tmp_path.glob("**/*.xplane.pb")
    copy = f"copy {compiled.buffered.plan.steps[1].edge}"
    found = stats_of(file, {"layer0_fwd[3]", "update", "train_step", copy})
    assert found["layer0_fwd[3]"]["microbatch"] == 3
    assert found["update"]["submesh"] == "stage=1"
    assert found["train_step"]["step_num"] == 1
    assert found[copy]["values"] == 1


def test_no_names_and_no_cost_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIMESH_PROFILE", raising=False)
    compiled = compile_plan(chain())
    assert not [call for call, *_ in compiled._steps if "annotated" in call.__qualname__]
