"""What an exported test is made of: kvspec copies from here the definitions that a test uses.

Never imported by kvspec itself. It runs on an installed sglang 0.5.10 to 0.5.14, whose own classes do all the
bookkeeping; here are only the sizes, settings and batches that a scheduler would hand them.
"""
# ruff: noqa: F401  (what the copied lines use)

from __future__ import annotations

import unittest
from array import array
from contextlib import ExitStack
from unittest import mock

import torch

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative import eagle_info_v2, spec_utils

try:
    from sglang.srt.session.session_controller import SessionController
    from sglang.srt.session.streaming_session import StreamingSession
except ImportError:  # 0.5.10
    from sglang.srt.managers.session_controller import SessionController
    from sglang.srt.mem_cache.session_aware_cache import SessionAwareCache as StreamingSession

try:
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
except ImportError:  # before 0.5.13
    from sglang.srt.mem_cache import allocator as paged
    from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator

NEW_NAMES = hasattr(Req, "update_finish_state")  # 0.5.13 renamed what a request keeps of its chunks
VOCABULARY = 1 << 40


class Bag:
    """Attributes as given; whatever else is asked for is None."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


ARGS = Bag(
    attention_backend="torch_native", chunked_prefill_size=-1, device="cpu", disable_overlap_schedule=True,
    disable_radix_cache=True, disaggregation_mode="null", enable_mamba_extra_buffer=lambda: False,
)  # fmt: skip


class SpecAlgorithm:
    """Speculative decoding is on or off; which algorithm does not matter to the bookkeeping."""

    def __init__(self, on):
        self.is_none = lambda: not on

    def __getattr__(self, name):
        return lambda *_, **__: False


class NoMemory(SWAKVPool):
    """A KV pool without KV: it keeps the mapping from full to SWA slots for the allocator."""

    __abstractmethods__ = frozenset()

    def __init__(self):
        self.full_kv_pool = self.swa_kv_pool = self.full_to_swa_index_mapping = None


def make_allocator(page_size, full_tokens, swa_tokens):
    """The allocator of one pool, or of two."""
    kind = {"dtype": torch.float16, "device": "cpu", "need_sort": False}
    if swa_tokens is not None:
        sizes = {"size": full_tokens, "size_swa": swa_tokens, "page_size": page_size}
        return SWATokenToKVPoolAllocator(kvcache=NoMemory(), **sizes, **kind)
    if page_size == 1:
        return TokenToKVPoolAllocator(full_tokens, kvcache=None, **kind)
    return paged.PagedTokenToKVPoolAllocator(full_tokens, page_size, kvcache=None, **kind)


def without_kernels():
    """Compute page allocations with torch: the kernels need a GPU."""

    def extend(prefix, total, last, free, out, _, page_size):
        paged.alloc_extend_naive(prefix, total, last, free, out, page_size, "cpu")

    def decode(total, last, free, out, _, page_size):
        pages = iter(free.tolist())
        lengths = zip(total.tolist(), last.tolist())
        out[:] = torch.tensor(
            [next(pages) * page_size if (n - 1) % page_size == 0 else slot + 1 for n, slot in lengths]
        )

    for name, run in (("alloc_extend_kernel", extend), ("alloc_decode_kernel", decode)):
        setattr(paged, name, mock.MagicMock(**{"__getitem__.return_value": run}))


class Server:
    """Pools, cache and sessions as a scheduler has them, without a model, on a CPU."""

    def __init__(self, *, page_size, window, full_tokens, swa_tokens, rows, width):
        self.ARGS = ARGS
        ARGS.page_size = page_size
        set_global_server_args_for_scheduler(ARGS)
        schedule_batch.get_tensor_model_parallel_rank = lambda: 0  # one process, in no group
        self.allocator = make_allocator(page_size, full_tokens, swa_tokens)
        two = window is not None
        self.full_pool = self.allocator.full_attn_allocator if two else self.allocator
        self.swa_pool = self.allocator.swa_attn_allocator if two else None
        self.rows = ReqToTokenPool(size=rows, max_context_len=width, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=True, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator,
            page_size=page_size, sliding_window_size=window,
        )  # fmt: skip
        self.cache = StreamingSession((SWAChunkCache if two else ChunkCache)(params))
        self.sessions = SessionController(self.cache)

    def open(self, session):
        self.sessions.open(Bag(session_id=session, capacity_of_str_len=1 << 20, streaming=True))

    def close(self, session):
        self.sessions.close(Bag(session_id=session))

    def request(self, rid, tokens, session=None, **undo):
        """A Req: of a session by its create_req, else by itself."""
        ids = array("q", tokens) if NEW_NAMES else list(tokens)
        sampling = SamplingParams(max_new_tokens=1 << 30, ignore_eos=True)
        sampling.normalize(None)
        if session is None:
            return Req(
                rid=rid, origin_input_text=None, origin_input_ids=ids, sampling_params=sampling,
                vocab_size=VOCABULARY,
            )  # fmt: skip
        asked = Bag(
            rid=rid, input_ids=ids, sampling_params=sampling, stream=False, return_logprob=False,
            top_logprobs_num=0, return_hidden_states=False, return_routed_experts=False,
            require_reasoning=False,
            session_params=Bag(id=session, replace=False, **{"drop_previous_output": False, **undo}),
        )  # fmt: skip
        return self.sessions.get(session).create_req(asked, None, VOCABULARY)

    def batch(self, mode, *reqs, spec=False):
        """A ScheduleBatch of these requests, as the scheduler would have it now."""
        batch = ScheduleBatch(
            reqs=list(reqs), req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
        )  # fmt: skip
        batch.model_config = Bag(is_encoder_decoder=False, is_matryoshka=False, vocab_size=VOCABULARY)
        batch.device = "cpu"
        batch.enable_overlap = batch.return_logprob = False
        batch.spec_algorithm = SpecAlgorithm(spec)
        batch.hisparse_coordinator = None
        batch.sampling_info = Bag(penalizer_orchestrator=Bag(is_required=False))
        batch.forward_mode = mode
        ARGS.speculative_algorithm = "EAGLE" if spec else None
        if mode is ForwardMode.DECODE:
            lengths = [len(r.origin_input_ids) + len(r.output_ids) - 1 for r in reqs]
            rows = [r.req_pool_idx for r in reqs]
            batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
            batch.seq_lens = torch.tensor(lengths, dtype=torch.int64)
            batch.seq_lens_cpu = batch.seq_lens.clone()
            batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
            batch.seq_lens_sum = sum(lengths)
            batch.output_ids = torch.zeros(len(reqs), dtype=torch.int64)
        return batch

    def reap(self):
        """What the scheduler does about once a second."""
        self.sessions.maybe_reap(self.sessions._last_reap_time + 2.0)


def chunk(req, end):
    """The next prefill computes the request's text up to `end` (PrefillAdder)."""
    req.set_extend_input_len(end - len(req.prefix_indices))
    if NEW_NAMES:
        req.fill_len = end
    else:
        req.fill_ids = req.fill_ids[:end]


