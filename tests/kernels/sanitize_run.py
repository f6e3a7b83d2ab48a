"""The sanitizer lane: every GPU backend's covering set under every tool of compute-sanitizer, and a fault a tool.

    python tests/kernels/sanitize_run.py [--json FILE]           (make sanitize; needs a GPU and compute-sanitizer)

First the set runs without a tool, which compiles all kernels. Then, side by side, each backend under each tool must be
clean, and each tool must report the fault that is built into a kernel for it: a lane that cannot fail proves nothing.
The exit status is 0 only if all of that holds.

Kernels of torch's are not checked: the tools see what ``FILTERS`` lets through. API errors are not reported: they are
the driver's entry points that the bindings look for and this driver lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sanitize_matrix import BACKENDS, FAULTS, cases

from fused_kda.bench import results

CALLS = Path(__file__).with_name("sanitize_calls.py")
#: Which kernels the tools check; the chain's have no name in common, so there all are, torch's too.
FILTERS = {"cuda": "kns=fused_kda_decode", "triton": "kns=decode", "chain": None}
#: compute-sanitizer's exit status where the program ended well and the tool found something.
FOUND = 86
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_LAUNCHES = re.compile(r"^(\d+) launch", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Lane:
    """One process and what it must come to.

    Attributes:
        tool: of compute-sanitizer, or None for the run that compiles.
        backend: whose cases, or (with a fault) whose kernel.
        part: share of the cases.
        fault: whether the tool's fault is built in, and so must be found.
    """

    tool: str | None
    backend: str
    part: str = "1/1"
    fault: bool = False

    def command(self) -> list[str]:
        """The process's command line."""
        arguments = [sys.executable, str(CALLS), "--backend", self.backend, "--part", self.part]
        if self.tool is None:
            return arguments
        if self.fault:
            arguments += ["--fault", self.tool]
        tool = ["compute-sanitizer", "--tool", self.tool, "--error-exitcode", str(FOUND), "--report-api-errors", "no"]
        wanted = FILTERS[self.backend]
        return [*tool, *(["--kernel-name", wanted] if wanted else []), *arguments]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a lane came to: launches made, the tool's count of errors (None: no summary), exit status, seconds."""

    lane: Lane
    launches: int
    errors: int | None
    status: int
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        if self.lane.fault:
            return self.status != 0 and bool(self.errors)
        ran = self.launches == len(cases(self.lane.backend)[_first(self.lane.part) :: _count(self.lane.part)])
        return self.status == 0 and ran and self.errors == (None if self.lane.tool is None else 0)

    def __str__(self) -> str:
        lane = self.lane
        name = f"{lane.tool or 'no tool'}, {lane.backend}{f', fault {FAULTS[lane.tool][0]}' if lane.fault else ''}"  # type: ignore[index]
        want = "at least one" if lane.fault else "none"
        word = "pass" if self.passed else "FAIL"
        return f"{word}  {name}: {self.launches} launches, errors {self.errors} (want {want}), {self.seconds:.0f} s"

    def record(self) -> dict[str, object]:
        """The outcome for a results file."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("lane", "output")}
        name = FAULTS[str(self.lane.tool)][0] if self.lane.fault else None
        return {
            **asdict(self.lane), "fault_name": name, **kept, "seconds": round(self.seconds, 1), "passed": self.passed,
        }  # fmt: skip


def _first(part: str) -> int:
    return int(part.split("/")[0]) - 1


def _count(part: str) -> int:
    return int(part.split("/")[1])


def run_lane(lane: Lane, directory: Path, limit: float) -> Outcome:
    """Run one lane. A faulty kernel is compiled into a cache of its own, as far from the sound ones as can be."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    cache = directory / (f"fault-{lane.tool}" if lane.fault else "cache")
    environment["FUSED_KDA_CACHE_DIR"] = str(cache)
    start = time.perf_counter()
    process = subprocess.Popen(
        lane.command(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
        output, _ = process.communicate()
        output += f"\nended after {limit} s"
    errors = [int(count) for count in _SUMMARY.findall(output)]
    launches = _LAUNCHES.search(output)
    return Outcome(
        lane, int(launches[1]) if launches else 0, sum(errors) if errors else None, process.returncode,
        time.perf_counter() - start, output,
    )  # fmt: skip


def run_all(lanes: Iterable[Lane], directory: Path, jobs: int, limit: float) -> list[Outcome]:
    """Run lanes side by side; print each as it ends, and what a failed one has printed."""
    found = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda lane: run_lane(lane, directory, limit), lanes):
            print(outcome, flush=True)
            if not outcome.passed:
                print(_shortened(outcome.output), flush=True)
            found.append(outcome)
    return found


def _shortened(output: str) -> str:
    """The first reports, which are the ones to look at, and how it ended."""
    return output if len(output) < 5000 else f"{output[:4000]}\n...\n{output[-1000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default=",".join(FAULTS), help="comma-separated tools")
    parser.add_argument("--backend", default=",".join(BACKENDS), help="comma-separated backends")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: expected on PATH (it comes with the CUDA toolkit), not found", file=sys.stderr)
        return 2
    tools, backends = options.tool.split(","), options.backend.split(",")
    parts = max(1, options.jobs // len(backends))
    with tempfile.TemporaryDirectory() as directory:
        compiling = [Lane(None, backend, f"{part}/{parts}") for part in range(1, parts + 1) for backend in backends]
        outcomes = run_all(compiling, Path(directory), options.jobs, options.limit)
        lanes = [Lane(tool, backend) for tool in tools for backend in backends]
        lanes += [Lane(tool, "cuda", fault=True) for tool in tools]
        outcomes += run_all(lanes, Path(directory), options.jobs, options.limit)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    checked = [outcome for outcome in outcomes if outcome.lane.tool and not outcome.lane.fault]
    noticed = sum(outcome.passed for outcome in outcomes if outcome.lane.fault)
    launches = sum(outcome.launches for outcome in checked)
    print(f"{launches} launches checked, {noticed} of {len(tools)} faults noticed, {len(failed)} lanes failed")
    if options.json:
        device = torch.device("cuda", torch.cuda.current_device())
        records = [outcome.record() for outcome in outcomes]
        results.write(
            results.document("sanitize", "make sanitize", device, filters=FILTERS, lanes=records), options.json
        )
    return 1 if failed or noticed < len(tools) else 0


if __name__ == "__main__":
    sys.exit(main())
