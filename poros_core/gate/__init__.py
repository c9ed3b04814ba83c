"""The parity gate: a resident and a streamed run in lockstep, compared bit for bit.

Importing this package needs no torch; ``poros_core.gate.run`` does.
"""

from __future__ import annotations

from poros_core.gate.options import GateOptions

__all__ = ["GateOptions"]
