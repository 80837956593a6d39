"""What every picture needs: matplotlib, an extra that is imported only when something is drawn, and a name for it."""

import os
from pathlib import Path
from typing import Any

from private_llm.errors import ConfigError

_ENDINGS = (".png", ".svg", ".pdf")


def check_name(path: Path) -> None:
    """Before any work: raises ConfigError for a name of no picture, a place that takes no file, or no matplotlib."""
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"plot: got {path.name!r}; want a name that ends in {', '.join(_ENDINGS)}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"plot: cannot write {str(path)!r}; want a new or old file in a folder that you may write to")
    load_pyplot()


def load_pyplot() -> Any:  # noqa: ANN401 - matplotlib is not typed
    """matplotlib.pyplot, drawing into files. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'private-llm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
