"""Serving beside peers under many loads: the client's times and counts, and the verdicts."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.processes.free_address import free_address
from baton.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
NUM_PIECES = 4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    return lambda name: importlib.import_module(f"benchmarks.served.{name}")


def line(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n"


def piece(text: str) -> bytes:
    return line({"choices": [{"text": text}]})


USAGE = line({"choices": [], "usage": {"completion_tokens": 8}})


# ---------------------------------------------------------------- one stream


def test_pieces_without_text_have_no_time(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    role = line({"choices": [{"delta": {"role": "assistant"}}]})
    said = line({"choices": [{"delta": {"content": "b"}}]})
    pieces = [(1.0, role), (2.0, piece("a")), (3.0, piece("")), (4.0, said), (5.0, USAGE)]
    answer = client.parse(pieces, 2, 0.5)
    assert answer == client.Answer(2, 0.5, (2.0, 4.0), 8, "ab")


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([piece("a"), line({"error": {"message": "too long"}})], "too long"),
        ([piece("a")], "no usage"),
        ([USAGE], "no text"),
        ([b"data: {\n"], "cannot read b'data: {"),
        ([b"data: 7\n"], "cannot read b'data: 7"),
    ],
)
def test_a_broken_stream_is_an_error(
    module: Callable[[str], Any], lines: list[bytes], error: str
) -> None:
    pieces = [(float(number), one) for number, one in enumerate(lines)]
    assert error in module("served_client").parse(pieces, 0, 0.0).error


# ---------------------------------------------------------------- loads


@asynccontextmanager
async def server(
    bodies: list[dict[str, Any]], *, status: int = 200, at_once: int = 1
) -> AsyncIterator[str]:
    """Serve streams of four pieces of two tokens; bodies of requests are kept.

    No stream ends before ``at_once`` requests have come.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if status != 200:
            return web.Response(status=status, text="overloaded")
        response = web.StreamResponse()
        await response.prepare(request)
        is_chat = request.path.endswith("chat/completions")
        for number in range(NUM_PIECES):
            await asyncio.sleep(0)
            text = f" w{number}"
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            await response.write(line({"choices": [choice]}) + b"\n")
            while number == NUM_PIECES - 2 and len(bodies) < at_once:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await response.write(USAGE + b"\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    host, _, port = free_address().rpartition(":")
    await web.TCPSite(runner, host, int(port)).start()
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def prompts(client: Any, seed: int = 0) -> Any:
    tokenizer = Tokenizer(ROOT / "examples" / "demo_model")
    text = " ".join(f"word {number}" for number in range(500))
    return client.Prompts(tokenizer, tokenizer.encode(text), seed)


def play(client: Any, load: Any, seconds: float, **options: Any) -> tuple[Any, list[Any]]:
    bodies = list[dict[str, Any]]()

    async def main() -> Any:
        async with server(bodies, **options) as url:
            return await client.Player(url, "m", load, prompts(client), seconds).play()

    return asyncio.run(asyncio.wait_for(main(), 30)), bodies


def test_users_send_as_many_requests_as_a_load_has(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=16, output_tokens=8, num_streams=3, num_requests=7)
    played, bodies = play(client, load, 0.0)
    assert len(played.answers) == len(bodies) == 7
    assert all(len(body["prompt"]) == 16 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 7
    numbers = client.summarize(played, load, 4)
    assert numbers["num_errors"] == 0
    assert numbers["tokens_per_s"] > 0
    assert client.first_error(played, load) == ""


def test_a_user_alone_sends_some_requests_after_the_time_is_over(
    module: Callable[[str], Any],
) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=16, output_tokens=8, num_streams=1)
    played, _ = play(client, load, 0.0)
    assert len(played.answers) == client.ALONE_AT_LEAST
    played, _ = play(client, replace(load, num_streams=2), 0.0)
    assert len(played.answers) == 2


def test_arrivals_do_not_wait_for_answers(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=16, output_tokens=8, rate=1000.0, num_requests=5, even=True)
    played, bodies = play(client, load, 0.0, at_once=5)
    assert len(bodies) == 5
    last_sent = max(one.sent_at for one in played.answers)
    assert all(one.times[-1] > last_sent for one in played.answers)


def test_a_chat_sends_its_history_again(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=8, num_streams=1, turns=4, num_requests=1)
    played, bodies = play(client, load, 0.0)
    assert [one.turn for one in played.answers] == [1, 2, 3, 4]
    assert [len(body["messages"]) for body in bodies] == [1, 3, 5, 7]
    assert bodies[3]["messages"][:5] == bodies[2]["messages"]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": " w0 w1 w2 w3"}
    numbers = client.summarize(played, load, 4)
    last = played.answers[3]
    ttft_ms = 1000 * (last.times[0] - last.sent_at)
    assert numbers["turn_4_ttft_p50_ms"] == pytest.approx(ttft_ms, abs=0.001)


def test_a_refusal_is_counted_and_ends_a_chat(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=8, num_streams=1, turns=4, num_requests=2)
    played, _ = play(client, load, 0.0, status=503)
    numbers = client.summarize(played, load, 4)
    assert (numbers["num_requests"], numbers["num_errors"]) == (2, 2)
    assert "ttft_p50_ms" not in numbers
    assert client.first_error(played, load) == "HTTP 503: overloaded"


def test_a_server_that_is_gone_is_an_error(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=8, num_streams=1, num_requests=1)
    url = f"http://{free_address()}"
    played = asyncio.run(client.Player(url, "m", load, prompts(client), 0.0).play())
    assert "ClientConnectorError" in client.first_error(played, load)


def test_an_output_of_another_length_is_an_error(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=9, num_streams=1)
    played = client.Played(0.0, 10.0, [client.Answer(0, 0.0, (1.0, 2.0), 8, "ab")])
    assert client.summarize(played, load, 4)["num_errors"] == 1
    assert client.first_error(played, load) == "an output has 8 tokens, not 9"


def test_numbers_of_a_load(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=4, num_streams=2)
    answers = [
        client.Answer(0, 0.0, (1.0, 1.5, 2.0, 4.0), 4, "abcd"),
        client.Answer(0, 0.0, (3.0, 3.5, 4.0, 6.0), 4, "abcd"),
    ]
    numbers = client.summarize(client.Played(0.0, 4.0, answers), load, 4)
    assert numbers["ttft_p50_ms"] == 2000.0
    assert numbers["itl_p50_ms"] == 500.0
    assert numbers["tpot_mean_ms"] == 1000.0
    assert numbers["tokens_per_s"] == 7 / 4  # the last piece came when one user had ended


def test_percentiles_lie_between_neighbours(module: Callable[[str], Any]) -> None:
    percentile = module("served_client").percentile
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.99) == 99


