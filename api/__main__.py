"""`python -m api`: the API in `BERTH_API_PROCESSES` processes on one port, until SIGTERM or SIGINT."""

import os
import resource
from tempfile import TemporaryDirectory

import uvicorn

from api.http.middleware import HeadLimitingProtocol
from infra.environment import forget_library_variables
from infra.log import configure_log
from infra.process_metrics import MULTIPROCESS
from infra.processes import forbid_core_files
from infra.settings import Settings, read_settings

#: Seconds that requests under way get when the API stops; an order waits for at most 30.
GRACE = 30
#: Seconds without an answer after which uvicorn replaces a process. Its default, 5, is too short on a busy
#: machine: a process answers only between two pieces of work.
HEALTHCHECK_TIMEOUT = 30


def main() -> None:
    forbid_core_files()
    forget_library_variables()
    settings = read_settings(Settings)
    configure_log(settings.log_level)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # It is often 1,024, which 1,000 slow clients would fill.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if settings.api_processes == 1:
        _serve(settings)
        return
    with TemporaryDirectory(prefix="berth-metrics-") as shared:
        os.environ[MULTIPROCESS] = shared  # they count together; each reads this when it begins
        _serve(settings)


def _serve(settings: Settings) -> None:
    uvicorn.run(
        "api.app:app",
        host=settings.api_host,
        port=settings.api_port,
        workers=settings.api_processes,
        loop="uvloop",
        http=HeadLimitingProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # http/proxies.py reads them, by BERTH_TRUSTED_PROXIES
        timeout_keep_alive=settings.api_keep_alive,
        timeout_graceful_shutdown=GRACE,
        timeout_worker_healthcheck=HEALTHCHECK_TIMEOUT,
    )


if __name__ == "__main__":
    main()
