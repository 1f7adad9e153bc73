"""A job's output is kept, bounded, and never holds the job up."""

from __future__ import annotations

import fcntl
import os
import select

from worker_runtime.jobs.child_pool import OutputCapture


def pipe() -> tuple[OutputCapture, int]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    return OutputCapture(reader), writer


def test_a_job_that_writes_without_end_holds_up_nobody() -> None:
    capture, writer = pipe()
    held = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1024 * 1024)
    assert os.write(writer, b"." * held) == held  # it refills the pipe while this is read
    assert capture.read()
    assert select.select([capture.descriptor], [], [], 0)[0]
    capture.close()
    os.close(writer)


def test_beginning_and_end_are_kept() -> None:
    capture, writer = pipe()
    os.write(writer, b"first ")
    for _ in range(100):
        os.write(writer, b"." * 1000)
        assert capture.read()
    os.write(writer, b" last")
    os.close(writer)
    assert not capture.read()
    text = capture.text()
    capture.close()
    assert text.startswith("first .")
    assert text.endswith(". last")
    assert f"… {100_011 - 2 * 8192} bytes left out …" in text


def test_each_job_gets_its_own_part() -> None:
    capture, writer = pipe()
    os.write(writer, "grüße\xff".encode())
    capture.read()
    assert capture.text() == "grüßeÿ"
    assert capture.text() == ""
    os.write(writer, b"\xff")
    capture.read()
    assert capture.text() == "\N{REPLACEMENT CHARACTER}"
    os.close(writer)
    capture.close()
