"""The description of KV cache groups in a prepared step, for tests."""

from __future__ import annotations

from baton_kernels.attention.base import AttentionMetadata
from engine.worker.inputs.prepared_step import PreparedStep


def attention_groups(prepared: PreparedStep) -> list[AttentionMetadata]:
    """Return the metadata of each KV cache group with attention."""
    groups = prepared.model.groups
    return [group for group in groups if isinstance(group, AttentionMetadata)]
