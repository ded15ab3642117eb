"""DevicePages: a coupled instance's device memory in pages of KVCache, and the prefix cache in what is left of it.

Pages for a request's whole prompt and output are set aside as it is taken in. Where prefixes are reused, the full
blocks of its prompt, a page each, stay when it has ended, until their room is needed: the least recently used first,
and the tail of a prompt before its head. Requests that run at once share equal blocks. Knows nothing of time.
"""

from mooncake_jax.cache.entry import Entry
from mooncake_jax.cache.eviction import POLICIES
from mooncake_jax.cache.tier import Tier
from mooncake_jax.request import Request


class DevicePages:
    """count: pages of page_size tokens; reuses: whether prefixes are. used: pages of requests that are in."""

    def __init__(self, count: int, page_size: int, reuses: bool):
        self.count, self.used = count, 0
        self._page_size, self._reuses = page_size, reuses
        self._tier = Tier(count, POLICIES["lru"]())
        self._held: dict[int, list[Entry]] = {}  # by dispatch number: its blocks, then pages of its own

    def reusable(self, request: Request) -> int:
        """Leading tokens of the prompt whose KVCache is here; the last prompt token is always computed."""
        blocks = self._tier.landed(self._keys(request))
        return min(blocks * self._page_size, request.prompt_tokens - 1)

    def take(self, dispatch: int, request: Request, pages: int) -> bool:
        """Set so many pages aside for a request, those with its blocks included; False, and nothing, if there is no
        room.
        """
        keys = self._keys(request)
        own = [b"page %d of dispatch %d" % (place, dispatch) for place in range(len(keys), pages)]
        shared = [key for key in keys if (entry := self._tier.entries.get(key)) is not None and entry.pins]
        added = len(keys) + len(own) - len(shared)
        if self.used + added > self.count:
            return False
        self._held[dispatch], _ = self._tier.reserve([*keys, *own])
        self.used += added
        return True

    def landed(self, dispatch: int, request: Request) -> None:
        """The whole prompt has been computed: its blocks can be reused."""
        blocks = self._held[dispatch][: len(self._keys(request))]
        self._tier.land([entry for entry in blocks if not entry.landed])

    def release(self, dispatch: int) -> None:
        """The request is no longer here."""
        held = self._held.pop(dispatch)
        self.used -= sum([entry.pins == 1 for entry in held])
        self._tier.use(held)
        self._tier.unpin([entry.key for entry in held])

    def _keys(self, request: Request) -> tuple[bytes, ...]:
        return request.block_keys if self._reuses else ()

    def check(self) -> None:
        """Assert the invariants."""
        self._tier.check()
        pinned = sum(entry.pins > 0 for entry in self._tier.entries.values())
        assert self.used == pinned <= self.count, f"{pinned} pages of {self.count} are counted as {self.used}"
