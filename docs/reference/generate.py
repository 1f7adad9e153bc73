"""Writes the reference pages that the code itself knows best: settings, CLI, REST, errors, keys,
metrics.

`.venv/bin/python docs/reference/generate.py` writes them, or writes them into the folder that is
its argument. A test compares both.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import infra
from api.app import create_app
from api.http.problems import status_of
from api.http.rights import ADMINS, ALL, OWNERS, RIGHTS, STAFF, Right
from infra.cli.app import app as cli
from infra.metrics import FAMILIES
from infra.process_metrics import COUNTED
from infra.settings import Settings
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.broker_record import AddressLimits, SessionLife
from worker_runtime.protocol.errors import BerthError
from worker_runtime.protocol.installed_brokers import built_in_brokers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Rooms and features whose errors the REST API answers with.
PUBLIC = (
    "api.", "infra.database.", "infra.jobs.", "infra.market.", "infra.temporal.client",
    "infra.valkey.failures", "infra.worker_calls.", "worker_runtime.jobs.protocol.catalog",
    "worker_runtime.protocol.errors", "workflows.",
)  # fmt: skip
_ROLES = {ALL: "all", STAFF: "operator, admin", OWNERS: "user, admin", ADMINS: "admin"}
NOTE = "<!-- written by docs/reference/generate.py; do not edit -->"


def pages() -> dict[str, str]:
    """File name → text of each page."""
    return {
        "settings.md": settings_page(),
        "cli.md": cli_page(),
        "rest.md": rest_page(),
        "broker-records.md": broker_page(),
        "errors.md": errors_page(),
        "keys.md": keys_page(),
        "metrics.md": metrics_page(),
    }


#: The settings that a new installation decides on, and what each decides.
FIRST_SETTINGS = {
    "BERTH_DATABASE_URL": "where every order and assignment is kept",
    "BERTH_VALKEY_URL": "where orders travel to workers",
    "BERTH_TEMPORAL_ADDRESS": "where workflows run",
    "BERTH_ORCHESTRATOR_KEY_DIR": "where the keys are that `berth keys init` makes; the other "
    "files of keys are under *Keys*",
    "BERTH_LAUNCHER": "what runs the workers: processes of this host, containers, or ECS",
    "BERTH_POOL_TARGET": "how many users get a worker without a wait",
    "BERTH_IDLE_TIMEOUT": "how long a worker without orders costs memory",
    "BERTH_LIVE_ACCOUNTS": "whether orders may trade for real",
    "BERTH_CHECK_MAX_NOTIONAL": "the highest value of an order, where the account has no limit of "
    "its own",
    "BERTH_ALERT_MAILS": "who learns that something is wrong",
}


def settings_page() -> str:
    """From `.env.example`: its headings, comments and defaults."""
    lines = [
        NOTE,
        "# Settings",
        "",
        _wrapped(
            "Every setting is an environment variable. All are optional: `make run` needs none of "
            "them. The file `.env.example` lists the same variables with their defaults; to use a "
            "copy of it as `.env`:"
        ),
        "",
        "```sh",
        "set -a; . ./.env; set +a",
        "```",
        "",
        _wrapped(
            "Durations are seconds. Lists and maps are JSON. In a container, a file "
            "`/run/secrets/<name in small letters>` replaces a variable. Use it for addresses "
            "with a password."
        ),
        "",
        _wrapped(
            "A variable that begins with `BERTH_` and that nothing reads ends no process. Each "
            "process logs `setting_unknown` with the nearest name, or `setting_removed` with what "
            "applies now, and `berth doctor settings` names it. "
            "[Which settings were removed](../adr/0022-settings-that-were-removed.md)"
        ),
        "",
        "## Ten to know first",
        "",
        "| variable | default | what it decides |",
        "|---|---|---|",
    ]
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^(BERTH_\w+)=(.*)$", example, re.MULTILINE))
    lines += [
        f"| `{name}` | {_shown_default(defaults[name])} | {decides} |"
        for name, decides in FIRST_SETTINGS.items()
    ]
    comment: list[str] = []
    table = False
    for line in example.split("\n"):
        heading = re.match(r"# --- (.+?)(?: ---)?$", line)
        if heading:
            lines += ["", f"## {_inline(heading[1])}", ""]
            comment, table = [], False
        elif line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
        elif line.startswith("BERTH_"):
            name, _, default = line.partition("=")
            if not table:
                if lines[-1] != "":
                    lines += [""]
                lines += ["| variable | default | what it is |", "|---|---|---|"]
                table = True
            what = _inline(" ".join(comment)) or "″"
            lines.append(f"| `{name}` | {_shown_default(default)} | {what} |")
            comment = []
        else:
            comment = []
    return "\n".join([*lines, ""])


def _shown_default(default: str) -> str:
    return f"`{default.strip(chr(39))}`" if default else "empty"


def cli_page() -> str:
    """From the commands themselves."""
    lines = [
        NOTE,
        "# Command line",
        "",
        _wrapped(
            "The program is `.venv/bin/berth`. In a shell of `make shell` the word `berth` is "
            "enough. Every command explains itself with `--help`."
        ),
        "",
        _wrapped(
            "Commands that go through the REST API find the system that `make run` started in "
            "`.berth/`. `--data FOLDER` names another folder; `--url` and `--key-file` (a file of "
            "mode 0600 with an operator's API key) name another API. `--json` prints JSON instead "
            "of a table. The tables leave these four out."
        ),
        "",
        "Exit codes: 0 when it was done, 1 when it was refused or failed, 2 for a wrong call.",
    ]
    for words, command in _commands(typer.main.get_command(cli), ("berth",)):
        lines += ["", f"## {' '.join(words)}", "", _prose(command.help or "")]
        rows = [_option_row(parameter) for parameter in command.params if not _shared(parameter)]
        if rows:
            lines += ["", "| option | what it does |", "|---|---|", *rows]
    return "\n".join([*lines, ""])


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
        return
    for name, one in below.items():
        if not one.hidden:
            yield from _commands(one, (*words, name))


def _shared(parameter: Any) -> bool:
    """Whether the page explains the option once, at its top."""
    return bool({"--help", "--url", "--key-file", "--json", "--data"} & set(parameter.opts))


def _option_row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or (parameter.name or '').upper()}`"
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"| {names} | {_inline(getattr(parameter, 'help', None) or '')} |"


def _scopes(right: Right | None) -> str:
    if right is None or right.scope is None:
        return "-"
    staff = f", staff `{right.staff_scope}`" if right.staff_scope else ""
    also = f" and `{right.also}`" if right.also else ""
    return f"`{right.scope}`{also}{staff}"


def rest_page() -> str:
    """From the API's OpenAPI document, by the first part of each path's subject."""
    document = create_app(Settings()).openapi()
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            first = (operation.get("description") or "").split("\n\n")[0]
            title = operation["summary"]
            title += "" if title.endswith("?") else "."
            right = RIGHTS.get(f"{method.upper()} {path.removeprefix('/v1')}")
            who = "anyone" if right is None else _ROLES[right.roles]
            row = (
                f"| `{method.upper()}` | `{path}` | {who} | {_scopes(right)} | {title} "
                f"{_inline(first)} |"
            )
            groups.setdefault(operation["tags"][0], []).append(row)
    lines = [
        NOTE,
        "# REST API",
        "",
        _wrapped(
            "Every route, in short. A running API shows the whole description, with fields and "
            "examples, at `/v1/docs` (`make run`: <http://127.0.0.1:8000/v1/docs>), and its "
            "OpenAPI document at `/v1/openapi.json`."
        ),
        "",
        _wrapped(
            "Send your key as `X-API-Key`. An error is `application/problem+json` (RFC 9457) with "
            "a stable [code](errors.md); `retryable` says whether the same call may succeed later."
        ),
        "",
        _wrapped(
            "*Who* names the roles (`api/http/rights.py`). A user's key acts for its own user "
            "only. An operator keeps the system running: pools, rollouts of allowed images, "
            "switches, attention, workers. An operator stores no credentials, makes no keys and "
            "trades for nobody, but cancels orders and closes positions. An administrator may do "
            "everything."
        ),
        "",
        _wrapped(
            "*Scope* is what an API key needs for the route; `-`: any key, or none, may call it. "
            "Where two are named, the second one is for operators and administrators. "
            "[API keys](../how-to/api-keys.md)"
        ),
    ]
    for group in sorted(groups):
        lines += [
            "",
            f"## {group}",
            "",
            "| method | path | who | scope | what it does |",
            "|---|---|---|---|---|",
            *groups[group],
        ]
    return "\n".join([*lines, ""])


def errors_page() -> str:
    """From the error classes: code, status, and the sentence that a person reads."""
    for module in pkgutil.walk_packages(infra.__path__, "infra."):
        if not re.search(r"__main__|\.(lab|aws)\b|migrations", module.name):
            importlib.import_module(module.name)
    public, inner = [], []
    for code, error in sorted(_errors(BerthError).items()):
        text = f"{_inline(error.title())} |"
        if error.__module__.startswith(PUBLIC):
            again = "yes" if error.retryable else "no"
            public.append(f"| `{code}` | {status_of(error)} | {again} | {text}")
        else:
            inner.append(f"| `{code}` | {text}")
    return "\n".join(
        [
            NOTE,
            "# Errors",
            "",
            "A code is part of the contract: it is never renamed, even if its sentence changes.",
            "",
            "## Of the REST API and of orders",
            "",
            "*Again*: whether the same call may succeed later without anyone changing anything.",
            "",
            "| code | status | again | meaning |",
            "|---|---|---|---|",
            *public,
            "",
            "## Of the servers and the command line",
            "",
            "They appear in logs, in the timeline of a worker and on standard error.",
            "",
            "| code | meaning |",
            "|---|---|",
            *inner,
            "",
        ]
    )


def _errors(cls: type[BerthError]) -> dict[str, type[BerthError]]:
    found = {cls.code: cls}
    for below in cls.__subclasses__():
        if not below.__module__.startswith(("infra.lab", "tests")):
            found = {**_errors(below), **found}
    return found


def keys_page() -> str:
    """From the tables at the top of the two modules that build the keys."""
    lines = [
        NOTE,
        "# Keys in Valkey",
        "",
        _wrapped(
            "Braces are part of the name: all keys of one user share a slot of a cluster, and so "
            "do those of one pool. The column *lives* says how long a key stays without being "
            "written again."
        ),
    ]
    for title, module in (("Orders, workers and pools", keys), ("Jobs", job_keys)):
        path = Path(inspect.getfile(module)).relative_to(ROOT)
        rows = re.findall(
            r"^\| (.+?) \| (.+?) \| (.*?) \| (.+) \|$", inspect.getdoc(module) or "", re.M
        )
        lines += ["", f"## {title}", "", f"Built by `{path}`, and by no other module.", ""]
        lines += ["| key | type | lives | holds |", "|---|---|---|---|"]
        lines += [
            f"| `{key}` | {kind} | {lives} | {_inline(holds)} |"
            for key, kind, lives, holds in rows[1:]
        ]
    return "\n".join([*lines, ""])


def metrics_page() -> str:
    """From the two tables of metrics."""
    jobs = {name: family for name, family in FAMILIES.items() if "_jobs" in name}
    books = {name: family for name, family in FAMILIES.items() if name not in jobs}
    lines = [
        NOTE,
        "# Metrics",
        "",
        _wrapped(
            "For Prometheus: [how to scrape them](../how-to/monitor.md), rules and dashboards. No "
            "label holds a user, an account or an order."
        ),
    ]
    for title, about, families in (
        (
            "What the servers tell",
            "`GET /v1/metrics` with an operator's key. They come from PostgreSQL, Valkey and "
            "Temporal's index, so each API gives the same numbers.",
            books,
        ),
        (
            "Jobs",
            "At the same address. Runners count for themselves and send their counts with their "
            "renewals; one that is killed loses what it counted in the last third of a lease. "
            "`berth_user_jobs_…` adds up users' own jobs over all users, with the maintenance "
            "pass of each minute; what a worker counted less than a minute before its end comes "
            "with its user's next worker.",
            jobs,
        ),
        (
            "What processes count",
            "The API's are at `GET /v1/metrics`, too, summed over its processes. An orchestrator "
            "shows its own at `BERTH_METRICS_ADDRESS`; on the port after it are those of "
            "Temporal's SDK (`temporal_…`) and `berth_pool_wanted` (free workers wanted, by "
            "pool). A node shows `berth_node_workers`, the workers that run on its host. The "
            "answers of workers say how long the broker took.",
            COUNTED,
        ),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            _wrapped(about),
            "",
            "| metric | kind | labels | meaning |",
        ]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| `{name}` | {family.kind} | {', '.join(family.labels)} | {_inline(family.about)} |"
            for name, family in families.items()
        ]
    return "\n".join([*lines, ""])


def broker_page() -> str:
    """From the records of the brokers that come with Berth."""
    lines = [
        NOTE,
        "# Records of brokers",
        "",
        _wrapped(
            "What Berth knows of each broker, from its record (`broker.toml`). Checks, limits and "
            "the validation of requests read the same. `berth broker list` shows the brokers of "
            "an installation, plug-ins included. [Add a broker](../how-to/add-a-broker.md) says "
            "how to write one."
        ),
    ]
    for plugin in built_in_brokers().values():
        record = plugin.record
        limits = record.limits
        needed = {"always": "", "live": " (not in simulation)", "never": " (optional)"}
        lines += ["", f"## {record.title}", "", "| fact | value |", "|---|---|"]
        facts = {
            "name, version of the record": f"`{record.name}`, {record.version}",
            "accounts trade for real": "yes, unless in simulation" if record.trades_live else "no",
            "credentials": ", ".join(
                f"`{name}`{needed[field.needed]}" for name, field in record.credentials.items()
            ),
            f"limits, counted per {limits.counted_per.value}": (
                f"{limits.connections} connections, {limits.logins_per_day} logins a day, "
                f"{limits.orders_per_10s} orders in 10 s, {limits.queries_per_5s} queries in 5 s"
            ),
            "limits of an outgoing address": _address_limits(limits.address),
            "a session ends": _session_end(record.session),
            "shortest pause after a refusal": f"{limits.cool_down_s:g} s",
            "characters of an order's tag": str(record.tag_length),
            "a changed quantity means": record.quantity_change.value.replace("_", " "),
            "lists have the orders of all sessions": "yes" if record.lists.all_sessions else "no",
            "only a person can confirm": " ".join(record.unconfirmed) or "nothing",
        }
        lines += [f"| {name} | {_inline(value)} |" for name, value in facts.items()]
        for name, market in record.markets.items():
            hours = (
                f"{market.day.opens:%H:%M} to {market.day.closes:%H:%M}, bell "
                f"{market.day.bell:%H:%M}"
            )
            if market.evening is not None:
                hours += f"; {market.evening.opens:%H:%M} to {market.evening.closes:%H:%M}"
            lines += [
                "",
                f"### {market.title}",
                "",
                f"Accounts of the type `{name}`. {market.currency}; {hours} ({market.zone}).",
                "",
                "| lot | units in one | quantity of an order |",
                "|---|---|---|",
            ]
            lines += [
                f"| `{lot.value}` | {rule.units} | {rule.min_quantity} to {rule.max_quantity} |"
                for lot, rule in market.lots.items()
            ]
            lines += ["", "| lots | price types | times in force | conditions | open or close |"]
            lines += ["|---|---|---|---|---|"]
            lines += [
                "| "
                + " | ".join(
                    ", ".join(f"`{word.value}`" for word in words)
                    for words in (
                        rule.lots,
                        rule.price_types,
                        rule.times_in_force,
                        rule.conditions,
                        rule.open_close,
                    )
                )
                + " |"
                for rule in market.orders
            ]
    return "\n".join([*lines, ""])


def _address_limits(limits: AddressLimits | None) -> str:
    numbers = {
        "connections": limits and limits.connections,
        "logins a day": limits and limits.logins_per_day,
        "orders in 10 s": limits and limits.orders_per_10s,
        "queries in 5 s": limits and limits.queries_per_5s,
    }
    known = [f"{number} {what}" for what, number in numbers.items() if number]
    return ", ".join(known) or "not published"


def _session_end(life: SessionLife) -> str:
    ends = [f"{life.life_s:g} s after its login"] if life.life_s else []
    ends += [f"at {life.ends_at:%H:%M} UTC"] if life.ends_at else []
    return ", and ".join(ends) or "at no known time"


def _wrapped(paragraph: str) -> str:
    """Breaks a paragraph of Markdown into lines, but no code and no link."""
    whole = re.sub(r"`[^`]*`|\[[^]]*\]", lambda match: match[0].replace(" ", "\0"), paragraph)
    lines = textwrap.fill(whole, 100, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def _inline(text: str) -> str:
    """One line of Markdown that shows angle brackets and bars as they are."""
    line = " ".join(text.split()).replace("|", "\\|")
    parts = line.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def _prose(text: str) -> str:
    return "\n\n".join(_inline(part) for part in inspect.cleandoc(text).split("\n\n"))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
