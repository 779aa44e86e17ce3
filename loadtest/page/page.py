"""Makes one HTML file from a result's JSON; the file needs no network and no scripts.

The page takes every number, and every sentence with numbers, from the JSON by a path, so that page
and JSON always agree. The page also contains the JSON. Refuses to know: runs.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
from markupsafe import Markup

from baton.api.errors import ConfigError
from loadtest.report.distribution import PER_MILLE
from loadtest.report.terms import FIRST_STAGE, LATENCY_NAMES, RATE_MEANINGS

Document = dict[str, Any]
COLUMNS = ("mean", *PER_MILLE, "max")
# Descriptions of the pictures, for people who cannot see them.
ALTERNATIVES = {
    "latency_cdfs": "Cumulative distributions of TTFT, TPOT, ITL and E2E",
    "timeline": "Requests per second, tokens per second and latencies over the time of the run",
    "throughput_latency": "TTFT and ITL, p50 and p99, over output tokens per second",
    "throughput": "Requests per second that ended well, over what was asked for",
    "search": "Share of requests within the SLO over the rate, for every try of the search",
    "comparison": "Goodput, ITL p99, TTFT p50 and TTFT p99 of each deployment",
    "comparison_cdfs": "Cumulative distributions of ITL and TTFT of each deployment",
    "receipt_waterfall": "Time of every stage of the mean request, by the receipts",
}
# Media query -> whether its picture is dark, and whether its picture is narrow.
_MEDIA = {
    "(max-width: 600px) and (prefers-color-scheme: dark)": (True, True),
    "(max-width: 600px)": (False, True),
    "(prefers-color-scheme: dark)": (True, False),
    "": (False, False),
}
_FORMATS: dict[str, Callable[[Any], str]] = {
    "any": lambda value: f"{value}" if isinstance(value, int) else f"{value:.4g}",
    "count": lambda value: f"{value:,}",
    "nth": lambda value: f"{value + 1:,}",  # the page counts from 1, the document from 0
    "rate": lambda value: f"{value:,.2f}",
    "whole": lambda value: f"{value:,.0f}",
    "seconds": lambda value: f"{value:,.1f}",
    "percent": lambda value: f"{value:.1%}",
    "ms": lambda value: f"{value * 1e3:,.{1 if value < 1 else 0}f}",
}


def load_figures() -> tuple[ModuleType, ModuleType]:
    """Import the modules that draw; raises ConfigError if the plot library is missing."""
    try:
        return (
            importlib.import_module("loadtest.page.figures"),
            importlib.import_module("loadtest.page.palette"),
        )
    except ImportError as error:
        raise ConfigError(
            f"html, png: need matplotlib, of the extra baton-serve[report]: {error}"
        ) from error


def look_up(document: Document, path: str) -> Any:
    """Return the value at a path such as ``summary.latencies.ttft_s.p99``; None if missing."""
    found: Any = document
    for step in path.split("."):
        if isinstance(found, list):
            found = found[int(step)]
        elif isinstance(found, Mapping) and step in found:
            found = found[step]
        else:
            return None
    return found


def number(document: Document, path: str, form: str) -> Markup:
    """Return HTML that shows a number of the document, with its path and exact value."""
    value = look_up(document, path)
    if value is None:
        return Markup("<span>-</span>")
    return Markup('<span data-path="{}" data-value="{!r}" title="{!r}">{}</span>').format(
        path, value, value, _FORMATS[form](value)
    )


def said(document: Document, path: str) -> Markup:
    """Return HTML that shows a text of the document, with the text's path."""
    return Markup('<span data-text="{}">{}</span>').format(path, look_up(document, path))


def render_page(document: Document) -> str:
    """Render the whole page; raises ConfigError if the plot library is missing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loadtest.page", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        document=document,
        number=functools.partial(number, document),
        said=functools.partial(said, document),
        pictures=_pictures(document),
        rate_meanings=RATE_MEANINGS,
        alternatives=ALTERNATIVES,
        latency_names=LATENCY_NAMES,
        stage_names=list(LATENCY_NAMES)[list(LATENCY_NAMES).index(FIRST_STAGE) :],
        columns=COLUMNS,
    )


def _pictures(document: Document) -> dict[str, dict[str, Markup]]:
    """Return pictures by name and media query; the picture of the last query is the default."""
    found: dict[str, dict[str, Markup]] = {}
    _, palette = load_figures()
    drawn = [render_figures(document, "svg", is_narrow=is_narrow) for is_narrow in (False, True)]
    for query, (is_dark, is_narrow) in _MEDIA.items():
        for name, image in drawn[is_narrow].items():
            shown = palette.darken(image) if is_dark else image
            url = Markup("data:image/svg+xml;base64," + base64.b64encode(shown).decode())
            found.setdefault(name, {})[query] = url
    return found


def render_figures(
    document: Document, image_format: str, *, is_narrow: bool = False
) -> dict[str, bytes]:
    """Return all pictures of a document by name, as ``svg`` or ``png``; raises ConfigError."""
    figures, palette = load_figures()
    look = dataclasses.replace(palette.LIGHT, is_narrow=is_narrow)
    with palette.style(look):
        found = figures.all_figures(document, look)
        return {name: palette.render(figure, image_format) for name, figure in found.items()}


def write_page(path: Path, document: Document) -> None:
    """Write the page; raises ConfigError if that fails."""
    _write("html", path, render_page(document).encode())


def write_pictures(folder: Path, document: Document) -> None:
    """Write each picture to a file in ``folder``; raises ConfigError if that fails."""
    for name, image in render_figures(document, "png").items():
        _write("png", folder / f"{name}.png", image)


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error
