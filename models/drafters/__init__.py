"""Networks that draft a model's next tokens, one file per method.

The table names each method, whose file is imported when the method is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.drafters.base import HeadsDrafter, LayersDrafter

# Each of these functions takes a `models.drafters.loading.DrafterSource`, and loads the drafter.
DRAFTERS: Registry[Callable[..., HeadsDrafter | LayersDrafter]] = Registry(
    "drafter",
    {
        "draft_model": "models.drafters.draft_model:load_draft_model",
        "medusa": "models.drafters.medusa:load_medusa",
        "eagle": "models.drafters.eagle:load_eagle",
        "mtp": "models.drafters.mtp:load_mtp",
    },
)
