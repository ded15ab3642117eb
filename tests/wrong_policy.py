"""A policy that goes wrong now and then, for tests of what becomes of that."""

from mooncake_jax.sched.kvcache_centric import KVCacheCentric


class Wrong:
    """Answers every other request as KVCacheCentric does, and else whatever it is told to."""

    def __init__(self, answer):
        self._answer, self._good = answer, KVCacheCentric()

    def choose(self, request, view, now):
        if int(request.id) % 2:
            return self._answer()
        return self._good.choose(request, view, now)


def raising(error):
    def answer():
        raise error

    return answer