def test_arrivals_are_the_same_for_every_server(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    load = client.Load(prompt_tokens=8, output_tokens=8, rate=4.0)
    draw = [client.Player("", "m", load, prompts(client, n), 50.0).draw_arrivals() for n in (0, 1)]
    assert draw[0] == draw[1]
    assert draw[0][0] == 0.0
    assert draw[0][-1] <= 50.0
    assert 100 < len(draw[0]) < 300
    few = client.Player("", "m", replace(load, num_requests=3, even=True), None, 0.0)
    assert few.draw_arrivals() == [0.0, 0.25, 0.5]


def test_a_seed_gives_the_same_prompts(module: Callable[[str], Any]) -> None:
    client = module("served_client")
    one, other, third = (prompts(client, seed) for seed in (1, 1, 2))
    assert one.draw_ids(64) == other.draw_ids(64) != third.draw_ids(64)
    assert len(one.draw_ids(5000)) == 5000  # longer than the text
    assert "word" in one.draw_text(16)


# ---------------------------------------------------------------- verdicts


def numbers(**changed: float) -> dict[str, float]:
    same = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), 10.0)
    return same | {"tokens_per_s": 100.0, "num_errors": 0, "num_requests": 5} | changed


def test_ratios_are_to_the_best_peer_of_each_number(module: Callable[[str], Any]) -> None:
    rows = {
        "1@512": {
            "baton split": numbers(),
            "vllm": numbers(ttft_p50_ms=5.0, tokens_per_s=50.0),
            "llamacpp": numbers(ttft_p50_ms=20.0, tokens_per_s=200.0),
        }
    }
    found = module("served_verdicts").ratios(rows)["1@512"]
    assert list(found) == ["baton split"]
    assert found["baton split"]["ttft_p50_ms"] == 0.5
    assert found["baton split"]["tokens_per_s"] == 0.5
    assert found["baton split"]["itl_p50_ms"] == 1.0


def test_a_peer_with_errors_is_no_peer(module: Callable[[str], Any]) -> None:
    rows = {"4@512": {"baton split": numbers(), "vllm": numbers(ttft_p50_ms=1.0, num_errors=1)}}
    assert module("served_verdicts").ratios(rows) == {}


def verdict_of(module: Callable[[str], Any], goal: str, rows: Any, starts: Any) -> Any:
    judged = module("served_verdicts").judge(rows, starts, ["1@128"])
    [found] = [one for one in judged if one.goal.startswith(goal)]
    return found


@pytest.mark.parametrize(("itl", "holds"), [(10.5, True), (10.6, False)])
def test_colocated_decodes_as_fast_as_split(
    module: Callable[[str], Any], itl: float, holds: bool
) -> None:
    servers = {"baton split": numbers(), "baton colocated": numbers(itl_p50_ms=itl)}
    assert verdict_of(module, "1@128: ITL", {"1@128": servers}, {}).holds is holds


@pytest.mark.parametrize(("ttft", "holds"), [(12.0, True), (12.1, False)])
def test_split_answers_a_chat_as_soon_as_colocated(
    module: Callable[[str], Any], ttft: float, holds: bool
) -> None:
    key = module("served_verdicts").TURN_KEY
    servers = {"baton split": {key: ttft}, "baton colocated": {key: 10.0}}
    rows = {"chat": {name: numbers(**one) for name, one in servers.items()}}
    assert verdict_of(module, "chat", rows, {}).holds is holds


