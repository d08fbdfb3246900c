"""Prompts that meet what is in the radix tree: the same again, longer, shorter, diverging on the way.

Drawn from the reference's state. What the tree has may be spelt by tokens that no prompt can name
(outputs, a turn's own tokens); a prompt follows a key as far as its texts are shared ones. Lengths are
tokens.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile

from reference.commands import Piece, Prompt, prompt_len
from reference.state import Request, State
from reference.radix_tree import Key, nodes, path_of, state_paths
from reference.token_ids import SHARED, second_of, serial_of, shared_text, token_of
from impl.choices import Choices, once_in, pick


@lru_cache(maxsize=1 << 14)
def spell_prompt(key: Key) -> Prompt:
    """Return the prompt that spells `key`, as far as its texts are shared ones."""
    tokens = [token_of(known) for known in key]
    if key and key[-1] != tokens[-1]:  # of bigrams
        tokens.append(second_of(key[-1]))
    serials = takewhile(lambda serial: serial >= SHARED, map(serial_of, tokens))
    return join_prompts(tuple(Piece(shared_text(serial), 1) for serial in serials))


def input_of(request: Request) -> Prompt:
    """Return the input of a request, as far as its texts are shared ones."""
    pieces = []
    start = 0
    for serial, end in request.history:
        if serial < SHARED:
            break
        pieces.append(Piece(shared_text(serial), end - start))
        start = end
    return tuple(pieces)


def shorten(prompt: Prompt, length: int) -> Prompt:
    """Return the first `length` tokens of a prompt."""
    pieces: list[Piece] = []
    for piece in prompt:
        if length <= 0:
            break
        pieces.append(Piece(piece.text, min(piece.tokens, length)))
        length -= piece.tokens
    return tuple(pieces)


def join_prompts(*prompts: Prompt) -> Prompt:
    """Return the prompts as one; adjacent pieces of the same text become one piece."""
    pieces: list[Piece] = []
    for piece in (p for prompt in prompts for p in prompt):
        if pieces and pieces[-1].text == piece.text:
            piece = Piece(piece.text, pieces.pop().tokens + piece.tokens)
        pieces.append(piece)
    return tuple(pieces)


def known_prompts(state: State) -> list[Prompt]:
    """Return prompts that lead somewhere: to the ends of nodes and of locks, and the inputs of
    requests."""
    prompts: dict[Prompt, None] = {}
    if state.tree is not None:
        prompts.update((spell_prompt(placed.path), None) for placed in nodes(state.tree))
        prompts.update((spell_prompt(lock.key), None) for lock in state.tree.locks)
    prompts.update((input_of(request), None) for request in state.requests)
    prompts.pop((), None)
    return list(prompts)


def draw_length(state: State, source: Choices, high: int) -> int:
    """Draw a length in [1, high], mostly whole pages or about a window of them."""
    page_size = state.config.geometry.page_size
    window = state.config.geometry.window or 1
    how = source.upto(7)
    if how == 0:
        length = page_size * (1 + source.upto(1)) + source.upto(page_size - 1)
    elif how < 4:
        length = page_size * (1 + source.upto(2))
    elif how < 6:
        length = -(-window // page_size) * page_size + page_size * source.upto(1)
    else:
        length = pick(source, (page_size, window, window + page_size)) - 1 + source.upto(2)
    return max(1, min(high, length))


def draw_prompt(
    state: State, source: Choices, texts: str, longest: int, *, after: Prompt | None = None
) -> Prompt:
    """Draw a prompt of 1 to `longest` tokens that often meets a known one.

    after: its first pieces (the prefix that its holder has locked).
    """
    start = after or ()
    if after is None and once_in(source, 3) and (corners := _boundary_prompts(state, longest)):
        start = pick(source, pick(source, corners))
        if (tokens_left := longest - prompt_len(start)) and once_in(source, 2):
            more = Piece(pick(source, texts), draw_length(state, source, tokens_left))
            start = join_prompts(start, (more,))
        return start
    familiar = [
        p for p in known_prompts(state) if after is None or shorten(p, prompt_len(after)) == after
    ]
    page_size = state.config.geometry.page_size
    # diverging inside a page
    if familiar and after is None and page_size > 1 and once_in(source, 6):
        same = pick(source, familiar)
        position = (
            page_size * source.upto((prompt_len(same) - 1) // page_size)
            + 1
            + source.upto(page_size - 2)
        )
        other = Piece(
            pick(source, [t for t in texts if t != same[-1].text] or texts), 2 * page_size
        )
        return shorten(join_prompts(shorten(same, position), (other,)), longest)
    if familiar and not once_in(source, 6):
        start = pick(source, familiar)
        if once_in(source, 2):  # part of it: a node is left inside
            floor = prompt_len(after or ())
            start = shorten(start, max(floor, _draw_inner_length(state, source, prompt_len(start))))
        if start != after and once_in(source, 2):
            return shorten(start, longest)
    for _ in range(1 + once_in(source, 3)):
        tokens_left = longest - prompt_len(start)
        if tokens_left > 0:
            start = join_prompts(
                start, (Piece(pick(source, texts), draw_length(state, source, tokens_left)),)
            )
    return shorten(start, longest)


def _boundary_prompts(state: State, longest: int) -> list[list[Prompt]]:
    """Return prompts that meet locked nodes, in lists by what they meet.

    They end inside a node that is locked in full KV only, or by two holders, or whose lock pins more
        SWA KV than its window needs: such a node is split. Or they end with a tombstone that a lock
        reads: a request that computes one of these, and goes on by less than a window, is kept out of
        the tree. Or with a lock over several nodes: two share a path then. Or with a recurrent state,
        which an admission copies.
    """
    if state.tree is None:
        return []
    size = state.tree.page_size
    window = state.tree.window
    alone, twice, overlong, tombstones, paths, states = groups = [list[Prompt]() for _ in range(6)]
    if state.tree.states:
        states += (spell_prompt(path) for path in state_paths(state.tree))
    for lock in state.tree.locks:
        if len(path_of(state.tree, lock.key)) > 1:
            paths.append(spell_prompt(lock.key))
    if state.tree.locks:
        for placed_node in nodes(state.tree):
            locks = [k for k in state.tree.locks if k.key[: placed_node.end] == placed_node.path]
            if not locks or serial_of(token_of(placed_node.path[0])) < SHARED:
                continue
            cuts = range(placed_node.start + size, placed_node.end, size)
            if window is not None:
                if any(lock.swa_from >= placed_node.end for lock in locks):
                    alone += (spell_prompt(placed_node.path[:end]) for end in cuts)
                for lock in locks:
                    fits = (end for end in cuts if lock.swa_from < end <= len(lock.key) - window)
                    overlong += (spell_prompt(placed_node.path[:end]) for end in fits)
                if not placed_node.node.live:
                    tombstones.append(spell_prompt(placed_node.path))
            if len(locks) > 1:
                twice += (spell_prompt(placed_node.path[:end]) for end in cuts)
    fitting = ([p for p in prompts if 0 < prompt_len(p) <= longest] for prompts in groups)
    return [prompts for prompts in fitting if prompts]


def _draw_inner_length(state: State, source: Choices, length: int) -> int:
    """Draw a length in [1, length], mostly whole pages."""
    page_size = state.config.geometry.page_size
    if length <= page_size or once_in(source, 5):
        return 1 + source.upto(length - 1)
    return page_size * (1 + source.upto(length // page_size - 1))


def draw_evicted(state: State, source: Choices, key: Key, prefix: int, limit: int) -> int:
    """Draw how far a window eviction has freed the SWA KV of a holder that inserts `key`. Often nothing is
    freed, else up to a position that matters: the limit, its prefix, around tombstones and into long ones. At
    most `limit`."""
    assert state.tree is not None
    page_size = state.tree.page_size
    dead = [placed for placed in path_of(state.tree, key) if not placed.node.live]
    long = [p for p in dead if len(p.node.key) > page_size and p.start + page_size <= limit]
    if long and once_in(source, 2):  # a part of it is recovered
        length = pick(source, long)
        pages = (min(limit, length.end - 1) - length.start) // page_size
        return length.start + page_size * (1 + source.upto(pages - 1))
    if limit <= 0 or once_in(source, 2):
        return 0
    marks = [limit, prefix, page_size * source.upto(limit // page_size)]
    marks += [mark for placed in dead for mark in (placed.start, placed.end)]
    mark = pick(source, marks)
    if page_size > 1 and once_in(source, 2):  # inside a page
        mark += source.upto(2 * page_size) - page_size
    return max(0, min(limit, mark))
