"""Rows of docs/performance.md about hostile clients, forged KV and other tenants' prompts."""

from __future__ import annotations

from benchmarks.page.measures import at, count, number, value
from benchmarks.page.rows import Found, Json, Measurement, Row, Source, Subject


def _forged(document: Json) -> Found:
    scenes = [at(document, name) for name in ("nixl", "in_memory")]
    attacks, wrong = (
        sum(number(scene, name) for scene in scenes)
        for name in ("num_attacks", "requests_with_wrong_tokens")
    )
    believed = sum(len(at(scene, "believed_messages_that_nobody_said")) for scene in scenes)
    return Found(f"{believed} and {wrong:.0f} ({attacks:,.0f} attacks)", not believed and not wrong)


_GOALS = "/health within 0.25 s, gaps of another stream within 1 s, growth within 256 MiB"
FORGED = Source(
    "forged_kv", (Row("kinds of forged messages believed, and wrong tokens", _forged, "0 and 0"),)
)
SHAPES = Source(
    "hostile_shapes", (Row(f"hostile requests that miss a goal ({_GOALS})", count("failed"), "0"),)
)
TRICKS = Source("http2_tricks", (
    Row(f"hostile HTTP/2 tricks that miss a goal ({_GOALS})", count("failed"), "0",
        "all tricks at once for a minute; the file names what was missed."),
))  # fmt: skip
ISOLATION = Source("tenant_isolation", (
    Row("AUC of an attack by the time to the first token, tenants apart",
        value("apart > auc_ttft"), "<= 0.55"),
    Row("the attack's AUC within a sharing group, where times must tell",
        value("group > auc_ttft")),
))  # fmt: skip
SUBJECT = Subject(
    "Hostile clients and other tenants",
    (
        Measurement("security.forged_kv", "kvconnector", (FORGED,)),
        Measurement("security.hostile_shapes", "router/intake", (SHAPES,)),
        Measurement("security.http2_tricks", "baton/serving", (TRICKS,)),
        Measurement("security.tenant_isolation", "router/gate engine/core", (ISOLATION,)),
    ),
)
