"""Entries of the programs' commands: where each command is, and the first line of its help."""

from __future__ import annotations

from baton.cli.lazy_commands import Entry

PROGRAM_ENTRIES = {
    "up": Entry(
        "baton.cli.programs.up:up",
        "Start a router, prefill and decode nodes on this machine; Ctrl-C stops all of them.",
    ),
    "router": Entry(
        "baton.cli.programs.router:router",
        "Serve the public API and place requests on prefill and decode nodes.",
    ),
    "prefill": Entry(
        "baton.cli.programs.nodes:prefill",
        "Compute prompts, push their KV blocks to decode nodes, sample the first token.",
    ),
    "decode": Entry(
        "baton.cli.programs.nodes:decode",
        "Receive prompts' KV blocks from prefill nodes and decode in continuous batches.",
    ),
    "encode": Entry(
        "baton.cli.programs.nodes:encode",
        "Encode images of prompts and send the encodings to prefill nodes.",
    ),
    "sim-node": Entry(
        "baton.cli.programs.sim_node:sim_node",
        "Simulate prefill and decode nodes: the node protocol with a timing model, and no model.",
    ),
}
# Commands of the group `baton loadtest`; the keys join both words of a command.
LOAD_TEST_ENTRIES = {
    "loadtest-run": Entry(
        "baton.cli.programs.loadtest:run", "Play one load against one server and measure it."
    ),
    "loadtest-compare": Entry(
        "baton.cli.programs.loadtest:compare",
        "Compare deployments, disaggregated or not, with the same requests on the same cores.",
    ),
    "loadtest-tune": Entry(
        "baton.cli.programs.loadtest:tune",
        "Search options of nodes and router with which more requests keep an SLO; write them.",
    ),
}
