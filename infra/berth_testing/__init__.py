"""The contract of the broker port as importable tests, a distribution of its own (`berth-testing`).

`suite` has the tests, `harness` what a stage is, `fixtures` the fixtures of pytest, and `sources`
looks for clients that repeat a request.

Not here: the port (`worker_runtime/brokers/port.py`), and tests of one adapter
(`tests/contract/brokers`).
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.suite", f"{__name__}.harness")
