"""How long planning takes: trace and search of published shapes, each in a process of its own.

    python -m benchmarks.plan_time

Prints seconds of tracing and searching, the peak memory of the process, the plan and its gap.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "examples" / "configs"
CASES = (
    ("gpt2.json", 8, "dgx-a100-80gb"),
    ("llama-3-8b.json", 8, "dgx-a100-80gb"),
    ("llama-3-8b.json", 64, "dgx-h100"),
)


def measure(config: str, gpus: int, cluster: str) -> dict[str, object]:
    """One case, in this process."""
    from costmodels.hardware import load_cluster
    from planner.models import load_model
    from planner.solve.configuration import Problem
    from planner.solve.search import search
    from planner.trace import Batch, trace

    start = time.perf_counter()
    loaded = load_model(str(CONFIGS / config), None, None, None)
    batch = Batch(loaded.example_inputs or (), loaded.example_kwargs or {})
    traced = trace(loaded.model, batch, loaded.loss_fn)
    traced_at = time.perf_counter()
    machines = load_cluster(cluster, gpus)
    plan = search(Problem(config, traced.graph, machines, "adamw", "bfloat16", machines.device.memory_bytes))
    done = time.perf_counter()
    return {
        "trace_s": traced_at - start,
        "search_s": done - traced_at,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "plan": plan.configuration,
        "gap": plan.gap,
    }


def main() -> None:
    table = Table("model", "devices", "trace", "search", "memory", "plan", "gap")
    for case in CASES:
        config, gpus, cluster = case
        command = [sys.executable, "-m", "benchmarks.plan_time", config, str(gpus), cluster]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout)
        table.add_row(
            config.removesuffix(".json"),
            f"{gpus} x {cluster}",
            f"{found['trace_s']:.1f} s",
            f"{found['search_s']:.1f} s",
            f"{found['memory_bytes'] / 1e9:.2f} GB",
            found["plan"],
            f"{found['gap']:.2%}",
        )
    Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
    else:
        main()
