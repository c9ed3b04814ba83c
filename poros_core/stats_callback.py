"""Live figures in the logs of Transformers' ``Trainer``.

Apart from ``stats``, since it needs Transformers when it is imported.
"""

from __future__ import annotations

from typing import Any

import attrs
from transformers import TrainerCallback

from poros_core.stats import stats

__all__ = ["StatsCallback"]

_PREFIX = "poros_"


class StatsCallback(TrainerCallback):  # type: ignore[misc]
    """Adds the figures of ``poros.stats`` to what a ``Trainer`` logs in training.

    ``Trainer(..., callbacks=[poros.StatsCallback()])``. Each figure that is known is there under
    its name with ``poros_`` before it, in ``trainer.state.log_history`` and in what callbacks
    after this one see, progress bar and printer included. ``Trainer`` calls the integrations of
    ``report_to`` before any callback that it is given: to report the figures too, leave
    ``report_to`` empty and pass the integration's callback after this one.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise ``PrepareError`` now if the model is not prepared."""
        stats(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the figures to a training log, and to its copy in the history."""
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        values = attrs.asdict(stats(kwargs["model"]))
        figures = {_PREFIX + name: value for name, value in values.items() if value is not None}
        logs.update(figures)
        state.log_history[-1].update(figures)
