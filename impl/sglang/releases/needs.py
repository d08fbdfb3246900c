"""What the adapter uses of a checkout, asked of its files before anything of them is run.

NEEDS is the whole table: since which release, before which one, in which file under `sglang/srt`, and how
it is used: as Python, with `_` for any value, `;` between two. A call that the files could not take is
missing as much as a name. Add a line where a release or the adapter starts to use something else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from impl.sglang.parts.modules import SGLANG

# ruff: noqa: E501
NEEDS = """
0.5.10 ...    managers/schedule_batch.py | Req(rid=_, origin_input_text=_, origin_input_ids=_, sampling_params=_, vocab_size=_)
0.5.10 ...    managers/schedule_batch.py | Req.finished(); Req.init_next_round_input(_); Req.set_finish_with_abort(_)
0.5.10 ...    managers/schedule_batch.py | Req.to_finish; Req.output_ids; Req.origin_input_ids; Req.last_node
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch(reqs=_, req_to_token_pool=_, token_to_kv_pool_allocator=_, tree_cache=_)
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch.prepare_for_extend(); ScheduleBatch.prepare_for_decode()
0.5.10 ...    managers/schedule_batch.py | ScheduleBatch._evict_swa(_, _); FINISH_ABORT(); FINISH_LENGTH(length=_)
0.5.10 0.5.19 managers/schedule_batch.py | ScheduleBatch.release_req(_, _, _); ScheduleBatch.retract_decode(_)
0.5.19 ...    managers/schedule_batch.py | ScheduleBatch.release_req(_, _); ScheduleBatch.retract_decode()
0.5.10 0.5.13 managers/schedule_batch.py | Req.check_finished(_); Req.is_chunked; Req.fill_ids
0.5.13 ...    managers/schedule_batch.py | Req.update_finish_state(_); Req.inflight_middle_chunks; Req.full_untruncated_fill_ids
0.5.10 0.5.15 managers/schedule_batch.py | Req.set_extend_input_len(_)
0.5.13 0.5.15 managers/schedule_batch.py | Req.fill_len
0.5.15 0.5.22 managers/schedule_batch.py | Req.set_extend_range(_, _); Req.extend_range
0.5.22 ...    managers/schedule_batch.py | Req.extend_end; Req.prefix_len; Req.lock; Req.swa_branching_seqlen
0.5.10 0.5.16 managers/schedule_batch.py | Req.kv_allocated_len; Req.swa_evicted_seqlen
0.5.10 0.5.19 managers/schedule_batch.py | Req.req_pool_idx; Req.kv_committed_len; Req.cache_protected_len
0.5.16 ...    managers/schedule_batch.py | Req.kv; ReqKvInfo.kv_allocated_len
0.5.16 0.5.19 managers/schedule_batch.py | ReqKvInfo(kv_allocated_len=_, swa_evicted_seqlen=_)
0.5.19 ...    managers/schedule_batch.py | ReqKvInfo.req_pool_idx; ReqKvInfo.kv_committed_len; ReqKvInfo.cache_protected_len
0.5.19 ...    managers/schedule_batch.py | ReqKvInfo.holds_kv
0.5.16 0.5.21 managers/schedule_batch.py | ReqKvInfo.swa_evicted_seqlen
0.5.21 ...    managers/schedule_batch.py | ReqKvInfo.max_evicted_seqlen; ReqKvInfo.set_evicted_seqlen(_, _)
0.5.20 0.5.22 managers/schedule_batch.py | Req.lock_receipt
0.5.10 0.5.22 managers/schedule_batch.py | Req.prefix_indices
0.5.10 0.5.11 managers/session_controller.py | SessionController(_); SessionController.open(_); SessionController.close(_)
0.5.10 0.5.11 managers/session_controller.py | SessionController.get(_); SessionController.sessions
0.5.10 0.5.11 managers/session_controller.py | SessionController.maybe_reap(_); SessionController._last_reap_time
0.5.10 0.5.11 managers/session_controller.py | Session.create_req(_, _, _); Session.req_nodes
0.5.10 0.5.11 mem_cache/session_aware_cache.py | SessionAwareCache(_); SessionAwareCache.slots; SessionSlot.is_holding_kv
0.5.11 ...    session/session_controller.py | SessionController(_); SessionController.open(_); SessionController.close(_)
0.5.11 ...    session/session_controller.py | SessionController.get(_); SessionController.sessions
0.5.11 ...    session/session_controller.py | SessionController.maybe_reap(_); SessionController._last_reap_time
0.5.11 ...    session/session_controller.py | Session.create_req(_, _, _); Session.req_nodes; Session.close_on_finish
0.5.21 ...    session/session_controller.py | Session.abort_req()
0.5.11 ...    session/streaming_session.py | StreamingSession(_); StreamingSession.slots
0.5.11 0.5.19 session/streaming_session.py | SessionSlot.is_holding_kv
0.5.19 ...    session/streaming_session.py | SessionSlot.kv
0.5.22 ...    session/streaming_session.py | SessionSlot.publishes_prompt
0.5.10 0.5.14 mem_cache/common.py | release_kv_cache(_, _)
0.5.14 0.5.22 mem_cache/common.py | release_kv_cache(_, _, is_insert=_)
0.5.22 ...    mem_cache/common.py | release_kv_cache(_, _, checkpoint=_); checkpoint_kv_cache(_, _); match_kv_cache(_, _, _)
0.5.11 0.5.22 mem_cache/common.py | maybe_cache_unfinished_req(_, _)
0.5.10 0.5.16 mem_cache/common.py | alloc_token_slots(_, _)
0.5.10 0.5.16 mem_cache/common.py | alloc_paged_token_slots_extend(tree_cache=_, prefix_lens=_, prefix_lens_cpu=_, seq_lens=_, seq_lens_cpu=_, last_loc=_, extend_num_tokens=_)
0.5.16 ...    mem_cache/allocation.py | alloc_token_slots(_, _)
0.5.16 ...    mem_cache/allocation.py | alloc_paged_token_slots_extend(tree_cache=_, prefix_lens=_, prefix_lens_cpu=_, seq_lens=_, seq_lens_cpu=_, last_loc=_, extend_num_tokens=_)
0.5.10 0.5.13 mem_cache/allocator.py | TokenToKVPoolAllocator(_, kvcache=_, dtype=_, device=_, need_sort=_); alloc_extend_naive(_, _, _, _, _, _, _)
0.5.10 0.5.13 mem_cache/allocator.py | PagedTokenToKVPoolAllocator(_, _, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.10 0.5.13 mem_cache/swa_memory_pool.py | SWATokenToKVPoolAllocator(size=_, size_swa=_, page_size=_, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.13 ...    mem_cache/allocator/__init__.py | TokenToKVPoolAllocator
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator(_, _, kvcache=_, dtype=_, device=_, need_sort=_); alloc_extend_naive(_, _, _, _, _, _, _)
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.available_size(); PagedTokenToKVPoolAllocator.free_group_begin()
0.5.13 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.free_group_end()
0.5.13 0.5.20 mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.free_pages; PagedTokenToKVPoolAllocator.release_pages
0.5.20 ...    mem_cache/allocator/paged.py | PagedTokenToKVPoolAllocator.get_all_free_pages()
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator(size=_, size_swa=_, page_size=_, kvcache=_, dtype=_, device=_, need_sort=_)
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.full_attn_allocator; SWATokenToKVPoolAllocator.swa_attn_allocator
0.5.13 ...    mem_cache/allocator/swa.py | SWATokenToKVPoolAllocator.full_to_swa_index_mapping; SWATokenToKVPoolAllocator.free_swa(_)
0.5.10 ...    mem_cache/swa_memory_pool.py | SWAKVPool
0.5.10 ...    mem_cache/memory_pool.py | ReqToTokenPool(size=_, max_context_len=_, device=_, enable_memory_saver=_)
0.5.10 ...    mem_cache/memory_pool.py | ReqToTokenPool.free_slots; ReqToTokenPool.req_to_token; ReqToTokenPool.size
0.5.10 ...    mem_cache/cache_init_params.py | CacheInitParams(disable=_, req_to_token_pool=_, token_to_kv_pool_allocator=_, page_size=_, sliding_window_size=_)
0.5.16 ...    mem_cache/cache_init_params.py | CacheInitParams.tree_components
0.5.10 ...    mem_cache/base_prefix_cache.py | MatchPrefixParams(key=_, req=_); EvictParams(num_tokens=_, swa_num_tokens=_)
0.5.10 0.5.17 mem_cache/base_prefix_cache.py | DecLockRefParams(swa_uuid_for_lock=_)
0.5.17 0.5.20 mem_cache/base_prefix_cache.py | DecLockRefParams(swa_uuid_for_lock=_, skip_lock_node_ids=_)
0.5.19 0.5.22 mem_cache/base_prefix_cache.py | IncLockRefResult.to_dec_params(); BasePrefixCache.free_kv_row(_, _)
0.5.10 ...    mem_cache/radix_cache.py | RadixKey(token_ids=_, extra_key=_)
0.5.10 0.5.21 mem_cache/radix_cache.py | RadixCache(_)
0.5.10 0.5.22 mem_cache/chunk_cache.py | ChunkCache(_); SWAChunkCache(_)
0.5.10 0.5.21 mem_cache/swa_radix_cache.py | SWARadixCache(_)
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache(_); ComponentType; UnifiedRadixCache.evict(_); UnifiedRadixCache.match_prefix(_)
0.5.16 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.session; UnifiedRadixCache.full_evictable_size(); UnifiedRadixCache.swa_evictable_size()
0.5.17 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.root_node_handle()
0.5.16 0.5.22 mem_cache/unified_radix_cache.py | UnifiedRadixCache.inc_lock_ref(_); UnifiedRadixCache.dec_lock_ref(_, _)
0.5.22 ...    mem_cache/unified_radix_cache.py | UnifiedRadixCache.lock(_); UnifiedRadixCache.unlock(_); UnifiedRadixCache.prefix_device_indices(_)
0.5.10 0.5.15 speculative/eagle_info_v2.py | EagleDraftInputV2Mixin.prepare_for_decode(_)
0.5.15 ...    speculative/eagle_utils.py | eagle_prepare_for_decode(_)
0.5.10 0.5.13 managers/scheduler_runtime_checker_mixin.py | SchedulerRuntimeCheckerMixin.self_check_during_busy()
0.5.13 ...    managers/scheduler_components/invariant_checker.py | SchedulerInvariantChecker.self_check_during_busy(); SchedulerInvariantChecker._check_req_pool()
0.5.13 ...    managers/scheduler_components/invariant_checker.py | SchedulerInvariantChecker._check_all_pools(_); SchedulerInvariantChecker._report_leak(_, _)
0.5.13 ...    managers/scheduler_components/invariant_checker.py | SchedulerInvariantChecker._check_tree_cache(); SchedulerInvariantChecker._check_pool_invariant(_, _, _, _, _, _, _)
0.5.13 ...    managers/scheduler_components/pool_stats_observer.py | SchedulerPoolStatsObserver.get_pool_stats(); SchedulerPoolStatsObserver.session_held_req_count()
"""


class Need(NamedTuple):
    """A line of the table: what releases from `since` on, before `before`, are asked for in `file`."""

    since: str
    before: str  # "..." stands for none
    file: str
    uses: tuple[ast.expr, ...]


class Missing(NamedTuple):
    """What is not there, as a clause of a sentence, and the file where it was looked for."""

    what: str
    file: str


def _table() -> Iterator[Need]:
    for line in NEEDS.strip().splitlines():
        where, _, uses = line.partition(" | ")
        since, before, file = where.split()
        parsed = [ast.parse(use.strip(), mode="eval").body for use in uses.split(";")]
        yield Need(since, before, file, tuple(parsed))


_NEEDS = tuple(_table())


class Checkout:
    """The files under `root`, which holds `sglang/`; each is read once, and none of it is run."""

    def __init__(self, root: Path) -> None:
        self._srt = root / "sglang/srt"
        self._modules: dict[str, _Module | None] = {}
        self._known: dict[tuple[str, ast.expr], str | None] = {}
        self._classes: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    def missing(self, version: str, order: list[str]) -> list[Missing]:
        """What a release of that version has and these files have not; `order`: all versions."""
        at, found = order.index(version), []
        for need in _NEEDS:
            if order.index(need.since) > at or (need.before != "..." and order.index(need.before) <= at):
                continue
            for use in need.uses:
                if (need.file, use) not in self._known:
                    self._known[need.file, use] = self._lacks(need.file, use)
                if (why := self._known[need.file, use]) is not None:
                    found.append(Missing(why, f"sglang/srt/{need.file}"))
        return found

    def module(self, file: str) -> _Module | None:
        if file not in self._modules:
            path = self._srt / file
            try:
                self._modules[file] = _parsed(path.read_text(encoding="utf-8"))
            except (OSError, SyntaxError, ValueError):
                self._modules[file] = None
        return self._modules[file]

    def _lacks(self, file: str, use: ast.expr) -> str | None:
        """Why a use is not possible, None where it is."""
        module = self.module(file)
        if module is None:
            return "the file cannot be read" if (self._srt / file).exists() else "there is no such file"
        call = use if isinstance(use, ast.Call) else None
        name = ast.unparse(use if call is None else call.func)
        first, _, member = name.partition(".")
        node = self._find(module, first)
        if node is None:
            return f"there is no {first}"
        if isinstance(node, ast.ClassDef) and (member or call):
            members = self._members(module, node)
            if member and member not in members:
                return f"{first} has no {member}"
            node = members.get(member) if member else members.get("__init__", node)
        if call is None or not isinstance(node, ast.FunctionDef | ast.ClassDef):
            return None
        if isinstance(node, ast.ClassDef):
            parameters = _fields(node)
        else:
            parameters = _parameters(node, method=bool(member) or node.name == "__init__")
        return parameters and parameters.refuse(name, len(call.args), [str(k.arg) for k in call.keywords])

    def _find(self, module: _Module, name: str) -> ast.AST | None:
        """What a module calls `name`; an import is followed, one of a module that is not loaded is None."""
        node = module.names.get(name)
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sglang."):
            return node
        assert node.module is not None
        if not SGLANG.is_real(node.module):
            return None
        stem = node.module.removeprefix("sglang.srt.").replace(".", "/")
        [original] = [alias.name for alias in node.names if (alias.asname or alias.name) == name]
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if (other := self.module(file)) is not None and node.module.startswith("sglang.srt."):
                return self._find(other, original)
        return node

    def _members(self, module: _Module, node: ast.ClassDef) -> dict[str, ast.AST]:
        """Methods and fields of a class, those of its bases first."""
        if node in self._classes:
            return self._classes[node]
        members: dict[str, ast.AST] = {}
        for base in node.bases:
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef) and found is not node:
                members |= self._members(self._home(found) or module, found)
        for member in ast.walk(node):
            if isinstance(member, ast.Attribute) and isinstance(member.ctx, ast.Store):
                if isinstance(member.value, ast.Name) and member.value.id == "self":
                    members.setdefault(member.attr, member)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                members[statement.name] = statement
            for target in _targets(statement):
                members[target] = statement
        self._classes[node] = members
        return members

    def _home(self, node: ast.ClassDef) -> _Module | None:
        return next((m for m in self._modules.values() if m and m.names.get(node.name) is node), None)


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What the module defines or imports, also under an `if` or `try`."""
        names: dict[str, ast.AST] = {}
        waiting: list[ast.stmt] = list(self._tree.body)
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] = node
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.If | ast.Try):
                waiting += [*node.body, *node.orelse]
            names |= dict.fromkeys(_targets(node), node)
        return names


