"""Calls from clients: requests, turns of sessions, aborts, resets, adapters and weights."""

from __future__ import annotations

import inspect
from typing import Any

from impl.vllm.bare_connectors import Loads
from impl.vllm.engine_parts import EngineParts
from impl.vllm.images import features_of, with_placeholders
from impl.vllm.sources import request_fields
from impl.vocabulary import require, well_formed
from reference.blocks.commands import Add, End, LoadAdapter, More, NewWeights, client_tokens
from reference.commands import Abort, Prompt, Reason, prompt_len
from reference.tiers.commands import ResetCache
from reference.token_ids import is_image


class ClientCalls(EngineParts):
    """The part of a driver that calls the scheduler as the engine core does for its clients."""

    def _tokens(self, command: Add | More) -> list[int]:
        """Return the token ids of a prompt, and count it as sent."""
        self._sent += 1
        return client_tokens(command.prompt, command.tokens, self._sent)

    def _well_formed(self, command: Add | More) -> None:
        """Require a command that the front end accepts. Raises CommandRefused."""
        texts = tuple(piece for piece in command.prompt if not is_image(piece.text))
        sane = well_formed(texts) and command.tokens >= 0 and command.max_tokens >= 1
        images = (piece.tokens for piece in command.prompt if is_image(piece.text))
        require(all(1 <= tokens <= self.config.image for tokens in images), Reason.BAD_LENGTH)
        length = prompt_len(command.prompt) + command.tokens
        require(sane and 1 <= length < self.config.max_model_len, Reason.BAD_LENGTH)

    def _scheduler_request(self, name: str) -> Any:
        """Return the scheduler's request with this name, None if there is none."""
        return self.scheduler.requests.get(self._ids.get(name, ""))

    def _add(self, command: Add) -> None:
        self._well_formed(command)
        require(self._scheduler_request(command.request) is None, Reason.REQUEST_EXISTS)
        # no streaming sessions yet
        require(self._resumable or not command.resumable, Reason.UNFAITHFUL)
        tokens = self._tokens(command)
        name = f"{command.request}-{self._sent}" if self._renames else command.request
        self._ended.discard(name)
        self.sources.add(name, command.adapter, command.salt)
        request = self._request(
            name, with_placeholders(tokens), command.max_tokens, command.priority, command.resumable,
            mm_features=features_of(command.prompt), **request_fields(self.sources.of(name)),
        )  # fmt: skip
        self._ids[command.request] = name
        self._names[name] = command.request
        if isinstance(self._worker_side, Loads) and command.remote:
            self._worker_side.expects(name, command.remote)
        self.scheduler.add_request(request)

    def _session(self, name: str) -> Any:
        """Return the session with this name. Raises CommandRefused if it accepts no more turns."""
        request = self._scheduler_request(name)
        require(request is not None, Reason.UNKNOWN_REQUEST)
        require(request.resumable, Reason.WRONG_PHASE)
        require(request.request_id not in self._ended, Reason.SESSION_CLOSING)
        return request

    def _more(self, command: More) -> None:
        self._well_formed(command)
        known = self._session(command.request)
        tokens = self._tokens(command)
        self._add_turn(known, tokens, command.max_tokens, resumable=True, prompt=command.prompt)

    def _add_turn(
        self, known: Any, tokens: list[int], max_tokens: int, resumable: bool, prompt: Prompt = ()
    ) -> None:
        """Send the next turn of a session, or its end."""
        name = known.request_id
        fields = request_fields(self.sources.of(known.request_id))
        turn = self._request(
            name, with_placeholders(tokens), max_tokens, known.priority, resumable,
            mm_features=features_of(prompt), **fields,
        )  # fmt: skip
        self.scheduler.add_request(turn)

    def _end(self, command: End) -> None:
        known = self._session(command.request)
        self._ended.add(known.request_id)
        self._add_turn(known, [2], 1, resumable=False)

    def _abort(self, command: Abort) -> None:
        known = self._scheduler_request(command.request)
        require(known is not None, Reason.UNKNOWN_REQUEST)
        require(not command.marked, Reason.UNFAITHFUL)  # only SGLang marks a queued request
        self.scheduler.finish_requests(known.request_id, self._statuses.FINISHED_ABORTED)

    def _reset(self, command: ResetCache) -> None:
        reset = self.scheduler.reset_prefix_cache
        resets_running = "reset_running_requests" in inspect.signature(reset).parameters
        require(resets_running or not command.running, Reason.UNFAITHFUL)
        try:
            if resets_running:
                self._reset_done = bool(reset(reset_running_requests=command.running))
            else:
                self._reset_done = bool(reset())
        except RuntimeError as error:
            # a failed reset with running requests raises instead of returning False; PUB-3 checks it
            if not str(error).startswith("Failed to reset"):
                raise

    def _load_adapter(self, command: LoadAdapter) -> None:
        sources = map(self.sources.of, self.scheduler.requests)
        require(all(source.adapter != command.adapter for source in sources), Reason.WRONG_PHASE)
        self.sources.loaded.load_adapter(command.adapter)

    def _new_weights(self, _: NewWeights) -> None:
        """Replace the weights, as EngineCore.sleep does once the device is idle, if the release resets its
        caches."""
        require(not self._in_flight, Reason.WRONG_PHASE)
        try:
            self._reset_done = self._reset_caches(self.scheduler, self.runner.worker)
        except RuntimeError as error:
            if not str(error).startswith("Failed to reset"):
                raise
        if self._reset_done:
            self.sources.replace_weights()
            self._stamps.weights += 1
