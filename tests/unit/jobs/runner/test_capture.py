"""What a job writes is kept, bounded, and never holds it up."""

from __future__ import annotations

import os

from worker_runtime.jobs.child_pool import OutputCapture


def pipe() -> tuple[OutputCapture, int]:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    return OutputCapture(reader), writer


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
