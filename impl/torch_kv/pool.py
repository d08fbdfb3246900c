"""One pool of KV pages: a stack of free page ids on the device, its top on the host.

A page is `page_size` slots; slot and page 0 are padding and never handed out. Nothing here waits
for the device: the host counts free pages, because every caller knows how many it takes and gives.
"""

from __future__ import annotations

from impl.lazy import Tensor, torch


class OutOfPagesError(RuntimeError):
    """More pages were requested than are free."""


class PagePool:
    """Free pages and written stamps of one pool.

    pages: pages that can be handed out (ids 1..pages). page_size: slots of a page.
    stamps: int64 [(pages + 1) * page_size] on `device`, the token last written to each slot, 0 for none.
    A page that is given back is put on the free list unchecked: a reader of the list finds a double free.
    """

    first_page = 1

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        self.pages = pages
        self.device = device
        first = self.first_page
        # A stack that grows towards the front: free pages are those from `_top` on, the next one first.
        self._stack = torch.arange(first, first + pages, dtype=torch.int64, device=device)
        self._top = 0
        self.stamps = torch.zeros((pages + 1) * page_size, dtype=torch.int64, device=device)
        self._waiting: list[Tensor] | None = None

    @property
    def available(self) -> int:
        """Number of free pages, counted on the host. A page that is in the list twice counts twice."""
        return self._stack.numel() - self._top

    def free_pages(self) -> Tensor:
        """Return a view of the free list, the next page first: int64 [available] on the device."""
        return self._stack[self._top :]

    def free_list(self) -> list[int]:
        """Return the free list on the host. Waits for the device."""
        listed: list[int] = self._stack.tolist()
        return listed[self._top :]

    def take(self, count: int) -> Tensor:
        """Take `count` pages off the free list: int64 [count] page ids on the device, a view.

        The caller reads the view before pages are given back: those overwrite it. Raises OutOfPagesError, and
        takes nothing, when fewer are free.
        """
        if count > self.available:
            raise OutOfPagesError(f"{count} pages requested, {self.available} free")
        taken = self._stack[self._top : self._top + count]
        self._top += count
        return taken

    def give(self, pages: Tensor) -> None:
        """Put `pages`, int64 [n] page ids on the device, on the free list. Costs O(n).

        After `hold` the pages are put there by `release`.
        """
        self.room(pages.numel()).copy_(pages)

    def room(self, count: int) -> Tensor:
        """Return the cells in which the caller enters `count` freed pages: int64 [count] on the device, a
        view."""
        if self._waiting is not None:
            self._waiting.append(torch.empty(count, dtype=torch.int64, device=self.device))
            return self._waiting[-1]
        if count > self._top:  # only after a double free: more pages are free than there are
            self._stack = torch.cat((self._stack.new_empty(count), self.free_pages()))
            self._top = count
        self._top -= count
        return self._stack[self._top : self._top + count]

    def hold(self) -> None:
        """Keep pages that are given back off the free list until `release`. Calls are not nested."""
        assert self._waiting is None
        self._waiting = []

    def release(self) -> None:
        """Put the pages that were given back since `hold` on the free list."""
        waiting = self._waiting
        self._waiting = None
        if waiting:
            self.give(torch.cat(waiting))
