"""The golden file, made by an independent simulator, is reproduced entirely."""

import json
from pathlib import Path

import pytest

from multimesh._src.schedule.check import check
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.simulate import simulate

CASES = json.loads((Path(__file__).parent / "schedule_golden.json").read_text())
NAMES = sorted({case["schedule"] for case in CASES})


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    cases = [case for case in CASES if case["schedule"] == name]
    for case in cases:
        schedule = make_schedule(
            name,
            num_ranks=case["p"],
            num_microbatches=case["m"],
            num_chunks=case["v"],
        )
        check(schedule)
        costs = {kind: float(case[kind]) for kind in "FBW"}
        simulation = simulate(schedule, costs=costs, latency=float(case["latency"]))
        found = {
            "makespan": simulation.makespan,
            "peak_until_b": list(simulation.peaks.until_b),
            "peak_until_w": list(simulation.peaks.until_w),
        }
        if "rows" in case:
            found["rows"] = schedule.as_text().splitlines()
        assert found == {key: case[key] for key in found}, case
    assert any("rows" in case for case in cases)


def test_every_schedule_is_in_the_golden_file():
    assert len(NAMES) == 9
