"""State machine over the scheduler's images: workers have each encoding that a step reads.

The machine plays the worker: it keeps encodings only as plans say, in turn or a step ahead.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.api.images import ImageSpan, PromptImage
from baton.kv.block_hash import BlockHasher
from engine.core.images.image_plan import StepImages
from engine.core.images.image_steps import ImageLimits
from engine.core.images.prompt_images import ImagePixels, PromptImages
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.images.image_inputs import fail_images, set_pixels
from tests.fakes.engine.engine_parts import ContentRunner, make_request
from tests.property.num_examples import num_examples

BLOCK_SIZE, NUM_BLOCKS = 2, 24
MARK, PLACEHOLDER = 7, 8
# The tokens of each image; marks have no embedding.
IMAGES = [
    [PLACEHOLDER],
    [PLACEHOLDER] * 2,
    [MARK, PLACEHOLDER, PLACEHOLDER],
    [PLACEHOLDER, MARK, PLACEHOLDER, PLACEHOLDER, MARK],
    [MARK, *[PLACEHOLDER] * 5],
]
LARGEST = max(map(len, IMAGES))
digests = [bytes([index]) * 16 for index in range(len(IMAGES))]


class ImageRunner(ContentRunner):
    """A ContentRunner whose KV also depends on the images before a position."""

    @staticmethod
    def _content(request: Request, group: int, position: int) -> object:
        spans = [(s.first, s.digest) for s in request.image_spans if s.first <= position]
        return ContentRunner._content(request, group, position), tuple(spans)


@dataclasses.dataclass
class Flight:
    """A step that has been submitted, and its result."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput


class ImagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler
        self.requests: dict[str, Request] = {}
        self.kept: set[bytes] = set()  # the worker's encodings
        self.fails = False
        self.ended: set[str] = set()
        self.in_flight: list[Flight] = []

    @initialize(
        cache_tokens=st.integers(LARGEST, 3 * LARGEST),
        max_encoder_tokens=st.integers(1, 2 * LARGEST),
        max_num_batched_tokens=st.integers(4, 20),
        long_prefill_token_threshold=st.integers(1, 20),
        num_blocks=st.integers(16, NUM_BLOCKS),
        runs_ahead=st.booleans(),
        keeps_whole=st.booleans(),
    )
    def make(
        self,
        cache_tokens: int,
        max_encoder_tokens: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int,
        num_blocks: int,
        runs_ahead: bool,
        keeps_whole: bool,
    ) -> None:
        if keeps_whole:  # beside two requests that decode
            max_num_batched_tokens = max(max_num_batched_tokens, LARGEST + 2)
        self.keeps_whole = keeps_whole
        self.cache_tokens, self.max_encoder_tokens = cache_tokens, max_encoder_tokens
        self.runs_ahead = runs_ahead
        self.max_model_len = num_blocks * BLOCK_SIZE
        self.runner = ImageRunner(BLOCK_SIZE)
        self.scheduler = Scheduler(
            KVCacheManager(num_blocks, BLOCK_SIZE, hasher=BlockHasher(BLOCK_SIZE)),
            max_num_requests=3,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            images=ImageLimits(cache_tokens, max_encoder_tokens, keeps_whole),
        )

    # ------------------------------------------------------------ what may happen

    @rule(
        parts=st.lists(st.integers(-3, len(IMAGES) - 1), min_size=1, max_size=5),
        num_siblings=st.sampled_from([0, 0, 2]),
        max_tokens=st.integers(1, 6),
    )
    def add(self, parts: list[int], num_siblings: int, max_tokens: int) -> None:
        """``parts``: runs of as many text tokens, if negative, or images."""
        prompt, images = list[int](), list[PromptImage]()
        for part in parts:
            if part < 0:
                prompt += [1] * -part
                continue
            span = ImageSpan(len(prompt), len(IMAGES[part]), digests[part])
            images.append(PromptImage(span, b"file"))
            prompt += IMAGES[part]
        if len(prompt) + max_tokens > self.max_model_len:
            return
        of_prompt = None
        if images:
            of_prompt = PromptImages(images, prompt, PLACEHOLDER, self.cache_tokens)
        first, *rest = (
            self.new_request(prompt, max_tokens, of_prompt) for _ in range(1 + num_siblings)
        )
        first.siblings = rest
        self.scheduler.add_request(first)

    def new_request(
        self, prompt: list[int], max_tokens: int, images: PromptImages | None
    ) -> Request:
        request = make_request(
            f"r{len(self.requests)}", 0, max_tokens, max_model_len=self.max_model_len, prompt=prompt
        )
        request.images = images
        self.requests[request.request_id] = request
        return request

    @rule(data=st.data())
    def decode_images(self, data: st.DataObject) -> None:
        waiting = [r for r in self.scheduler.requests.values() if r.awaits_pixels]
        if waiting:
            self.make_pixels(data.draw(st.sampled_from(waiting)))

    def make_pixels(self, request: Request) -> None:
        images = request.images
        assert images is not None
        self.scheduler.images.wanted = []
        images.pixels = {span.digest: ImagePixels(()) for span in images.spans}
        set_pixels(self.scheduler, images)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.scheduler.requests:
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            self.scheduler.abort(request_id)
            self.ended.add(request_id)

    @rule(num_steps=st.integers(1, 5), abort_during=st.integers(0, 8), fails=st.booleans())
    def steps(self, num_steps: int, abort_during: int, fails: bool) -> None:
        for index in range(num_steps):
            self.fails = fails and index == 0
            self.one_step(abort_during == index)
        self.fails = False

    def one_step(self, abort_during: bool = False) -> None:
        """Run a step in the order of `Engine.execute`."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check()
        if abort_during and scheduled.scheduled:
            request_id = scheduled.scheduled[0].request.request_id
            self.scheduler.abort(request_id)
            self.ended.add(request_id)
        scheduled = scheduled.without_finished()
        if self.in_flight and not (self.runs_ahead and scheduled.may_run_ahead):
            self.end_step()
            scheduled = scheduled.without_finished()
        if not scheduled.scheduled:
            return
        if self.keeps_whole:
            _assert_images_are_whole(scheduled)
        plan, _ = self.scheduler.plan(scheduled)
        failed = self.work(scheduled, plan.images or StepImages())
        output = self.sample(scheduled) if self.runs_ahead else self.runner.execute(scheduled)
        output = dataclasses.replace(output, failed_images=failed)
        self.scheduler.in_flight.begin_step(scheduled)
        self.in_flight.append(Flight(scheduled, output))
        if len(self.in_flight) > 1 or not self.runs_ahead:
            self.end_step()

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Sample for a step that may be launched ahead, whose KV is not followed."""
        sampled: dict[str, tuple[int, ...]] = {}
        for item in scheduled.scheduled:
            request = item.request
            end = request.num_computed_tokens + request.num_tokens_in_flight
            end += item.num_scheduled_tokens
            if end >= request.num_tokens + request.num_tokens_pending:
                sampled[request.request_id] = (2,)
        return ModelRunnerOutput(sampled)

    def end_step(self) -> None:
        flight = self.in_flight.pop(0)
        fail_images(self.scheduler, flight.output.failed_images)
        failed = {request_id for request_id, _ in self.scheduler.failures}
        self.scheduler.failures.clear()
        result = self.scheduler.update(flight.scheduled, flight.output)
        self.ended |= failed | {request.request_id for request in result.finished}
        self.scheduler.check()

    # ------------------------------------------------------------ what must hold

    def work(self, scheduled: SchedulerOutput, images: StepImages) -> dict[bytes, str]:
        """Keep and forget encodings as a worker does; check what the step reads."""
        missing = {
            digest for flight in self.in_flight for digest in flight.output.failed_images
        }  # known once the step in flight has ended
        self.kept -= set(images.forget)
        failed = {}
        for image in images.encode:
            assert image.digest not in self.kept, "encoded twice"
            tokens = IMAGES[digests.index(image.digest)]
            assert image.num_embeddings == tokens.count(PLACEHOLDER)
            if self.fails:
                failed[image.digest] = "fails on purpose"
            else:
                self.kept.add(image.digest)
        sizes = [len(IMAGES[digests.index(image.digest)]) for image in images.encode]
        assert len(sizes) <= 1 or sum(sizes) <= self.max_encoder_tokens
        used = sum(len(IMAGES[digests.index(digest)]) for digest in self.kept)
        assert used <= self.cache_tokens
        found = {}
        for placed in images.placed:
            assert placed.digest in self.kept | set(failed) | missing
            for index, row in enumerate(placed.rows):
                assert row not in found
                found[row] = placed.digest, placed.first + index
        assert found == _expected(scheduled)
        return failed

    @invariant()
    def nothing_is_kept_that_the_core_does_not_know(self) -> None:
        if not hasattr(self, "scheduler") or self.in_flight:
            return
        steps = self.scheduler.images
        assert self.kept | set(steps._encode) >= set(steps.cache)
        assert self.kept - set(steps._forget) <= set(steps.cache)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(600):
            for request in list(self.scheduler.requests.values()):
                if request.awaits_pixels:
                    self.make_pixels(request)
            if not self.scheduler.has_work:
                break
            self.one_step()
        assert not self.scheduler.requests
        assert self.ended == set(self.requests)
        assert self.scheduler.images.cache.num_held == 0 or self.scheduler.images._computed
        for request in self.requests.values():
            assert request.images is None or request.images.pixels is None
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_free == pool.num_blocks


def _assert_images_are_whole(scheduled: SchedulerOutput) -> None:
    for item in scheduled.scheduled:
        request = item.request
        end = request.num_computed_tokens + request.num_tokens_in_flight + item.num_scheduled_tokens
        assert not any(span.first < end < span.end for span in request.image_spans)


def _expected(scheduled: SchedulerOutput) -> dict[int, tuple[bytes, int]]:
    """Return the embedding that each row of a step must get."""
    expected, row = {}, 0
    for item in scheduled.scheduled:
        request = item.request
        start = request.num_computed_tokens + request.num_tokens_in_flight
        for position in range(start, start + item.num_scheduled_tokens):
            for span in request.image_spans:
                if span.first <= position < span.end:
                    within = request.token_ids[span.first : position]
                    if request.token_ids[position] == PLACEHOLDER:
                        expected[row] = span.digest, within.count(PLACEHOLDER)
            row += 1
    return expected


TestImages = ImagesMachine.TestCase
TestImages.settings = settings(max_examples=num_examples(60), stateful_step_count=25, deadline=None)
