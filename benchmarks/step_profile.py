"""Profile steps: how busy link and GPU are, what the host takes to launch, stall per block.

    python benchmarks/step_profile.py --shape 32b --methods poros,peft-checkpointing --profiled 3

Step times and peaks come from steps that are not profiled, as in training_cost.py, though the
profiler was started once before and may cost them a little. Then follow steps that are issued to an
idle device, for the host's time, and --profiled steps under the profiler, for the rest. Settings
and exit status as in training_cost.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cost_options import arguments
from training_cost import main

STEPS = ("--steps", "10", "--profiled", "3")
_COLUMNS = ("method", "link", "GPU", "stalled", "idle", "host a step", "launches", "calls")


def profile_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return shares of the profiled time, and per step the host's time, calls and their time, as
    text; below each method the blocks that stalled most."""
    lines = ["  ".join([_COLUMNS[0].ljust(24), *(name.rjust(11) for name in _COLUMNS[1:])])]
    for record in records:
        profile = record.get("profile")
        if profile is None:
            continue
        trace, steps = profile["trace"], profile["profiled_steps"]
        cells = ["-"] * 4 if trace is None else [
            f"{100 * trace[name]:.1f} %" for name in ("link_busy", "gpu_busy", "stalled", "idle")
        ]  # fmt: skip
        cells.append(f"{profile['host_seconds']:.4f} s")
        cells += ["-", "-"] if trace is None else [
            f"{trace['launches'] / steps:.0f}", f"{trace['launch_seconds'] / steps:.4f} s"
        ]  # fmt: skip
        lines.append("  ".join([record["method"].ljust(24), *(cell.rjust(11) for cell in cells)]))
        if trace is not None:
            lines += _stalls(trace["stall_seconds"], steps)
    return "\n".join(lines)


def _stalls(by_block: Mapping[str, float], steps: int, *, shown: int = 5) -> list[str]:
    if not by_block:
        return []
    ranked = sorted(by_block.items(), key=lambda item: -item[1])
    mean = sum(by_block.values()) / len(by_block) / steps
    worst = ", ".join(f"{name} {1e3 * taken / steps:.2f} ms" for name, taken in ranked[:shown])
    return [f"  stall per block {1e3 * mean:.3f} ms a step; most: {worst}"]


if __name__ == "__main__":
    options = arguments([*STEPS, *sys.argv[1:]], about=__doc__)
    sys.exit(main(options, also=profile_table))
