"""`python -m api`: the API in `BERTH_API_PROCESSES`
processes on one port, until SIGTERM or SIGINT."""

import resource
import sys

import structlog

from api.processes.master import listen_on, serve_api
from infra.environment import forget_library_variables
from infra.log import configure_log
from infra.processes import forbid_core_files
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings


def main() -> int:
    forbid_core_files()
    forget_library_variables()
    settings = read_settings(Settings)
    configure_log(settings.log_level)
    log_unread_variables()
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # It is often 1,024, which 1,000 slow clients would fill.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    if settings.api_processes == 1:
        # Here, because a master needs neither.
        from api.app import load_app
        from api.http.server import make_server, run_server

        run_server(make_server(settings, load_app(settings)))
        return 0
    try:
        listening = listen_on(settings.api_host, settings.api_port)
    except OSError as error:
        structlog.get_logger().error(
            "start_failed", reason=f"port {settings.api_port}: {error.strerror}"
        )
        return 1
    with listening:
        return serve_api(listening, settings.api_processes)


if __name__ == "__main__":
    sys.exit(main())
