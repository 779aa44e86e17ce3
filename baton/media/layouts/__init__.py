"""Layouts: the tokens that an image of some size has in the prompt of each kind of model.

A layout gives the same tokens as the checkpoint's own image processor, without decoding images.
"""

from baton.media.layouts.choose import layout_of

__all__ = ["layout_of"]
