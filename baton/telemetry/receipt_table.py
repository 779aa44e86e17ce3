"""Format receipts of requests for people to read."""

from __future__ import annotations

from baton.api.outputs import Receipt

_SHOWN_DIGEST_CHARS = 12


def receipt_line(receipt: Receipt) -> str:
    """Return a receipt as one line."""
    parts = [
        f"{receipt.num_prompt_tokens} + {receipt.num_output_tokens} tokens",
        f"TTFT {receipt.ttft_s * 1e3:.0f} ms",
        f"{receipt.time_per_token_s * 1e3:.1f} ms/token",
    ]
    if receipt.num_images:
        parts.append(f"{receipt.num_images} images of {receipt.num_image_tokens} tokens")
    if receipt.adapter:
        parts.append(f"adapter {receipt.adapter[:_SHOWN_DIGEST_CHARS]}")
    if receipt.num_attempts > 1:
        parts.append(f"{receipt.num_attempts} attempts")
    if receipt.decode is None and receipt.decode_node:
        parts.append(f"ended on {receipt.decode_node} by a stop string")
        return " | ".join(parts)
    if receipt.decode is None:
        parts.append(f"ended on {receipt.prefill_node} with its token")
        return " | ".join(parts)
    computed = f"computed {receipt.decode.num_prompt_tokens_computed} prompt tokens"
    num_drafts, num_right = receipt.decode.num_drafts, receipt.decode.num_accepted_drafts
    drafts = [f"{num_right} of {num_drafts} drafts accepted"] if num_drafts else []
    if receipt.prefill is None:
        parts.append(f"{receipt.decode_node} {computed} and had the others cached")
        return " | ".join(parts + drafts)
    if receipt.prefill.num_cached_tokens:
        parts.append(f"{receipt.prefill.num_cached_tokens} cached")
    push = receipt.decode.push
    what = f"{format_bytes(push.num_bytes)} ({push.num_blocks} blocks) by {push.transport}"
    parts += [
        f"{receipt.prefill_node} pushed {what if push.num_blocks else 'nothing'}",
        f"{receipt.decode_node} {computed}",
    ]
    if receipt.decode.num_cached_tokens:
        parts[-1] += f", {receipt.decode.num_cached_tokens} cached"
    return " | ".join(parts + drafts)


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text such as ``1.5 MiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
