"""The commands of `baton admin`, in the order that its help shows."""

from __future__ import annotations

from baton.cli.command_line import CommandLine
from baton.cli.lazy_commands import Entry, lazy_group, registry_of

_ENTRIES = {
    "nodes": Entry(
        "baton.cli.admin.nodes:nodes",
        "List the nodes that have joined a router, how busy they are, and which nodes they reach.",
    ),
    "node": Entry("baton.cli.admin.nodes:node", "Show one node."),
    "drain": Entry(
        "baton.cli.admin_changes.lifecycle:drain",
        "Let a node finish its requests and take no new ones; the node stays, for `resume` or "
        "`remove`.",
    ),
    "resume": Entry(
        "baton.cli.admin_changes.lifecycle:resume", "Have a draining or drained node serve again."
    ),
    "remove": Entry(
        "baton.cli.admin_changes.lifecycle:remove", "Drain a node and end its process."
    ),
    "top": Entry("baton.cli.admin.top:top", "Watch a router and its nodes; Ctrl-C ends it."),
    "stats": Entry(
        "baton.cli.admin.stats:stats",
        "Show how many requests came, how they ended, and how long they took.",
    ),
    "requests": Entry(
        "baton.cli.admin.requests:requests",
        "List the last requests of the router, or all open requests of one node.",
    ),
    "trace": Entry(
        "baton.cli.admin.requests:trace",
        "Show when each thing happened to one of the router's last requests.",
    ),
    "explain": Entry(
        "baton.cli.admin.explain:explain",
        "Show the places that the routing policy considered, and their costs.",
    ),
    "abort": Entry(
        "baton.cli.admin.requests:abort",
        "End an open request, on its nodes too; its client is told CANCELLED.",
    ),
    "quarantine": Entry(
        "baton.cli.admin.quarantine:quarantine",
        "List the requests that are refused because nodes died while computing an equal one.",
    ),
    "release": Entry("baton.cli.admin.quarantine:release", "Stop refusing a quarantined request."),
    "audit": Entry(
        "baton.cli.admin.audit:audit",
        "Show the owners of KV blocks on a node, or on all; exit code 5 if a block has no owner.",
    ),
    "policy": Entry(
        "baton.cli.admin_changes.tuning:policy", "See or change how requests are placed."
    ),
    "rollout": Entry(
        "baton.cli.admin_changes.rollout:rollout",
        "See or change which revisions of nodes get requests, and which shares.",
    ),
    "names": Entry(
        "baton.cli.admin_changes.names:names",
        "See or change the model names that clients may use, and what each name stands for.",
    ),
    "adapters": Entry(
        "baton.cli.admin_changes.adapters:adapters",
        "See or change the LoRA adapters that nodes compute beside the base model.",
    ),
    "weights": Entry(
        "baton.cli.admin_changes.weights:weights",
        "Serve other weights of the same model from running nodes, or let nodes sleep.",
    ),
    "cache": Entry(
        "baton.cli.admin.cache:cache",
        "Show how full the nodes' prefix caches and files are, and how many tokens each served.",
    ),
    "flush-cache": Entry(
        "baton.cli.admin_changes.tuning:flush_cache",
        "Empty the prefix cache of a node, or of all; running requests keep their blocks.",
    ),
    "drop-pins": Entry(
        "baton.cli.admin_changes.tuning:drop_pins",
        "End the pins of one session; nodes then keep its prefix no longer than other prefixes.",
    ),
    "log-level": Entry(
        "baton.cli.admin_changes.tuning:log_level",
        "Set the log level of a node, or of the router (named `router`), from now on.",
    ),
    "profile": Entry(
        "baton.cli.admin_changes.tuning:profile",
        "Show where a node's engine, or the router (named `router`), spends its time.",
    ),
    "version": Entry(
        "baton.cli.admin.version:version",
        "Print the versions of this program, the router and its nodes, and whether they differ.",
    ),
}
COMMANDS = registry_of(_ENTRIES)
app = CommandLine(
    cls=lazy_group(_ENTRIES),
    no_args_is_help=True,
    add_completion=False,
    help="Operate a router and its nodes. Exit codes: 0 done, 1 error or unreachable, 2 usage, "
    "3 no such node or request, 4 timed out, 5 the audit found orphans.",
)


@app.callback()
def _root() -> None:
    """Exist so that Typer makes the app a group of commands."""
