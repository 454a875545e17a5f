"""`MULTIMESH_DUMP=dir`: writes the text of every phase of every partitioned function.

    dir/0_step/0_inline.txt            the flat program after each pass
        0_step/1_simplify_loops.txt
        ...
        0_step/6_explain.txt           the tables of `explain()`
        0_step/programs/layer0_fwd.stablehlo.txt      with MULTIMESH_DUMP_ALL_PASSES=1

Functions are numbered in the order in which they are partitioned, on top of what the directory has.
The variables are read at every use; without the first one nothing is formatted or written.
"""

import contextlib
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from multimesh._src.errors import ConfigError, message
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.partition.pipeline import Partitioned, partition
from multimesh._src.report.labels import unique_labels
from multimesh._src.report.make import make_report
from multimesh._src.report.opened import open_loops
from multimesh._src.runtime.buffers import plan_buffers
from multimesh._src.runtime.compile import stablehlo

DIRECTORY = "MULTIMESH_DUMP"
ALL_PASSES = "MULTIMESH_DUMP_ALL_PASSES"


def partition_and_dump(traced: TracedFunction) -> Partitioned:
    """Partitions a function, and writes what every pass made of it where the user wants that.

    Raises:
        MultiMeshError: As `partition`; what was written so far stays.
        ConfigError: The directory cannot be written to.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return partition(traced)
    dump = Dump(_new_folder(Path(directory), traced.name))
    partitioned = partition(traced, dump.write)
    dump.write("explain", make_report(traced, partitioned).as_text())
    if os.environ.get(ALL_PASSES):
        dump.write_programs(partitioned)
    return partitioned


@final
@dataclass(slots=True)
class Dump:
    """Writes numbered files into one folder."""

    folder: Path
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def write(self, name: str, printed: str) -> None:
        """Writes one text."""
        (self.folder / f"{next(self._numbers)}_{name}.txt").write_text(printed + "\n")

    def write_programs(self, partitioned: Partitioned) -> None:
        """Writes the StableHLO of every program that a call runs."""
        folder = self.folder / "programs"
        folder.mkdir()
        programs = stablehlo(plan_buffers(open_loops(partitioned.plan)))
        labels = unique_labels([name for name, _ in programs])
        for label, (_, text) in zip(labels, programs, strict=True):
            (folder / f"{_file_name(label)}.stablehlo.txt").write_text(text)


def _new_folder(directory: Path, name: str) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            numbers = [int(path.name.split("_")[0]) for path in directory.glob("[0-9]*_*")]
            folder = directory / f"{max(numbers, default=-1) + 1}_{_file_name(name)}"
            with contextlib.suppress(FileExistsError):  # another process was faster
                folder.mkdir()
                return folder
    except OSError as error:
        raise ConfigError(
            message(
                f"`{DIRECTORY}={directory}`: `{error.strerror}`.",
                ways=("name a directory that can be written to.", f"unset `{DIRECTORY}`."),
            )
        ) from error


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_") or "function"
