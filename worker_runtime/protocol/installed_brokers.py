"""Finds the records of all installed brokers, without importing their code.

Berth's built-in brokers are folders in `worker_runtime/brokers/`. Others are distributions with an
entry point of the group `berth.brokers`, whose value is the package that has `broker.toml`:

    [project.entry-points."berth.brokers"]
    harbour = "berth_harbour"
"""

import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType

from worker_runtime.protocol.broker_record import (
    BrokerRecordRefused,
    MarketRule,
    Plugin,
    read_holidays,
    read_record,
)
from worker_runtime.protocol.errors import BrokerNotInstalled

GROUP = "berth.brokers"
RECORD_FILE = "broker.toml"
_BUILT_IN = Path(__file__).resolve().parents[1] / "brokers"

Brokers = MappingProxyType[str, Plugin]


@cache
def installed_brokers() -> Brokers:
    """Return all installed brokers by name. Reads files the first time only.

    Raises `BrokerRecordRefused` for a record that cannot be used, and for a name that two brokers
    have.
    """
    plugins = dict(built_in_brokers())
    if has_plugins():
        for plugin in _load_plugins():
            name = plugin.record.name
            if name in plugins:
                raise BrokerRecordRefused(
                    f"Two brokers are named {name!r}; one is of the distribution "
                    f"{plugin.distribution}. Uninstall one of them."
                )
            plugins[name] = plugin
    return MappingProxyType(plugins)


@cache
def built_in_brokers() -> Brokers:
    """Return the brokers that come with Berth, by name."""
    plugins = [load_plugin(path) for path in sorted(_BUILT_IN.glob(f"*/{RECORD_FILE}"))]
    return MappingProxyType({plugin.record.name: plugin for plugin in plugins})


@cache
def paper_exchange() -> str:
    """Return the name of the exchange that comes with Berth."""
    return next(
        name for name, plugin in built_in_brokers().items() if plugin.record.is_paper_exchange
    )


@cache
def announced_brokers() -> str:
    """Return what a worker announces of its brokers: `name=version of its record`, with the
    distribution of a plug-in, such as `harbour=2@berth-harbour-0.3 paper=1`."""
    return " ".join(sorted(plugin.announced for plugin in installed_brokers().values()))


def market_of(broker: str, broker_type: str) -> tuple[Plugin, MarketRule]:
    """Return an account's broker and market. Raises `BrokerNotInstalled`, also if the broker has no
    such market in the record that is installed. A look-up in memory."""
    plugin = installed_brokers().get(broker)
    if plugin is None:
        raise BrokerNotInstalled(
            f"There is no broker {broker} here. Ask an operator to install it."
        )
    if not plugin.record.has_market(broker_type):
        raise BrokerNotInstalled(
            f"The broker {broker} has no market {broker_type} here: version "
            f"{plugin.record.version} of its record is installed. Ask an operator to install a "
            "release that has it."
        )
    return plugin, plugin.record.market(broker_type)


def load_plugin(path: Path, distribution: str = "", release: str = "") -> Plugin:
    """Read a record and its tables of holidays. Raises `BrokerRecordRefused`."""

    def included(name: str) -> str:
        return (path.parent / name).read_text(encoding="utf-8")

    record = read_record(_read_text(path), where=str(path), included=included)
    holidays = {}
    for name, market in record.markets.items():
        if market.holidays:
            # Next to the record, or next to the file of markets that it includes.
            places = (path.parent / market.holidays, path.parent.parent / market.holidays)
            table = next((place for place in places if place.is_file()), None)
            if table is None:
                raise BrokerRecordRefused(
                    f"The broker record {path} cannot be used: markets.{name}.holidays names "
                    f"{market.holidays}, and there is no such file next to it."
                )
            holidays[name] = read_holidays(_read_text(table), where=str(table))
    return Plugin(record, distribution, release, holidays)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerRecordRefused(
            f"The file {path} of a broker record cannot be read: {error}"
        ) from None


def has_plugins() -> bool:
    """Return True if a distribution on the path may have brokers.

    A look at its metadata's files. `importlib.metadata`, which reads them properly, would cost each
    worker 2.8 MB and 50 ms (measured), also where there are no plug-ins.
    """
    mark = GROUP.encode()
    for place in sys.path:
        for pattern in ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt"):
            try:
                if any(mark in path.read_bytes() for path in Path(place or ".").glob(pattern)):
                    return True
            except OSError:
                continue
    return False


def _load_plugins() -> list[Plugin]:
    import importlib.metadata

    plugins = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        distribution = entry.dist
        name = distribution.name if distribution is not None else ""
        release = distribution.version if distribution is not None else ""
        path = _locate(entry.value)
        if path is None:
            raise BrokerRecordRefused(
                f"The distribution {name} has the broker {entry.name!r}, and there is no "
                f"{RECORD_FILE} in its package {entry.value}. Add it to the package's data, or "
                "uninstall the distribution."
            )
        plugin = load_plugin(path, name, release)
        if plugin.record.name != entry.name:
            raise BrokerRecordRefused(
                f"The broker record {path} names {plugin.record.name!r}, and its entry point "
                f"{entry.name!r}. Give both the same name."
            )
        plugins.append(plugin)
    return plugins


def _locate(package: str) -> Path | None:
    """Return the record of a package, which is not imported: only its top-level name is looked
    up."""
    import importlib.util

    top, *rest = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *rest, RECORD_FILE)
        if path.is_file():
            return path
    return None
