"""The one wait of a pipeline's main thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from penstock.runtime.waker import Waker

UNNOTICED = """
import signal, threading
from penstock.runtime.waker import Waker

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
waker = Waker(stop)
waiting = threading.Event()

def send():
    waiting.wait()
    threading.Event().wait(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread gets it: the main one sleeps on

threading.Thread(target=send).start()
waiting.set()
while not stop.is_set():
    waker.wait(None)
waker.close()
"""


def test_a_signal_that_does_not_interrupt_the_wait_is_noticed() -> None:
    """A pipeline did not end on SIGTERM, since the signal had come just before its main thread fell asleep."""
    subprocess.run([sys.executable, "-c", UNNOTICED], check=True, timeout=60)


def test_a_wait_ends_after_its_time_or_with_an_event() -> None:
    stop = threading.Event()
    waker = Waker(stop)
    began = time.monotonic()
    waker.wait(0.05)
    assert time.monotonic() - began >= 0.05
    stop.set()
    waker.wait(None)
    waker.close()
