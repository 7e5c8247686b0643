"""Pages of the cache: who holds which, and which hold what another sequence needs as well; torch-free."""

from __future__ import annotations

from collections import OrderedDict


class PagePool:
    """A fixed number of pages, counted by how many sequences hold each.

    A page that is full is *sealed* under a digest of its tokens and all before them: from then on nobody writes to it,
    and a sequence with the same beginning shares it. Pages that nobody holds keep what they hold until they are needed;
    those that were let go of first are reused first.
    """

    def __init__(self, num_pages: int, page_size: int, *, is_sharing: bool = True) -> None:
        assert num_pages > 0 and page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self._is_sharing = is_sharing
        self._holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._digest: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, with or without something worth keeping in them."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages so many tokens need."""
        return -(-num_tokens // self.page_size)

    def take(self) -> int:
        """Take a page that nobody holds, to be written to; what it held is forgotten."""
        page, _ = self._free.popitem(last=False)
        digest = self._digest.pop(page, None)
        if digest is not None:
            del self._page[digest]
        self._holders[page] = 1
        return page

    def find(self, digest: bytes) -> int | None:
        """Return the page that is sealed under a digest."""
        return self._page.get(digest)

    def is_free(self, page: int) -> bool:
        """Tell whether nobody holds a page."""
        return self._holders[page] == 0

    def share(self, page: int) -> None:
        """Hold a sealed page, beside whoever holds it already."""
        assert page in self._digest, "a page that is still written to is not shared"
        self._free.pop(page, None)
        self._holders[page] += 1

    def seal(self, page: int, digest: bytes) -> None:
        """Make a full page known under its digest; where another page is, this one stays its holder's own."""
        assert self.is_writable(page)
        if self._is_sharing and digest not in self._page:
            self._digest[page], self._page[digest] = digest, page

    def is_writable(self, page: int) -> bool:
        """Tell whether a page has one holder and is not sealed."""
        return self._holders[page] == 1 and page not in self._digest

    def release(self, page: int) -> None:
        """Let go of a page; one that is sealed stays findable until its place is needed."""
        assert self._holders[page] > 0, "a page is released once by each holder"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free[page] = None
            if page not in self._digest:
                self._free.move_to_end(page, last=False)

    def forget(self) -> None:
        """Forget what free pages hold: after their contents became void."""
        for page in [page for page in self._digest if self._holders[page] == 0]:
            del self._page[self._digest.pop(page)]
