"""One thread runs the device's jobs, in order, whatever happens to those who wait."""

from __future__ import annotations

import threading
import time

import pytest
import trio

from ds4.world.device_thread import DeviceThread
from ds4.world.watchdog import hard_exit_after


def test_jobs_run_in_order_on_one_thread_that_is_not_ours():
    seen = []

    def job(n):
        seen.append((n, threading.get_ident()))
        return n * 2

    async def main():
        async with DeviceThread() as device:
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(device.run, job, n)
            assert await device.run(job, 21) == 42

    trio.run(main)
    threads = {ident for _, ident in seen}
    assert len(seen) == 21
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_exception_reaches_the_one_who_asked_and_nobody_else():
    def bad():
        raise ZeroDivisionError("a test")

    async def main():
        async with DeviceThread() as device:
            with pytest.raises(ZeroDivisionError, match="a test"):
                await device.run(bad)
            assert await device.run(abs, -3) == 3

    trio.run(main)


def test_a_cancelled_wait_lasts_until_the_job_is_done():
    done = []
    release = threading.Event()

    def job():
        release.wait(10)
        done.append(True)

    async def main():
        async with DeviceThread() as device:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(device.run, job)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
                assert not done
                release.set()
            assert done == [True]

    trio.run(main)


def test_the_loop_goes_on_while_the_device_waits():
    async def main():
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await trio.sleep(0.001)
                beats += 1

        async with DeviceThread() as device, trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            await device.run(time.sleep, 0.3)
            nursery.cancel_scope.cancel()
        assert beats > 5

    trio.run(main)


def test_the_thread_ends_with_its_block():
    async def main():
        async with DeviceThread("ds4-test-device") as device:
            await device.run(abs, 1)

    trio.run(main)
    deadline = time.monotonic() + 10
    while any(t.name == "ds4-test-device" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_watchdog_lets_go_of_what_ends_in_time():
    before = threading.active_count()
    with hard_exit_after(60):
        assert threading.active_count() == before + 1
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
