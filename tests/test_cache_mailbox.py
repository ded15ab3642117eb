"""Mailbox: nothing is lost or handed out twice, and every wait ends."""

import signal
import threading
import time

from mooncake_jax.cache.mailbox import Mailbox


def test_items_come_in_order_and_none_after_the_last():
    mailbox = Mailbox()
    assert mailbox.get() is None and mailbox.empty
    for item in range(5):
        mailbox.put(item)
    assert [mailbox.get(), *(mailbox.get(1.0) for _ in range(4)), mailbox.get(0.001)] == [0, 1, 2, 3, 4, None]


def test_a_wait_ends_with_the_first_item_or_at_its_deadline():
    mailbox = Mailbox()
    begun = time.monotonic()
    assert mailbox.get(0.05) is None
    assert time.monotonic() - begun >= 0.05
    threading.Timer(0.05, mailbox.put, ["late"]).start()
    assert mailbox.get(60.0) == "late"
    assert time.monotonic() - begun < 30


def test_many_threads_hand_over_everything_once_while_the_taker_waits_for_moments():
    """Waits that are over before they began come between: those made queue.SimpleQueue wait for ever."""
    mailbox, putters, each = Mailbox(), 4, 2000

    def put(putter):
        for item in range(each):
            mailbox.put((putter, item))

    threads = [threading.Thread(target=put, args=(putter,)) for putter in range(putters)]
    for thread in threads:
        thread.start()
    taken, deadline = [], time.monotonic() + 60
    while len(taken) < putters * each and time.monotonic() < deadline:
        for timeout in (1e-6, 0.0, -1.0, 1e-5):
            if (item := mailbox.get(timeout)) is not None:
                taken.append(item)
    for thread in threads:
        thread.join()
    for putter in range(putters):
        assert [item for who, item in taken if who == putter] == list(range(each))
    assert mailbox.get(1e-6) is None


def test_a_signal_handler_may_put_while_its_thread_waits():
    mailbox = Mailbox()
    before = signal.signal(signal.SIGALRM, lambda *_: mailbox.put("alarm"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert mailbox.get(60.0) == "alarm"
    finally:
        signal.signal(signal.SIGALRM, before)
