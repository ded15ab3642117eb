"""SplitMix64: random bits that are the same on every machine; the standard library promises no sequence for ever."""

STEP = 0x9E3779B97F4A7C15  # from one state to the next


def mixed(state: int) -> int:
    """64 random bits of this state, of which 64 bits count."""
    bits = state % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31
