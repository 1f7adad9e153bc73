"""`python -m api`: the API in `BERTH_API_PROCESSES` processes on one port, until SIGTERM or SIGINT."""

from __future__ import annotations

import uvicorn

from infra.log import configure_log
from infra.settings import Settings

#: Seconds that requests under way get when the API stops; an order waits for at most 30.
GRACE = 30
#: Seconds without an answer after which uvicorn replaces a process. Its default, 5, is too short on a busy
#: machine: a process answers only between two pieces of work.
HEALTHCHECK_TIMEOUT = 30
#: Seconds an idle connection stays open. Above the 60 s of AWS's load balancer, which would otherwise send a
#: request into a connection that we are closing; uvicorn's default is 5.
KEEP_ALIVE = 75


def main() -> None:
    settings = Settings()
    configure_log(settings.log_level)
    uvicorn.run(
        "api.app:app",
        host=settings.api_host,
        port=settings.api_port,
        workers=settings.api_processes,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-For counts by our own setting only (BERTH_TRUSTED_PROXIES)
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
        timeout_worker_healthcheck=HEALTHCHECK_TIMEOUT,
    )


if __name__ == "__main__":
    main()
