"""What proves that a gate's streamed arm streamed and trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

__all__ = ["Evidence"]


@frozen(kw_only=True)
class Evidence:
    """What proves that the streamed arm streamed and trained.

    Attributes:
        counters: per step, how much the runtime's totals rose.
        resident_units: units that stayed on the device.
        least_bytes: bytes that a step streams at least, as the plan and the budget imply.
        untrained: adapter tensors without a usable gradient, or that ended as they started.
        budget: the ``vram_budget`` that it was prepared with.
        resident_bytes: bytes that the resident units take at least.
        layers: how many there are.
        not_finite: adapter tensors that ended with elements that are NaN or infinite.
        most_bytes: bytes that a step streams at most where all of its micro-batches share them.
    """

    counters: Sequence[Mapping[str, int]]
    resident_units: int
    least_bytes: int
    untrained: Sequence[str]
    budget: int | str | None = None
    resident_bytes: int = 0
    most_bytes: int | None = None
    layers: int | None = None
    not_finite: Sequence[str] = ()

    def problems(self) -> list[str]:
        """Return why a verdict would be void; empty if it stands."""
        found = []
        streamed = min((_weights(step) for step in self.counters), default=0)
        if streamed < self.least_bytes or streamed == 0:
            found.append(
                f"a step streamed {streamed} bytes, and streaming every layer takes at least "
                f"{self.least_bytes}"
                if self.budget is None
                else f"a step streamed {streamed} bytes, and those that do not stay on the device "
                f"take at least {self.least_bytes}: a smaller --vram-budget shows streaming"
            )
        if self.layers is not None and self.resident_units >= self.layers:
            found.append(
                f"all {self.layers} layers stayed on the device, so none streamed: a smaller "
                "--vram-budget shows streaming"
            )
        if self.not_finite:
            found.append(
                f"{len(self.not_finite)} adapter tensors ended with elements that are NaN or "
                f"infinite (first: {self.not_finite[0]}): what is NaN hides every fault"
            )
        largest = max((_weights(step) for step in self.counters), default=0)
        if self.most_bytes is not None and largest > self.most_bytes:
            found.append(
                f"a step streamed {largest} bytes, and its micro-batches together take at most "
                f"{self.most_bytes}"
            )
        if self.resident_units and self.budget is None:
            found.append(f"{self.resident_units} units stayed on the device without a budget")
        if isinstance(self.budget, int) and self.resident_bytes > self.budget:
            found.append(
                f"{self.resident_units} units of at least {self.resident_bytes} bytes stayed on "
                f"the device, more than the budget of {self.budget}"
            )
        if self.untrained:
            found.append(
                f"{len(self.untrained)} adapter tensors had no finite non-zero gradient in any "
                f"step, or ended as they started (first: {self.untrained[0]})"
                + (
                    ": in the first step the adapters' second half is zero, and so is the gradient "
                    "of the first; ask for two --steps or more"
                    if len(self.counters) == 1
                    else ""
                )
            )
        return found


def _weights(step: Mapping[str, int]) -> int:
    """Return the bytes of units that a step streamed: activations, which go to the host and come
    back, are counted both ways, and among what is streamed once."""
    return step["bytes_streamed"] - step.get("activation_bytes", 0) // 2
