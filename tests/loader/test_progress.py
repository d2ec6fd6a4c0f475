"""Progress where stderr is no terminal: a line of the log now and then."""

from dsv4.loader import progress


def test_a_service_says_how_far_it_is(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress._LOG, "info", lambda text, *values: lines.append(text % values))
    with progress.byte_progress(True, 100 * 10**9, "loading weights") as advance:
        for _ in range(10):
            clock[0] += 4
            advance(10 * 10**9)
    assert lines == [
        "loading weights: 30.0 of 100.0 GB, 2.50 GB/s, 28 s left",
        "loading weights: 60.0 of 100.0 GB, 2.50 GB/s, 16 s left",
        "loading weights: 90.0 of 100.0 GB, 2.50 GB/s, 4 s left",
    ]
