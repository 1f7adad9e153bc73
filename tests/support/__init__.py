"""Contains what several tests use: harnesses, fakes, stubs, proxies and whole systems.

A `conftest.py` has only the fixtures of its folder; what they make is defined here.

| where | gives |
|---|---|
| `commands`, `interpreters` | the command `berth`, forked; an interpreter that other users reach |
| `databases` | PostgreSQL databases with all tables and no rows |
| `needs` | what a test needs that pip does not install |
| `message_signing` | the tests' message secret, and messages signed with it |
| `message_shapes`, `absurd_messages` | the shape of every message; messages that make no sense |
| `lua_scripts`, `lua_calls` | a synchronous client for Lua scripts; calls as the code makes them |
| `waiting` | waits for conditions that nothing announces |
| `fuzzing` | the settings of the fuzz tests |
| `simulated_hosts`, `ecs_hosts` | hosts in memory; a cluster of ECS on moto |
| `aws_templates`, `aws_scripts` | reading CloudFormation templates; running their scripts |
| `signal_table` | the table of signals in the docs |
| `asyncio_tasks`, `call_tracing` | what asyncio's tasks wait for; the files that calls reach |
| `valkey_flooder` | a program that fills Valkey |
| `tests/support/activities/` | harnesses for activities with real servers |
| `tests/support/api/` | the served API's accounts, orders, webhooks and pages |
| `tests/support/brokers/` | fake brokers, adapter harnesses, clients of the exchange |
| `tests/support/chaos/` | faults, kill steps, streams of orders, the judge of the ledger |
| `tests/support/clients/` | scripted APIs, and connections that lose what they carry |
| `tests/support/jobs/` | the job queue's harness and model, runner processes, an application |
| `tests/support/launchers/` | the fake launcher, faulty ones, a node, ECS on moto |
| `tests/support/orders/` | the model of an order's states, the sweeper's harness |
| `tests/support/proxies/` | proxies that cut, silence, encrypt or kill |
| `tests/support/receivers/` | HTTP servers that jobs send to |
| `tests/support/systems/` | whole systems: processes, Docker, compose |
| `tests/support/workers/` | workers as processes, and scripted ones |
| `tests/support/workflows/` | fake activities, stubs of workflows |

Outside of this folder stay `tests/drills.py` and `tests/groups.py`, which are plugins of pytest
and pytest-xdist; the recorded runs of `tests/replay/`; the model of `tests/unit/model/`; commands
that write files (`tests.contract.protocol.record`, `tests.unit.workflows.lifecycle_diagram`); and
files that are copied into another process (`tests/redteam/hook/`, `tests/ways/hook/`, folders named
`packages`, and `tests/compose/`).
"""
