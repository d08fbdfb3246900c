"""One pool of KV pages: a stack of free page ids on the device, its top on the host.

A page is `page_size` slots; slot and page 0 are padding and never handed out. Nothing here waits
for the device unless the pool is `checked`: how many pages are free is known on the host, because
every caller knows how many it takes and gives.
"""

from __future__ import annotations

from impl.torch_kv.lazy import Tensor, torch

NEVER, HELD, FREED = 0, 1, 2


class PoolError(RuntimeError):
    """The bookkeeping used a pool against its contract."""


class OutOfPagesError(PoolError):
    """More pages asked for than are free."""


class PaddingFreedError(PoolError):
    """Page 0 given back: it is padding, nobody owns it."""


class DoubleFreeError(PoolError):
    """A page given back that is free already, or twice in one call."""


class ForeignSlotError(PoolError):
    """A page given back that this pool does not have, or never handed out."""


class PagePool:
    """Free pages and written stamps of one pool.

    pages: pages that can be handed out (ids 1..pages). page_size: slots of a page.
    stamps: int64 [(pages + 1) * page_size] on `device`, the token last written to each slot, 0 for none.
    checked: `give` proves its argument and raises a PoolError; this waits for the device. Unchecked,
    wrong pages land in the free list, where a reader of the list can find them.
    """

    first_page = 1

    def __init__(self, pages: int, page_size: int, device: torch.device, checked: bool = False) -> None:
        self.pages = pages
        self.page_size = page_size
        self.device = device
        first = self.first_page
        # A stack that grows towards the front: what is free lies behind `_top`, the next to go first.
        self._stack = torch.arange(first, first + pages, dtype=torch.int64, device=device)
        self._top = 0
        self.stamps = torch.zeros((pages + 1) * page_size, dtype=torch.int64, device=device)
        self._waiting: list[Tensor] | None = None
        self._state: Tensor | None = None
        if checked:
            self._state = torch.full((pages + 1,), NEVER, dtype=torch.uint8, device=device)

    @property
    def available(self) -> int:
        """Free pages (host count, duplicates counted as they lie in the list)."""
        return len(self._stack) - self._top

    def free_pages(self) -> Tensor:
        """int64 [available] on the device: the free list as it stands, the next to go first; a view."""
        return self._stack[self._top :]

    def free_list(self) -> list[int]:
        """The same on the host: the device is waited for."""
        listed: list[int] = self._stack.tolist()
        return listed[self._top :]

    def take(self, count: int) -> Tensor:
        """Take `count` pages off the free list: int64 [count] page ids on the device, a view.

        To be read before any pages are given back. Raises OutOfPagesError, and takes nothing, when
        fewer are free.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages asked for, {self.available} free")
        taken = self._stack[self._top : self._top + count]
        if self._state is not None:
            self._state[taken] = HELD
        self._top += count
        return taken

    def give(self, pages: Tensor) -> None:
        """Put `pages`, int64 [n] page ids on the device, on the free list. Costs O(n).

        While frees wait (`hold`) it does so later. Checked, raises PaddingFreedError, ForeignSlotError or
        DoubleFreeError, and gives nothing back.
        """
        if self._waiting is None and self._state is not None:
            self._prove(pages)
            self._state[pages] = FREED
        self.room(pages.numel()).copy_(pages)

    def room(self, count: int) -> Tensor:
        """Where the caller enters `count` pages that it gives back: int64 [count] on the device, a view."""
        if self._waiting is not None:
            self._waiting.append(torch.empty(count, dtype=torch.int64, device=self.device))
            return self._waiting[-1]
        if count > self._top:  # only a double free gets here
            self._stack = torch.cat((self._stack.new_empty(count), self.free_pages()))
            self._top = count
        self._top -= count
        return self._stack[self._top : self._top + count]

    def hold(self) -> None:
        """From now on what is given waits, and is nobody's: not to be taken. Not to be nested."""
        assert self._waiting is None
        self._waiting = []

    def release(self) -> None:
        """All that waits is given back, once."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            self.give(torch.cat(waiting))

    def _prove(self, pages: Tensor) -> None:
        assert self._state is not None
        if bool((pages == 0).any()):
            raise PaddingFreedError("page 0 given back")
        outside = pages[(pages < 0) | (pages > self.pages)]
        if outside.numel():
            raise ForeignSlotError(f"page {int(outside[0])} given back, the pool has {self.pages}")
        state = self._state[pages]
        if bool((state == NEVER).any()):
            raise ForeignSlotError(f"page {int(pages[state == NEVER][0])} given back, never handed out")
        if bool((state == FREED).any()):
            raise DoubleFreeError(f"page {int(pages[state == FREED][0])} given back, free already")
        if torch.unique(pages).numel() != pages.numel():
            raise DoubleFreeError("a page given back twice in one call")
