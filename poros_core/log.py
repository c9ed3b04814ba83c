"""Structured events over the standard library's loggers.

The library never configures logging: events go to ``logging.getLogger("poros.…")`` and an
application decides what becomes of them. The command line configures its own output.
"""

from __future__ import annotations

import logging
from typing import cast

import structlog

__all__ = ["get_logger"]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a bound logger whose events end in the standard logger ``poros.<name>``."""
    return cast(
        structlog.stdlib.BoundLogger,
        structlog.wrap_logger(
            logging.getLogger(f"poros.{name}"),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        ),
    )
