"""The profile `containers`: from nothing to orders, each container killed, stops, a rollout, a
memory hog."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from infra.worker_task import MEMORY_HARD_BYTES, MEMORY_SOFT_BYTES
from tests.support.systems.compose import NEXT_IMAGE, PATIENCE, ComposeProject, Customer
from tests.support.systems.compose_file import FLEETS
from tests.support.systems.docker import DockerEnvironment
from tests.support.systems.local import until
from tests.support.workers.hungry_program import SYMBOL

#: The first test builds images, on a machine that has none.
pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]


class Trading:
    """A customer who trades as long as the block runs; `refused` is what did not go well."""

    def __init__(self, stack: ComposeProject, customer: Customer) -> None:
        self._stack, self._customer = stack, customer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._trade)
        self.count = 0
        self.refused: list[str] = []

    def _trade(self) -> None:
        while not self._over.wait(0.05):
            answer = self._stack.order(self._customer)
            self.count += 1
            if answer.status_code != 201:
                self.refused.append(answer.text)

    def __enter__(self) -> "Trading":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)


def lifecycle(stack: ComposeProject, customer: Customer) -> dict[str, Any]:
    lifecycle: dict[str, Any] = stack.worker(customer)["lifecycle"]
    return lifecycle


def test_from_nothing_to_a_filled_order(stack: ComposeProject, alice: Customer) -> None:
    assert stack.filled(alice)
    sizes = {
        name: int(stack.run("docker", "image", "inspect", "--format", "{{.Size}}", name)) / 1e6
        for name in ("berth-server:0.1.0", "berth-worker:0.1.0")
    }
    assert sizes["berth-server:0.1.0"] < 350
    assert sizes["berth-worker:0.1.0"] < 150


def test_a_worker_is_a_container_of_its_own_with_limits_and_no_rights(
    stack: ComposeProject, alice: Customer
) -> None:
    shown = stack.inspect(stack.container_of(alice))
    limits = shown["HostConfig"]
    assert (limits["Memory"], limits["MemorySwap"]) == (MEMORY_HARD_BYTES, MEMORY_HARD_BYTES)
    assert limits["MemoryReservation"] == MEMORY_SOFT_BYTES
    assert (limits["ReadonlyRootfs"], limits["CapDrop"], shown["Mounts"]) == (True, ["ALL"], [])
    assert list(shown["NetworkSettings"]["Networks"]) == ["berth_workers"]


def test_the_launcher_alone_has_the_engines_socket_and_nothing_shows_a_secret(
    stack: ComposeProject, alice: Customer
) -> None:
    described = [stack.inspect(container) for container in stack.containers()]
    socket = str(stack.daemon.socket)
    holders = [
        container["Name"] for container in described if socket in json.dumps(container["Mounts"])
    ]
    assert holders == ["/berth-launcher-1"]
    shown = (
        json.dumps(described)
        + stack.compose("logs")
        + stack.run("docker", "logs", stack.container_of(alice))
    )
    secrets = [
        path.read_text(encoding="utf-8").strip() for path in Path(stack.clone, ".secrets").iterdir()
    ]
    words = [word for text in (*secrets, stack.admin_key, alice.api_key) for word in text.split()]
    assert [word for word in words if word != "requirepass" and word in shown] == []


def test_a_worker_reaches_neither_the_exchanges_admin_api_nor_the_outside(
    stack: ComposeProject, alice: Customer
) -> None:
    script = (
        "import socket\n"
        "for place in (('exchange', 7500), ('exchange', 7501), ('api', 8000), ('192.0.2.1', "
        "443)):\n"
        "    try: socket.create_connection(place, timeout=1).close(); print(place[1], 'open')\n"
        "    except OSError: print(place[1], 'closed')\n"
    )
    # A name of another network is asked of the machine's own resolver, too, which may not answer.
    quick = ("--env", "RES_OPTIONS=timeout:1 attempts:1")
    said = stack.run("docker", "exec", *quick, stack.container_of(alice), "python", "-c", script)
    assert said.split("\n")[:4] == ["7500 open", "7501 closed", "8000 closed", "443 closed"]


#: gRPC, membership and HTTP of Temporal's frontend, then of internal-frontend, matching, history
#: and worker, which listen on loopback. Only gRPC and HTTP of the frontend ask for a login.
FRONTEND_PORTS = (7233, 6933, 7243)
INTERNAL_PORTS = (7236, 6936, 7246, 7235, 6935, 7234, 6934, 7239, 6939)
#: Networks that compose gives to Temporal and to what it needs, and nothing else.
TEMPORALS_NETWORKS = {"temporal-server", "temporal-database"}


def reached_ports(stack: ComposeProject, *runner: str, hosts: list[str]) -> set[str]:
    """What a container reaches of Temporal's ports, as `host:port`; `runner` executes Python in
    it."""
    places = [(host, port) for host in hosts for port in (*FRONTEND_PORTS, *INTERNAL_PORTS)]
    script = (
        "import concurrent.futures, socket\n"
        "def reached(place):\n"
        "    try: socket.create_connection(place, timeout=2).close()\n"
        "    except OSError: return False\n"
        "    return True\n"
        f"places = {places!r}\n"
        f"with concurrent.futures.ThreadPoolExecutor({len(places)}) as threads:\n"
        "    for (host, port), open_ in zip(places, threads.map(reached, places)):\n"
        "        if open_: print(f'{host}:{port}')\n"
        "print('tried')\n"
    )
    *reached, last = stack.run("docker", *runner, "-c", script).split()
    assert last == "tried"
    return set(reached)


def test_no_container_reaches_the_ports_of_temporal_that_ask_for_no_login(
    stack: ComposeProject, alice: Customer
) -> None:
    """From a container on each network of compose, at each address of Temporal's container.

    The stand-in listens where compose's configuration has the real server listen.
    """
    [temporal] = stack.compose("ps", "--quiet", "temporal").split()
    attached = stack.inspect(temporal)["NetworkSettings"]["Networks"]
    assert set(attached) == {f"berth_{name}" for name in TEMPORALS_NETWORKS}
    addresses = {
        name.removeprefix("berth_"): endpoint["IPAddress"] for name, endpoint in attached.items()
    }
    names = stack.run("docker", "network", "ls", "--format", "{{.Name}}").split()
    networks = {name.removeprefix("berth_") for name in names if name.startswith("berth_")}
    assert networks > TEMPORALS_NETWORKS | {"temporal", "database"}
    for network in networks:
        container = ("run", "--rm", "--network", f"berth_{network}", "--entrypoint", "python")
        reached = reached_ports(
            stack, *container, "berth-server:0.1.0", hosts=list(addresses.values())
        )
        # That the ports are open at all is seen from the server's own networks.
        mine = {f"{addresses[network]}:{port}" for port in FRONTEND_PORTS if network in addresses}
        assert reached == mine, network


def test_the_clients_of_temporal_reach_its_port_with_a_login_by_the_proxy_and_nothing_else(
    stack: ComposeProject,
) -> None:
    hosts = ["temporal", "temporal-proxy"]
    for service in ("api", "orchestrator"):
        [container] = stack.compose("ps", "--quiet", service).split()
        reached = reached_ports(stack, "exec", container, "python", hosts=hosts)
        assert reached == {"temporal-proxy:7233"}, service


def test_the_command_line_works_in_a_container(stack: ComposeProject, alice: Customer) -> None:
    berth = ("exec", "-T", "orchestrator", "berth")
    info = re.search(r"(\d+) runners", stack.compose(*berth, "jobs", "info"))
    assert info is not None
    assert int(info[1]) >= len(FLEETS)  # a fleet starts more of them while its jobs wait
    assert alice.user_id in stack.compose(*berth, "worker", "list")


@pytest.mark.parametrize(
    "service",
    [
        "api",
        "orchestrator",
        "launcher",
        "jobs",
        "valkey",
        "temporal",
        "temporal-proxy",
        "postgres",
        "exchange",
    ],
)
def test_orders_are_filled_again_after_a_container_was_killed(
    stack: ComposeProject, alice: Customer, service: str
) -> None:
    is_healthy_again = stack.kill(service)
    until(lambda: stack.filled(alice), f"filled order after the death of {service}", PATIENCE)
    until(is_healthy_again, f"healthy {service}", PATIENCE)


def test_a_killed_worker_is_replaced_and_a_new_customer_is_served(
    stack: ComposeProject, alice: Customer
) -> None:
    before = stack.worker(alice)["mark"]
    stack.run("docker", "kill", stack.container_of(alice))
    until(lambda: stack.filled(alice), "filled order", PATIENCE)
    assert stack.worker(alice)["mark"]["epoch"] > before["epoch"]
    bob = stack.customer()
    until(lambda: stack.filled(bob), "filled order of a new customer", PATIENCE)


def test_planned_stops_are_no_crashes(stack: ComposeProject, alice: Customer) -> None:
    crashes = lifecycle(stack, alice)["crashes"]
    for _ in range(2):
        before = stack.worker(alice)["mark"]["epoch"]
        stack.run("docker", "stop", stack.container_of(alice))
        until(lambda: stack.filled(alice), "filled order after `docker stop`", PATIENCE)
        assert stack.worker(alice)["mark"]["epoch"] > before
    assert lifecycle(stack, alice)["crashes"] == crashes


def test_workers_live_on_when_their_launcher_and_the_api_are_restarted(
    stack: ComposeProject, alice: Customer
) -> None:
    before = stack.container_of(alice)
    stack.compose("restart", "launcher", "api")
    until(lambda: stack.filled(alice), "filled order", PATIENCE)
    assert stack.container_of(alice) == before


def test_a_rollout_to_a_second_image_while_orders_run(
    stack: ComposeProject, alice: Customer
) -> None:
    image = f"berth-worker@{stack.inspect(NEXT_IMAGE)['Id']}"
    berth = ("exec", "-T", "orchestrator", "berth")
    stack.compose(*berth, "images", "allow", image)
    with Trading(stack, alice) as trading:
        release = (
            "--version",
            "0.1.1",
            "--image",
            image,
            "--deadline",
            "5",
            "--quiet",
            "1",
            "--proof",
            "2",
        )
        stack.compose(*berth, "pool", "rollout", "start", *release, "--watch")
        until(lambda: trading.count > 20, "orders", PATIENCE)
    assert trading.refused == []
    assert stack.inspect(stack.container_of(alice))["Config"]["Image"] == image.partition("@")[2]


def test_a_memory_hog_dies_alone(stack: ComposeProject, alice: Customer) -> None:
    hog = stack.customer()
    until(lambda: stack.filled(hog), "filled order", PATIENCE)
    eater, neighbour = stack.container_of(hog), stack.container_of(alice)
    assert stack.inspect(eater)["Config"]["Image"] == stack.inspect(NEXT_IMAGE)["Id"]
    group = DockerEnvironment.memory_group(eater)

    def is_killed() -> bool:
        """An order may meet its deadline on a busy machine, and then nothing was eaten."""
        stack.order(hog, symbol=SYMBOL)
        return group.oom_kills() > 0

    with Trading(stack, alice) as trading:
        until(is_killed, "kill by the kernel", PATIENCE)
        until(lambda: stack.filled(hog), "trading of the hog's customer", PATIENCE)
    assert trading.refused == []
    assert stack.container_of(alice) == neighbour


def test_after_down_nothing_is_left_but_the_data(stack: ComposeProject) -> None:
    assert stack.containers("label=berth.fleet") != []
    stack.compose("down", "--timeout", "20")
    assert stack.run("docker", "ps", "--all", "--quiet") == ""
    networks = stack.run("docker", "network", "ls", "--format", "{{.Name}}").split()
    assert set(networks) == {"bridge", "host", "none"}
    assert "berth_postgres-data" in stack.run("docker", "volume", "ls", "--quiet").split()