@pytest.mark.parametrize(
    ("key", "value", "goal", "holds"),
    [
        ("first_over_tenth", 1.3, "baton split: first prompt", True),
        ("first_over_tenth", 1.31, "baton split: first prompt", False),
        ("start_s", 4.0, "baton split: start", True),
        ("start_s", 4.1, "baton split: start", False),
        ("load_mib", 150.0, "baton split: memory", True),
        ("load_mib", 151.0, "baton split: memory", False),
    ],
)
def test_starts_are_judged(
    module: Callable[[str], Any], key: str, value: float, goal: str, holds: bool
) -> None:
    starts = {"baton split": {key: value}, "llamacpp": {"start_s": 1.0, "load_mib": 100.0}}
    assert verdict_of(module, goal, {}, starts).holds is holds


def test_a_loss_and_an_error_are_told_by_name(module: Callable[[str], Any]) -> None:
    own = numbers(itl_p99_ms=20.0, num_errors=2)
    rows = {"4@512": {"baton colocated": own, "llamacpp": numbers()}}
    lost = verdict_of(module, "baton colocated: no ratio", rows, {})
    assert (lost.word, lost.text) == ("MISSED", "1 of 5 below: 0.50 itl_p99 of 4@512")
    failed = verdict_of(module, "baton colocated: no errors", rows, {})
    assert (failed.word, failed.text) == ("MISSED", "2 in rows of 5 requests")


def test_nothing_measured_holds_nothing(module: Callable[[str], Any]) -> None:
    judged = module("served_verdicts").judge({}, {}, ["1@128"])
    assert {one.word for one in judged} == {"not measured"}


def test_medians_are_of_rounds_and_errors_of_all(module: Callable[[str], Any]) -> None:
    runs = [numbers(ttft_p50_ms=ttft, num_errors=1) for ttft in (30.0, 10.0, 20.0)]
    medians = module("served_verdicts").median_of(runs)
    assert (medians["ttft_p50_ms"], medians["num_errors"], medians["rounds"]) == (20.0, 3, 3)


# ---------------------------------------------------------------- rows and servers


def test_a_row_needs_a_context_and_a_chat_template(module: Callable[[str], Any]) -> None:
    rows, bench = module("served_rows"), module("served_bench")
    model = bench.Model("m", Path("m.gguf"), Path(), "auto", 8192, True)
    assert not any(model.lacks(load) for load in rows.LOADS.values())
    small = replace(model, max_model_len=2048, has_chat=False)
    assert small.lacks(rows.LOADS["1@2048"]) == "the context has 2048 tokens"
    assert small.lacks(rows.LOADS["chat"]) == "the model has no chat template"
    assert small.lacks(rows.LOADS["1@512"]) == ""


def test_rows_and_servers_are_known(module: Callable[[str], Any]) -> None:
    rows = module("served_rows")
    assert set(rows.USUAL + rows.QUICK) <= set(rows.LOADS)
    assert set(rows.QUICK_SERVERS) <= set(rows.SERVERS)
    assert rows.some_of(["a", "b"], ["b", "a"]) == ["b", "a"]
    with pytest.raises(SystemExit, match=r"must be of a, b, got 'c'"):
        rows.some_of(["a", "b"], ["a", "c"])


def test_a_server_is_told_the_file_and_the_size_of_a_row(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = module("served_servers")
    monkeypatch.setattr(servers, "llama_server", lambda: Path("llama-server"))
    file = Path("m.gguf")
    job = servers.Job(Path("m"), "auto", "127.0.0.1:1", (0, 1), file, 8192, 16, 640)
    llamacpp = " ".join(servers.llamacpp(job))
    assert "--model m.gguf" in llamacpp
    assert "--parallel 16 --no-kv-unified --ctx-size 10240" in llamacpp
    assert "--model m.gguf" in " ".join(servers.baton()(job))


def test_two_clients_are_compared_by_their_medians(module: Callable[[str], Any]) -> None:
    check = module("served_check")
    ours = [dict.fromkeys(check.COMPARED, value) for value in (90.0, 100.0, 400.0)]
    theirs = [dict.fromkeys(check.COMPARED.values(), value) for value in (105.0, 105.0, 5.0)]
    found = check.compare(ours, theirs)
    assert found["ttft_mean_ms"] == (100.0, 105.0, pytest.approx(0.05))


def test_the_cost_of_a_process_grows(module: Callable[[str], Any]) -> None:
    cost_of = module("process_costs").cost_of
    before = cost_of(os.getpid())
    ends_at = time.process_time() + 0.05
    while time.process_time() < ends_at:
        random.random()
    after = cost_of(os.getpid())
    assert after.cpu_s >= before.cpu_s + 0.03
    assert after.rss_mib >= after.pss_mib > 1
