"""Where every picture gets matplotlib from: an extra, imported only when something is drawn."""

from __future__ import annotations

from typing import Any

from private_llm.errors import ConfigError


def load_pyplot() -> Any:  # noqa: ANN401 - matplotlib is not typed
    """matplotlib.pyplot, drawing into files. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'private-llm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
