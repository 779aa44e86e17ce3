"""Features: what only some requests need of an engine: grammars, images, drafts, pins and files.

    a request comes     its thought is followed, its grammar is compiled, its images are decoded,
                        and files with KV of its prompt are read
    before a step       what has become ready goes to the scheduler
    after a step        failed images end their requests; drafts follow the sampled tokens; ended
                        requests pin their answers

Refuses to know: how requests are scheduled, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from baton.telemetry.ledger import BlockHolding
from engine.adapters import AdapterTable
from engine.core.drafts import is_drafted_for
from engine.core.images.prompt_images import PromptImages
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput, StepResult
from engine.core.pins.prefix_pins import PrefixPins
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.side_blocks import SideBlocks
from engine.executors.base import Executor
from engine.images.image_inputs import ImageInputs
from engine.kv_files.file_tier import KVFileTier
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.speculation.speculation import Speculation

# Seconds after which a caller that waits for files looks again at deadlines.
_FILE_POLL_S = 0.02


class Features:
    """The features of one engine. Used on the engine's thread.

    Args:
        scheduler: the engine's scheduler.
        grammars: compiles requests' grammars.
        pins: keeps the prefixes that requests pin in the prefix cache.
        side_blocks: limits the blocks that transfers of cached KV withhold from requests.
        images: checks the images of prompts, and has them decoded; None: the model takes no images.
        speculation: makes drafts, and is the scheduler's `DraftPolicy`; None: there are no drafts.
        files: the prefix cache's file tier; None: no file tier.

    Attributes:
        grammars, pins, side_blocks, images, speculation, files: the arguments; without ``images``,
            an intake that refuses images.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        pins: PrefixPins,
        side_blocks: SideBlocks,
        images: ImageInputs | None = None,
        speculation: Speculation | None = None,
        files: KVFileTier | None = None,
    ) -> None:
        self.grammars, self.pins, self.speculation, self.files = grammars, pins, speculation, files
        self.side_blocks, self.images = side_blocks, images or ImageInputs()
        self._scheduler = scheduler
        scheduler.on_finish = self._note_finish

    def make_adapters(self, executor: Executor, in_use: Callable[[], set[str]]) -> AdapterTable:
        """Make the table of the LoRA adapters in memory.

        Args:
            in_use: returns the digests of the adapters that open requests and the steps in flight
                use.
        """
        config = executor.config
        return AdapterTable(executor, config.max_adapters, config.adapter_cache_bytes, in_use)

    def prepare(self) -> None:
        """Load the grammar library's tokenizer and start the processes that decode images.

        The method may take some seconds. Nodes call it before they join a router, because loading
        the tokenizer holds the GIL. Without the call, the first request with a grammar or an image
        waits for the same work.

        Raises:
            ConfigError: no thread or descriptor is left.
            NodeUnavailableError: the processes that decode images cannot be started.
        """
        self._scheduler.grammars.masks.start()
        self.grammars.prepare()
        self.images.start()

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Set a function to call, on any thread, when a grammar, pixels or blocks are ready."""
        self.grammars.on_ready = wake
        self.images.wake_with(wake)
        if self.files is not None:
            self.files.on_ready = wake

    def close(self) -> None:
        """End the processes that compile grammars and decode images, and the file tier."""
        self.images.close()
        if self.files is not None:
            self.files.close()

    # ------------------------------------------------------------------ requests

    def prepare_prompt(self, request: Request) -> None:
        """Follow a request's thought, and read files with KV of its prompt, if there are any.

        Call this before the request is queued.
        """
        self.prepare_parked(request)
        if self.files is not None and not request.awaits_prefix:
            self.files.begin_read(request)

    def prepare_parked(self, request: Request) -> None:
        """Follow the thought of a request whose prompt another node computes."""
        self.grammars.follow_thought(request)
        if self.files is not None:
            self.files.track(request)

    def submit(self, request: Request) -> None:
        """Have a queued request's grammar compiled and its images decoded, if it has any."""
        images = request.images
        if images is not None and request.awaits_pixels and not images.awaits_encodings:
            self.images.submit(images)
        self.submit_grammar(request)

    def use_encodings(self, images: PromptImages) -> None:
        """Stop waiting for a prompt's encodings; have the images without an encoding decoded."""
        images.awaits_encodings = False
        if images.users:
            self.images.submit(images)

    def _note_finish(self, request: Request) -> None:
        """Tell the pins and the file tier that a request has ended."""
        self.pins.note_finish(request)
        if self.files is not None:
            self.files.note_end(request)

    def end_fetch(self, request: Request) -> None:
        """Resume a request that waited for another node to fill the prefix cache.

        The request uses what the cache has, or waits for files that have more. Ignored if the
        request has ended.
        """
        request.awaits_prefix = False
        files, has_ended = self.files, request.status.is_finished
        if files is None or has_ended or not files.begin_read(request):
            self._scheduler.resume(request)

    def submit_grammar(self, request: Request) -> None:
        """Have the grammar of a request compiled, if the request has one."""
        if request.awaits_grammar:
            self.grammars.submit(request)

    @property
    def awaits_pixels(self) -> bool:
        """Return whether some request waits for its images to be decoded."""
        return self.images.is_busy or bool(self._scheduler.images.wanted)

    @property
    def is_awaited(self) -> bool:
        """Return whether some request waits for its images to be decoded, or for files."""
        return self.awaits_pixels or self.is_reading

    @property
    def is_reading(self) -> bool:
        """Return whether some request waits for files."""
        return self.files is not None and self.files.is_busy

    @property
    def num_expected_blocks(self) -> int:
        """Return how many blocks the longest prefix in files needs."""
        return 0 if self.files is None else self.files.num_expected_blocks

    def wait(self) -> None:
        """Wait a while for images or files, if some request waits for them."""
        if self.awaits_pixels:
            self.images.wait()
        elif self.files is not None and self.is_reading:
            self.files.wait(_FILE_POLL_S)

    def hint_session(self, owner: bytes, session: bytes, keep_s: float) -> None:
        """Keep the prefix of a session's last request for a time, and read it from files.

        With a time of 0, end the session's pins instead.
        """
        if not keep_s:
            self.pins.drop_session(owner, session)
            return
        hashes = self.pins.pin_session(owner, session, keep_s)
        if self.files is not None and hashes:
            most = self.pins.room_for_prefetch(owner)
            self.pins.note_prefetch(owner, self.files.read_ahead(hashes, most), keep_s)

    # ------------------------------------------------------------------ steps

    def pass_on(self) -> None:
        """Give ready grammars, images and files to the scheduler; end pins whose time is over.

        Call before each step.
        """
        self.pins.tick()
        for request, grammar in self.grammars.take_ready():
            self._scheduler.set_grammar(request, grammar)
        self.images.pass_on(self._scheduler)
        self.settle_files()

    def settle_files(self) -> None:
        """Resume requests whose files were read, and queue the KV of ended requests for files."""
        if self.files is not None:
            self.files.settle()

    def note_step(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float
    ) -> None:
        """Record an ended step's times and failed images; call before the scheduler's `update`.

        Args:
            seconds: time between the ends of the last two steps.
        """
        if self.speculation is not None:
            self.speculation.note_step(scheduled, seconds, output.drafting_s)
        self.images.note_step(scheduled, output, self._scheduler)
        if self.files is not None:
            self.files.note_step(scheduled.num_prompt_tokens, output.ended_at - output.started_at)
            for request_id in output.without_numbers:
                self.files.forget_request(request_id)

    def after_step(self, result: StepResult, output: ModelRunnerOutput) -> None:
        """Pin the answers of ended requests; give the scheduler drafts of the next tokens."""
        self.pins.end(result.finished)
        if self.speculation is not None:
            drafted, requests = output.draft_token_ids, self._scheduler.requests
            drafts = self.speculation.after_step(result, requests, drafted)
            self._scheduler.drafts.keep(result.outputs, drafts)

    def forget_prefixes(self) -> None:
        """Drop pins and blocks that are read from files; call when the prefix cache was emptied."""
        self.pins.clear()
        if self.files is not None:
            self.files.drop_memory()

    def forget_cached(self) -> None:
        """Drop pins, encodings, and blocks that are read; call while no request is open."""
        self.forget_prefixes()
        self._scheduler.images.forget_all()

    def block_file_copies(self) -> AbstractContextManager[object]:
        """Return a context in which no file thread copies from or to the KV memory of a GPU."""
        return nullcontext() if self.files is None else self.files.memory_in_use

    def held_by_files(self) -> list[BlockHolding]:
        """Return the blocks that are being filled from files, for the ledger."""
        return [] if self.files is None else self.files.held()

    # ------------------------------------------------------------------ drafts between nodes

    def received_drafts(self, request_id: str, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return those of another node's drafts that the request's first step is to compute."""
        return self.speculation.received(request_id, drafts) if self.speculation else ()

    def first_drafts(self, request: Request) -> tuple[int, ...]:
        """Return drafts after the first token of a request that a decode node continues."""
        return () if self.speculation is None else self.speculation.first_drafts(request)

    def why_drafts(self, request: Request | None = None) -> str:
        """Explain the latest step's number of drafts in a sentence; empty if the number is fixed.

        Args:
            request: if this request had no drafts, explain also why.
        """
        choice = None if self.speculation is None else self.speculation.choice
        if request is not None and not is_drafted_for(request):
            return f"not drafted for, as no drafts had paid for long when it came; {choice}"
        return "" if choice is None else str(choice)
