"""What the tests of KVCachePool do again and again."""


def landed(pool, node, keys):
    """Blocks that a request has left there."""
    blocks = pool.reserve(node, keys)
    pool.land(node, blocks)
    pool.release(node, blocks)
    return blocks
