"""Tables of names over the parts of a router that a test has made."""

from __future__ import annotations

from collections.abc import Mapping

from router.calls.dispatcher import Dispatcher
from router.intake.intake import Intake
from router.intake.metrics import RouterMetrics
from router.names.base_model import BaseModel
from router.names.defaults import NO_DEFAULTS, NameDefaults
from router.names.served_name import ServedName
from router.names.table import NameTable


def one_base(
    dispatcher: Dispatcher,
    intake: Intake,
    metrics: RouterMetrics | None = None,
    *,
    name: str = "demo",
    served: Mapping[str, NameDefaults] | None = None,
) -> NameTable:
    """Return the table of a router with one base model.

    Args:
        name: the base model, and its only name unless ``served`` has names.
        served: names with their defaults.
    """
    base = BaseModel(
        model=name, dispatcher=dispatcher, intake=intake, metrics=metrics or RouterMetrics()
    )
    names = [
        ServedName(name=one, base=base, defaults=defaults)
        for one, defaults in (served or {name: NO_DEFAULTS}).items()
    ]
    return NameTable([base], names)
