"""Match, Unlock, UnlockSwa, Insert, Evict: the radix tree's own commands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from reference.commands import (
    Evict, Insert, Match, Mode, Prompt, Unlock, UnlockSwa, prompt_len, prompt_of,
)  # fmt: skip
from reference.cursors import eviction_limit, floor_page
from reference.geometry import Geometry
from reference.prefix_cache import key_of, lock_holders
from reference.radix_tree import (
    Key, Node, Sizes, Tree, nodes, path_of, shared_len, sizes, state_paths, usable_length,
)  # fmt: skip
from reference.state import IN_BATCH, Request, Session, State
from impl.choices import once_in, pick
from stateful_tests.generate.commands.shared_arguments import prompts_of
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, Present, harness
from stateful_tests.generate.commands.shared_cases import evicts, page_ends
from stateful_tests.generate.enabled_commands import Enabled, full_alone, pages_left
from stateful_tests.generate.prompts import draw_evicted, draw_prompt, spell_prompt
from stateful_tests.generate.exploration_scope import Scope


def _whole_pages(state: State, prompt: Prompt) -> Key:
    key = key_of(prompt, state.config.geometry.bigram)
    return key[: floor_page(len(key), state.config.geometry.page_size)]


def _length_in_tree(tree: Tree, key: Key) -> int:
    """Return the length of the prefix of `key` that the tree has, usable or not (tokens of the key)."""
    path = path_of(tree, key)
    if not path:
        return 0
    return path[-1].start + shared_len(path[-1].node.key, key[path[-1].start :], tree.page_size)


def _count_nodes(children: tuple[Node, ...]) -> int:
    return sum(1 + _count_nodes(node.children) for node in children)


@harness(
    Match,
    applies=lambda c: len(lock_holders(c.state)) < len(c.profile.lock_holders),
    weight=lambda c: (6 if c.tree_alone else 2) * (1 + c.cached),
    is_in=lambda scope: scope.lock_holders,
)
class MatchHarness(Harness[Match]):
    def draw(self, c: Enabled) -> Match:
        owners = lock_holders(c.state)
        name = c.lock_holder([g for g in c.profile.lock_holders if g not in owners])
        prompt = c.prompt(c.state.config.geometry.width)
        window = c.state.config.geometry.window
        parts = window is not None and "UnlockSwa" not in c.profile.disabled
        return Match(name, prompt, parts and once_in(c.source, 4))

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        if present.lock_holders < scope.lock_holders:
            for prompt in prompts_of(scope):
                yield from (
                    Match(fresh.lock_holder, prompt, alone) for alone in {False, scope.parts}
                )

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        if scope.lock_holders:
            yield Match(name, prompts_of(scope)[0])

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Match(fresh.lock_holder, ())
        yield Match(fresh.lock_holder, prompt_of(f"a{scope.geometry.width + 1}"))

    def case(self, was: State, command: Match, now: State) -> Labels:
        """Label how much of the key was found, why not more, whether a node was split, and a match of full KV
        alone."""
        assert was.tree is not None and now.tree is not None
        key = _whole_pages(was, command.prompt)
        matched = len(lock_holders(now)[command.holder])
        in_tree = _length_in_tree(was.tree, key)
        how = "part of it" if matched else "nothing"
        if matched and matched == len(key):
            how = "all of it"
        short = ""
        if matched < in_tree:
            short = "states keep it short" if was.tree.states else "tombstones keep it short"
        elif command.full_only and matched > usable_length(was.tree, key[:matched]):
            short = "over a tombstone"
        split = _count_nodes(now.tree.children) > _count_nodes(was.tree.children)
        return (
            how,
            short,
            "splits a node" if split else "",
            "full KV alone" if command.full_only else "",
        )


@harness(
    Unlock,
    applies=lambda c: lock_holders(c.state),
    weight=lambda c: (4 if c.tree_alone else 2) * min(len(lock_holders(c.state)), 2),
    is_in=lambda scope: scope.lock_holders,
)
class UnlockHarness(Harness[Unlock]):
    def draw(self, c: Enabled) -> Unlock:
        return Unlock(c.lock_holder(list(lock_holders(c.state))))

    def of_lock_holder(self, scope: Scope, name: str, locked: Key) -> Commands:
        yield Unlock(name)

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        if scope.lock_holders and bearer is not None:
            yield Unlock(name)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Unlock(fresh.lock_holder)

    def case(self, was: State, command: Unlock, now: State) -> Labels:
        return ("pins some" if lock_holders(was)[command.holder] else "pins nothing",)


def _unlock_swa_weight(c: Enabled) -> int:
    """Return the weight of an UnlockSwa: larger if several requests may release the SWA part of their lock,
    or if one just has released it."""
    alone = full_alone(c.state)
    count = sum(r.holder not in alone for r in c.swa_passed)
    if not count:
        return 0
    return 30 if count > 1 or c.last is UnlockSwa else 8


@harness(
    UnlockSwa,
    applies=lambda c: c.swa_unlockable,
    weight=lambda c: 2 + _unlock_swa_weight(c),
    is_in=lambda scope: scope.parts,
)
class UnlockSwaHarness(Harness[UnlockSwa]):
    def draw(self, c: Enabled) -> UnlockSwa:
        return UnlockSwa(c.lock_holder(c.swa_unlockable))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if scope.invalid or request.phase in IN_BATCH:
            yield UnlockSwa(request.name)

    def of_lock_holder(self, scope: Scope, name: str, locked: Key) -> Commands:
        yield UnlockSwa(name)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        if scope.lock_holders:
            yield UnlockSwa(fresh.lock_holder)

    def case(self, was: State, command: UnlockSwa, now: State) -> Labels:
        request = was.request(command.holder)
        owner = "lock holder"
        if request is not None:
            owner = "turn" if request.session is not None else "ordinary"
        return owner, "has none" if was.tree == now.tree else ""


@harness(
    Insert,
    applies=lambda c: c.tree_alone or c.profile.lock_holders,
    weight=lambda c: 12 if c.tree_alone else 4,
    is_in=lambda scope: scope.lock_holders,
)
class InsertHarness(Harness[Insert]):
    def draw(self, c: Enabled) -> Insert:
        """Draw an insert: half the time by a new holder, otherwise by a lock owner with a locked prefix
        that a prompt can spell."""
        bigram = c.state.config.geometry.bigram
        spellable = {}
        for owner, key in lock_holders(c.state).items():
            length = len(key) + 1 if bigram and key else len(key)
            if prompt_len(spell_prompt(key)) == length:
                spellable[owner] = key
        new = [g for g in c.profile.lock_holders if g not in lock_holders(c.state)]
        takes_new = bool(new) and (not spellable or once_in(c.source, 2))
        name = c.lock_holder(new if takes_new else list(spellable))
        locked: Key = spellable.get(name, ())
        geometry = c.state.config.geometry
        longest = len(locked) + pages_left(c.state) * geometry.page_size
        longest += c.source.upto(geometry.page_size - 1)
        longest = max(1, min(geometry.width, longest))
        if c.invalid:
            prompt = c.prompt(longest)
        else:
            after = spell_prompt(locked) if locked else None
            prompt = draw_prompt(c.state, c.source, c.profile.texts, longest, after=after)
        chunked = once_in(c.source, 2)
        if geometry.window is None or c.state.tree is None:
            return Insert(name, prompt, int(c.invalid and once_in(c.source, 4)), chunked)
        limit = prompt_len(prompt) + c.invalid
        if c.state.config.mode is Mode.FAITHFUL and not c.invalid:
            reach = eviction_limit(prompt_len(prompt), geometry.window, geometry.page_size)
            limit = min(limit, max(len(locked), reach))
        evicted = draw_evicted(
            c.state, c.source, key_of(prompt, geometry.bigram), len(locked), limit
        )
        if c.invalid and once_in(c.source, 8):
            evicted = -1
        return Insert(name, prompt, evicted, chunked)

    def of_lock_holder(self, scope: Scope, name: str, locked: Key) -> Commands:
        strangers = 0
        for prompt in prompts_of(scope):
            if key_of(prompt)[: len(locked)] == locked:
                yield from self._inserts_of_prompt(scope.geometry, name, prompt)
            else:
                strangers += 1
                if scope.invalid and strangers == 1:
                    yield Insert(name, prompt)

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        if present.lock_holders < scope.lock_holders:
            for prompt in prompts_of(scope):
                yield from self._inserts_of_prompt(scope.geometry, fresh.lock_holder, prompt)

    def _inserts_of_prompt(self, geometry: Geometry, name: str, prompt: Prompt) -> Iterator[Insert]:
        """Return inserts of a prompt, with each number of its pages evicted, and one that evicts to a
        position inside a page."""
        length = prompt_len(prompt)
        size = geometry.page_size
        evicted = [0]
        if geometry.window is not None:
            evicted = [*range(0, floor_page(length, size) + 1, size)]
            if size > 1 and length > 1:
                evicted.append(1)
        return (Insert(name, prompt, *rest) for rest in product(evicted, (False, True)))

    def misnamed_commands(self, scope: Scope, name: str, bearer: Session | Request | None) -> Commands:
        if scope.lock_holders and bearer is not None:
            yield Insert(name, prompts_of(scope)[0])

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        some = prompt_of("a1")
        yield from (Insert(fresh.lock_holder, ()), Insert(fresh.lock_holder, some, 2))
        if scope.geometry.window is None:
            yield Insert(fresh.lock_holder, some, 1)

    def case(self, was: State, command: Insert, now: State) -> Labels:
        assert was.tree is not None and now.tree is not None
        key = _whole_pages(was, command.prompt)
        end = "goes on" if command.chunked else "ends"
        if len(key) == len(lock_holders(was).get(command.holder, ())):
            return end, "nothing new", "", "", ""
        in_tree = _length_in_tree(was.tree, key)
        out = command.chunked and len(lock_holders(now).get(command.holder, ())) < len(key)
        if in_tree == len(key):
            presence = "all there"
        else:
            presence = "part there" if in_tree else "nothing there"
        room = "evicts for room" if evicts(was, now) else ""
        tombstone = self._tombstone(command, was.tree, now.tree, key)
        return end, presence, tombstone, "kept out" if out else "", room

    def _tombstone(self, command: Insert, was: Tree, now: Tree, key: Key) -> str:
        before = page_ends(was)
        after = page_ends(now)
        if any(live and before.get(end) is False for end, live in after.items()):
            return "revives a tombstone"
        if all(live or end in before for end, live in after.items()):
            return ""
        inside = command.evicted % was.page_size and command.evicted < len(key)
        return "brings a tombstone, evicted to inside a page" if inside else "brings a tombstone"


@harness(
    Evict,
    applies=lambda c: c.cached,
    weight=lambda c: (
        (5 if c.tree_alone else 1)
        * (1 + int(c.state.config.geometry.states > 0) + int(c.orders_differ))
    ),
    is_in=lambda scope: scope.evicts and scope.geometry.tree,
)
class EvictHarness(Harness[Evict]):
    def draw(self, c: Enabled) -> Evict:
        """Draw an eviction of a page, of a node, of everything evictable or of more, in one pool or in
        both."""
        geometry = c.state.config.geometry
        tree = c.state.tree
        if c.invalid and once_in(c.source, 2):
            more = [(1, 0, -1)] if geometry.states else []
            return Evict(*pick(c.source, ((0, 0), (-1, 0), (0, -1), (1, 1), *more)))
        lengths = [len(placed.node.key) for placed in nodes(tree)] if tree is not None else []
        can = sizes(tree) if tree is not None else Sizes(0, 0, 0, 0)

        def amount(evictable: int) -> int:
            node = pick(c.source, lengths or [1])
            return pick(
                c.source, (*[geometry.page_size] * 2, node, max(1, evictable), evictable + 1)
            )

        if c.orders_differ and once_in(c.source, 2):
            return Evict(0, geometry.page_size)
        # Only an eviction of nothing but SWA leaves tombstones, so it is as frequent as the others together.
        states = 0
        if geometry.states and once_in(c.source, 2):
            states = 1 + c.source.upto(geometry.states - 1)
            if not once_in(c.source, 4):  # an eviction of states alone keeps their nodes
                return Evict(0, 0, states)
        pools = "full"
        if geometry.window is not None:
            pools = pick(c.source, ("full", "swa", "swa", "both"))
        full = amount(can.full_evictable) if pools != "swa" else 0
        swa = amount(can.swa_evictable) if pools != "full" else 0
        return Evict(full, swa, states)

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        geometry = scope.geometry
        size = geometry.page_size
        for full, swa in product(range(geometry.full_pages + 1), range(geometry.swa_pages + 1)):
            if full or swa:
                yield Evict(full * size, swa * size)
        yield from (Evict(0, 0, states) for states in range(1, geometry.states + 1))

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        if scope.lock_holders:
            yield from (Evict(0, 0), Evict(-1))
            if scope.geometry.window is None:
                yield Evict(0, 1)
            if scope.geometry.states:
                yield Evict(full=1, swa=0, states=-1)

    def case(self, was: State, command: Evict, now: State) -> Labels:
        """Label what was requested, whether it was freed, and which parents, tombstones and leaves went with
        it."""
        assert was.tree is not None and now.tree is not None
        ends_before = page_ends(was.tree)
        has = page_ends(now.tree)
        size = was.config.geometry.page_size
        full = (len(ends_before) - len(has)) * size
        swa = (sum(ends_before.values()) - sum(has.values())) * size
        requested = "full" if command.full else "window's pool"
        if command.full and command.swa:
            requested = "both pools"
        elif command.states:
            requested = "states"
        lost = len(state_paths(was.tree) - state_paths(now.tree))
        if not full and not lost and (not swa or was.tree.window is None):
            return requested, "nothing evictable", "", "", ""
        short = full < command.full or swa < command.swa or lost < command.states
        gone = {p.node.live for p in nodes(was.tree) if p.node.children and p.path not in has}
        parent = "a parent after its child" if True in gone else ""
        above = "tombstones above go along" if False in gone else ""
        leaves = ((p.path, p.node) for p in nodes(now.tree) if not p.node.children)
        read = any(not node.live and ends_before[path] for path, node in leaves)
        stays = "a leaf that is read becomes a tombstone" if read else ""
        return (
            requested,
            "less than requested" if short else "the amount requested",
            parent,
            above,
            stays,
        )
