"""What reports call what is measured, in the order in which they show it."""

LATENCY_NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL, per token",
    "frame_gap_s": "gap between frames",
    "e2e_s": "E2E",
    "server_ttft_s": "TTFT, server's",
    "server_tpot_s": "TPOT, server's",
    "server_total_s": "E2E, server's",
    "router_queue_s": "queue of the router",
    "prefill_queue_s": "queue of prefill",
    "prefill_s": "prefill",
    "network_s": "network to TTFT",
    "exposed_transfer_s": "exposed transfer",
    "posting_s": "posting of writes",
    "parked_s": "parked on decode",
    "first_step_s": "first decode step",
}
