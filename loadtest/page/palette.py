"""How all figures look, and how one becomes a file.

Colours are those of Okabe and Ito (jfly.uni-koeln.de/color), which colour-blind people can tell
apart; lines differ in their strokes, too.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Document = dict[str, Any]

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
LINES = ((BLUE, "-"), (RED, "--"), (GREEN, "-."), (PURPLE, ":"))
_STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.titlesize": 10.0, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "legend.frameon": False,
    "svg.hashsalt": "baton", "figure.dpi": 100.0,
}  # fmt: skip
WIDTH_INCHES = 9.0


@contextlib.contextmanager
def style() -> Iterator[None]:
    """How all figures look; nothing is drawn outside of it."""
    with mpl.rc_context(_STYLE):
        yield


def render(figure: Figure, image_format: str) -> bytes:
    """``svg`` or ``png``; the same figure, the same bytes."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if image_format == "svg" else {"Software": None}
    figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def put_legend(axes: Axes) -> None:
    """Above the plot, where no line is."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4, borderaxespad=0)