@lru_cache(maxsize=128)
def _parsed(text: str) -> _Module:
    return _Module(ast.parse(text))


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


class _Parameters(NamedTuple):
    positional: list[str]
    required: set[str]
    keywords: set[str]
    more: bool  # *args
    any_keyword: bool  # **kwargs

    def refuse(self, name: str, given: int, keywords: list[str]) -> str | None:
        """Why a call is not possible."""
        if given > len(self.positional) and not self.more:
            return f"{name} takes {len(self.positional)} arguments, not {given}"
        for keyword in keywords:
            if keyword not in self.keywords and not self.any_keyword:
                return f"{name} takes no {keyword}"
        for parameter in [*self.positional, *sorted(self.keywords)]:
            if parameter in self.required - {*self.positional[:given], *keywords}:
                return f"{name} wants a {parameter}, which the adapter does not give"
        return None


def _parameters(node: ast.FunctionDef, *, method: bool) -> _Parameters | None:
    if any("property" in ast.unparse(d) for d in node.decorator_list):
        return None
    args = node.args
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    names = [a.arg for a in (*args.posonlyargs, *args.args)][method and not static :]
    required = set(names[: len(names) - len(args.defaults)] if args.defaults else names)
    kwonly = {a.arg for a in args.kwonlyargs}
    required |= {a.arg for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None}
    return _Parameters(names, required, {*names} | kwonly, args.vararg is not None, args.kwarg is not None)


def _fields(node: ast.ClassDef) -> _Parameters | None:
    """The parameters of a dataclass or named tuple; None of a class that inherits its own."""
    told = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
    if not any("dataclass" in part or "NamedTuple" in part for part in told):
        return None
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
    fields = [s for s in fields if "ClassVar" not in ast.unparse(s.annotation)]
    names = [name for field in fields for name in _targets(field)]
    required = {name for field in fields if field.value is None for name in _targets(field)}
    bases = {"NamedTuple", "Protocol", "ABC", "object"}
    inherits = any(ast.unparse(base).rpartition(".")[2] not in bases for base in node.bases)
    return _Parameters(names, required, {*names}, inherits, inherits)
