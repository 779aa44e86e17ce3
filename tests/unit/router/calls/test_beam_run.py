"""BeamRun: the search through calls of one token, its streams, its end and its limits."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from baton.access.identity import Limits, Principal
from baton.api.beam_search import BeamSearchParams, search_beams
from baton.api.errors import DeadlineExceededError, NodeUnavailableError
from baton.api.outputs import FinishReason, TextDelta
from baton.api.sampling_params import SamplingParams
from baton.kv.pins import PinTerms, PrefixPin
from router.calls.beam_run import BeamRun
from router.calls.call import Call, Terms
from tests.fakes.router.one_token_model import OneTokenModel, best

PROMPT = [5, 6, 7]
PARAMS = BeamSearchParams(beam_width=3, max_tokens=6, end_token_ids=frozenset({1}))


def make_call(**fields: object) -> Call:
    principal = Principal(name="a", tenant="a", limits=Limits(requests_per_minute=9))
    terms = Terms(received_at=0.0, priority=-3, principal=principal, beams=PARAMS)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=0)
    call = Call(
        request_id="r", prompt_token_ids=PROMPT, sampling_params=params, terms=terms, timeout_s=60
    )
    return dataclasses.replace(call, **fields)  # type: ignore[arg-type]


async def read(run: BeamRun, place: int) -> TextDelta:
    [delta] = [one async for one in run.stream(place)]
    return delta


def test_the_outputs_are_those_of_a_search_over_the_same_model() -> None:
    async def main() -> None:
        model = OneTokenModel()
        run = BeamRun(make_call(), PARAMS, 100, model.run)
        found = await asyncio.gather(*(read(run, place) for place in range(3)))
        [expected] = search_beams(
            [PROMPT], PARAMS, 103, lambda prefixes, num: [best(one, num) for _, one in prefixes]
        )
        assert [one.token_ids for one in found] == [beam.token_ids for beam in expected]
        assert [one.choice_index for one in found] == [0, 1, 2]
        for one, beam in zip(found, expected, strict=True):
            assert [token.logprob for token in one.logprobs] == list(beam.logprobs)
            assert one.receipt is not None
            assert one.receipt.num_output_tokens == len(beam.token_ids)
            assert sum(one.receipt.ttft_parts.values()) == pytest.approx(one.receipt.ttft_s)
            is_stopped = one.token_ids[-1] == 1
            assert one.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)

    asyncio.run(main())


def test_steps_are_calls_of_one_token_with_the_terms_of_their_request() -> None:
    async def main() -> None:
        model = OneTokenModel()
        await read(BeamRun(make_call(), PARAMS, 100, model.run), 0)
        assert len({call.request_id for call in model.calls}) == len(model.calls)
        assert all(call.terms.priority == -3 for call in model.calls)
        assert all(call.sampling_params.max_tokens == 1 for call in model.calls)
        limits = {call.terms.principal.limits.requests_per_minute for call in model.calls}
        assert limits == {0.0}  # the request is counted once, before
        lengths = [len(call.prompt_token_ids) for call in model.calls]
        assert lengths[:4] == [3, 4, 4, 4]

    asyncio.run(main())


def test_only_the_call_that_computes_the_prompt_pins() -> None:
    async def main() -> None:
        model, call = OneTokenModel(), make_call()
        pins = PinTerms(prefixes=(PrefixPin(60.0),))
        terms = dataclasses.replace(call.terms, pins=pins)
        await read(BeamRun(make_call(terms=terms), PARAMS, 100, model.run), 0)
        assert [call.terms.pins for call in model.calls[:2]] == [pins, None]
        assert {call.terms.pins for call in model.calls[1:]} == {None}

    asyncio.run(main())


def test_the_models_length_limits_the_outputs() -> None:
    async def main() -> None:
        model = OneTokenModel()
        delta = await read(BeamRun(make_call(), PARAMS, 2, model.run), 0)
        assert len(delta.token_ids) <= 2

    asyncio.run(main())


@pytest.mark.parametrize("num_old", [1, 2, 4, 7])
def test_a_search_begins_again_if_the_weights_change_meanwhile(num_old: int) -> None:
    """The change comes between two steps (1, 4, 7 calls of old weights), or within a step."""

    async def main() -> None:
        model = OneTokenModel(changes_at=num_old)
        run = BeamRun(make_call(), PARAMS, 100, model.run)
        found = await asyncio.gather(*(read(run, place) for place in range(3)))
        [expected] = search_beams(
            [PROMPT],
            PARAMS,
            103,
            lambda prefixes, num: [best(one, num, "new") for _, one in prefixes],
        )
        assert [one.token_ids for one in found] == [beam.token_ids for beam in expected]
        assert {one.receipt.weights for one in found if one.receipt} == {"new"}
        assert len({call.request_id for call in model.calls}) == len(model.calls)

    asyncio.run(main())


def test_an_error_of_a_step_ends_the_search_and_its_other_calls() -> None:
    async def main() -> None:
        model = OneTokenModel(NodeUnavailableError("gone"))
        run = BeamRun(make_call(), PARAMS, 100, model.run)
        results = await asyncio.gather(
            *(read(run, place) for place in range(2)), return_exceptions=True
        )
        assert [type(result) for result in results] == [NodeUnavailableError] * 2
        assert model.num_open == 0

    asyncio.run(main())


def test_ending_a_stream_ends_the_search() -> None:
    async def main() -> None:
        model = OneTokenModel(hangs=True)
        task = asyncio.create_task(read(BeamRun(make_call(), PARAMS, 100, model.run), 0))
        await model.is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.num_open == 0

    asyncio.run(main())


def test_a_search_ends_at_the_deadline_of_its_call() -> None:
    async def main() -> None:
        model = OneTokenModel()
        with pytest.raises(DeadlineExceededError):
            await read(BeamRun(make_call(timeout_s=0), PARAMS, 100, model.run), 0)
        assert model.calls == []

    asyncio.run(main())
