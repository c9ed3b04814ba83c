"""Train on real records with HF Trainer, with Poros and resident, raw lengths and padded ones.

    python benchmarks/real_loop.py --shape 7b --data records.safetensors --json-dir records
    python benchmarks/real_loop.py --shape 32b --data records.safetensors --steps 60 --warmup 20

Every method trains at every --pad-to (none is raw lengths), each in a process of its own, all of
one run. Says step over link floor, and the share of blocks that replayed a graph. Settings as in
training_cost.py; methods may carry their own after colons. Exit status as there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cost_options import arguments
from training_cost import main

METHODS = "poros,peft-checkpointing"
PADDINGS = ("none", "64")
STEPS = ("--steps", "100", "--warmup", "40")


def methods_at_paddings(methods: str, paddings: Sequence[str] = PADDINGS) -> str:
    """Return every method at every padding; one that names a padding keeps to it."""
    found = []
    for padding in paddings:
        for method in methods.split(","):
            own = f"{method}:pad-to={padding}" if ":pad-to=" not in method else method
            if own not in found:
                found.append(own)
    return ",".join(found)


if __name__ == "__main__":
    options = arguments([*STEPS, "--methods", METHODS, *sys.argv[1:]], about=__doc__, data=True)
    options.methods = methods_at_paddings(options.methods)
    sys.exit(main(options))
