"""Layouts: the tokens that each kind of model has in its prompt for an image of some size.

A layout equals the expansion of the checkpoint's own processor, without decoding an image.
"""

from baton.media.layouts.choose import layout_of

__all__ = ["layout_of"]