def middle_chunks(req, more):
    """One more, or less, chunk is under way that is not the request's last."""
    name = "inflight_middle_chunks" if NEW_NAMES else "is_chunked"
    setattr(req, name, getattr(req, name) + more)


def checkpoint(req, cache, **chunked):
    """What the scheduler calls after a prefill."""
    if hasattr(common, "maybe_cache_unfinished_req"):
        common.maybe_cache_unfinished_req(req, cache, **chunked)
    else:
        cache.cache_unfinished_req(req, **chunked)


def check_finished(req, outputs=1):
    """The request looks at its last outputs."""
    (req.update_finish_state if NEW_NAMES else req.check_finished)(outputs)


def sampled(req, tokens):
    """The result of a step: these tokens were sampled, or accepted."""
    req.output_ids.extend(tokens)
    check_finished(req, len(tokens))


def prepare_verify(batch, draft_len):
    """The over-allocation before a verify round; gives what it has committed already."""

    def assign(rows, table, start, end, slots, count):
        for row, a, b in zip(rows.tolist()[:count], start.tolist(), end.tolist()):
            table[row, a:b] = slots[: b - a].to(table.dtype)
            slots = slots[b - a :]

    before = batch.reqs[0].kv_committed_len
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(spec_utils, "assign_req_to_token_pool_func", assign))
        sizes = {"get_alloc_len_per_decode": draft_len, "get_alloc_reserve_per_decode": 2 * draft_len}
        for name, size in sizes.items():
            if hasattr(eagle_info_v2, name):
                stack.enter_context(mock.patch.object(eagle_info_v2, name, lambda *_, size=size: size))
        eagle_info_v2.EagleDraftInputV2Mixin.prepare_for_decode(None, batch)
    return batch.reqs[0].kv_committed_len - before


def holds_kv(server, session):
    """Whether the session keeps KV between its turns."""
    slot = server.cache.slots.get(session)
    return slot is not None and slot.is_holding_kv


def history(session):
    """What the session's next turn will start with."""
    for node in session.req_nodes.values():
        req = node.req
        length = getattr(session, "committed_origin_len", None)
        return [*req.origin_input_ids[:length], *req.output_ids[: req.sampling_params.max_new_tokens]]
    return []
