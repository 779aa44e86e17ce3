"""Names, order and explanations of the figures in reports."""

LATENCY_NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL, per token",
    "frame_gap_s": "gap between frames",
    "e2e_s": "E2E",
    "ttft_images_s": "TTFT, with images",
    "ttft_text_s": "TTFT, text only",
    "itl_images_s": "ITL, with images",
    "itl_text_s": "ITL, text only",
    "server_ttft_s": "TTFT, server's",
    "server_tpot_s": "TPOT, server's",
    "server_total_s": "E2E, server's",
    "router_queue_s": "queue of the router",
    "accept_s": "checking and tokenizing",
    "place_s": "waiting for a place",
    "prefill_queue_s": "queue of prefill",
    "prefill_s": "prefill",
    "send_s": "token 1 to the link",
    "network_s": "links to prefill and back",
    "decode_prompt_s": "prompt on decode alone",
    "delivery_s": "token 1 to the client",
    "after_first_s": "tokens after the first",
    "handoff_s": "token 1 until decode has KV",
    "exposed_transfer_s": "exposed transfer",
    "posting_s": "posting of writes",
    "parked_s": "parked on decode",
    "first_step_s": "first decode step",
    "encodings_wait_s": "wait for encodings",
    "pixels_wait_s": "wait for pixel values",
    "encoder_s": "encoder, in prefill",
}
FIRST_STAGE = "accept_s"  # latencies from here on are parts of a request's time, from receipts
# The consecutive parts of a request's time up to token 1, which add up to the server's TTFT.
TTFT_PARTS = (
    "accept_s", "place_s", "prefill_queue_s", "prefill_s", "send_s", "network_s", "decode_prompt_s",
    "delivery_s",
)  # fmt: skip

# Explanations of a report's rates, which are printed beside the rates.
RATE_MEANINGS = {
    "asked_per_s": "requests scheduled in the window, over its length",
    "requests_per_s": "requests scheduled there that ended well, over the window's length or, if "
    "longer, the time from the first to the last such end",
    "goodput_per_s": "requests scheduled there that ended well within the SLO, over the same time",
    "attainment": "share of requests scheduled there, without those that the client cancelled, "
    "that ended well within the SLO",
    "output_tokens_per_s": "output tokens that arrived in the window, over its length",
    "prompt_tokens_per_s": "tokens of prompts whose first token arrived in the window, over its "
    "length",
}
