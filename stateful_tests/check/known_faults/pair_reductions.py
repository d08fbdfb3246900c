"""Traces of two servers without something that they may need: a window, states, drafts, unequal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from impl.adapter import AnySystem
from reference.blocks.config import BOUNDS, EngineConfig
from reference.commands import prompt_len
from reference.geometry import GeometryError
from reference.pairs.commands import HOST_COMMANDS, Forward, Prefill, Serve
from reference.pairs.config import PairConfig
from stateful_tests.check.known_faults.trace_reductions import remove_commands, with_sizes
from stateful_tests.lockstep.run_results import Trace

SERVERS = "prefill", "decode"  # of a PairConfig


def change_servers(trace: Trace, change: Callable[[EngineConfig], EngineConfig]) -> Trace:
    """Return the trace with another configuration of each server; unchanged where the sizes do not fit
    together."""
    try:
        servers = {name: change(getattr(trace.geometry, name)) for name in SERVERS}
    except GeometryError:
        return trace
    return with_sizes(trace, **servers)


def set_sizes_of_servers(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    """Return a pair with these sizes on both servers."""
    del system
    return change_servers(trace, lambda config: replace(config, **sizes))


def longest_text_of_pair(trace: Trace) -> int:
    """Return the length of the longest text that a request of a pair may have, with its outputs
    (tokens)."""
    prompts = [c for c in trace.commands if isinstance(c, Prefill | Serve)]
    longest = max((c.tokens + prompt_len(c.prompt) for c in prompts), default=0)
    outputs = (c.max_tokens for c in trace.commands if isinstance(c, Forward | Serve))
    return longest + max(outputs, default=1)


def resize_drafting_servers(trace: Trace, sizes: Callable[[EngineConfig], dict[str, Any]]) -> Trace:
    """Return a pair with other sizes where its servers have drafters with KV, and blocks for the
    longest text."""
    if trace.sizes(PairConfig).prefill.draft_group is None:
        return trace

    def resized(config: EngineConfig) -> EngineConfig:
        roomy = replace(config, blocks=BOUNDS["blocks"][1], **sizes(config))
        most = sum(map(roomy.most_blocks, roomy.groups))
        return replace(roomy, blocks=max(config.blocks, most))

    return change_servers(trace, resized)


def prefill_in_one_chunk_on_servers(system: AnySystem, trace: Trace) -> Trace:
    """Give each prompt to the drafters of a pair in one chunk, which states may yet cut."""
    del system
    longest = longest_text_of_pair(trace)

    def sizes(config: EngineConfig) -> dict[str, Any]:
        budget = max(config.max_batched_tokens, config.max_seqs * (longest + config.drafts))
        return {"max_batched_tokens": budget, "long_prefill": 0}

    return resize_drafting_servers(trace, sizes)


def raise_longest_text_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Leave room for the drafts behind each text, on a pair with drafters."""
    del system
    longest = longest_text_of_pair(trace)

    def sizes(config: EngineConfig) -> dict[str, Any]:
        return {"max_model_len": max(config.max_model_len, longest + 2 * config.drafts + 1)}

    return resize_drafting_servers(trace, sizes)


def remove_drafters_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Remove the drafters of both servers."""
    del system

    def without(config: EngineConfig) -> EngineConfig:
        groups = tuple(replace(group, drafter=False) for group in config.groups)
        return replace(config, groups=groups, drafts=0, eagle=False)

    return change_servers(trace, without)


def disable_caching_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Turn prefix caching off on both servers: a request then has one state, whatever the length of its
    text."""
    longest_prompt = trace.sizes(PairConfig).prefill.max_model_len

    trace = remove_host_of_servers(system, trace)  # a host keeps what is cached

    def uncached(config: EngineConfig) -> EngineConfig:
        longest = max(config.max_model_len, longest_prompt)
        groups = tuple(
            replace(group, block_size=longest) if group.state else group for group in config.groups
        )
        return replace(config, groups=groups, caching=False, match=0, retention=0, checkpoints=0)

    return change_servers(trace, uncached)


def remove_host_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Remove the host memory of both servers."""
    servers = {name: _without_host(getattr(trace.geometry, name)) for name in SERVERS}
    return remove_commands(HOST_COMMANDS, system, with_sizes(trace, **servers, host_first=False))


def _without_host(config: EngineConfig) -> EngineConfig:
    return replace(
        config, host_chunks=0, chunk_blocks=1, arc=False, prompt_only=False,
        sync_loads=config.sync_loads and not config.host_chunks,
    )  # fmt: skip


def remove_states_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Remove the recurrent layers of a pair."""
    del system

    def without(config: EngineConfig) -> EngineConfig:
        groups = tuple(group for group in config.groups if not group.state)
        return replace(config, groups=groups, match=0, retention=0, checkpoints=0)

    return change_servers(trace, without)


def remove_windows_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Remove the windows of a pair's layer groups."""
    del system

    def without(config: EngineConfig) -> EngineConfig:
        groups = tuple(replace(group, window=None) for group in config.groups)
        need = sum(map(config.most_blocks, groups))
        return replace(config, groups=groups, blocks=max(config.blocks, need))

    return change_servers(trace, without)


def equalise_blocks(system: AnySystem, trace: Trace) -> Trace:
    """Give both servers blocks of one size."""
    del system
    sizes = trace.sizes(PairConfig)
    prefill = sizes.prefill
    decode = sizes.decode
    need = sum(map(decode.most_blocks, prefill.groups))
    try:
        same = replace(decode, groups=prefill.groups, blocks=max(decode.blocks, need))
    except GeometryError:  # a state without caching has a block as long as the longest text
        return trace
    return with_sizes(trace, decode=same)


def make_room_on_servers(system: AnySystem, trace: Trace) -> Trace:
    """Let texts be as long as the model takes, all of them at once, on both servers."""
    del system
    texts = sum(isinstance(command, Prefill | Serve) for command in trace.commands)

    def roomy(config: EngineConfig) -> EngineConfig:
        whole = (replace(group, window=None) for group in config.groups)
        most = (texts + 1) * sum(map(config.most_blocks, whole))
        return replace(config, blocks=max(config.blocks, most))

    return change_servers(trace, roomy)
